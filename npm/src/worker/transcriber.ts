/** Transcribers, in a worker with an engine for speech alone. */

import type { SpeechCallName, TranscriberRequest } from "../protocol.js";
import { inMemory } from "../source.js";
import { Loader, Sha256, type Transcriber } from "../tilewright_speech.js";
import { commonHandlers, on } from "./common-handlers.js";
import { limited, type Recipe } from "./load.js";
import { load, LoadedFunction } from "./loaded-model.js";
import type { CallContext, Handlers } from "./port.js";

function transcriberRecipe(request: TranscriberRequest): Recipe<Transcriber> {
  return {
    request,
    extras: [],
    gather: (files) => inMemory(files, () => new Sha256()),
    begin: (device, files, memoryLimit) => Loader.transcriber(device, files, limited(request.settings, memoryLimit)),
  };
}

class LoadedTranscriber extends LoadedFunction<Transcriber> {
  transcribe({ samples, settings }: { samples: Float32Array; settings: object }, { signal, emit }: CallContext<"transcribe">): ReturnType<Handlers["transcribe"]> {
    // Windows that were reported before a device was lost are not reported again.
    let nReported = 0;
    return this.run(signal, (transcriber) => {
      let n = 0;
      return transcriber.transcribe(samples, settings, (segments) => {
        n += 1;
        if (n > nReported) {
          nReported = n;
          emit(segments);
        }
      });
    });
  }
}

export const speechHandlers: Pick<Handlers, SpeechCallName | keyof typeof commonHandlers> = {
  ...commonHandlers,
  loadTranscriber: (request, context) => load(LoadedTranscriber, transcriberRecipe(request), context),
  transcribe: on(LoadedTranscriber, (transcriber, args, context) => transcriber.transcribe(args, context)),
  detectLanguage: on(LoadedTranscriber, (transcriber, { samples }, { signal }) => transcriber.run(signal, (it) => it.detectLanguage(samples))),
  subtitles: on(LoadedTranscriber, ({ loaded }, { segments, format }) => loaded.subtitles(segments, format)),
};
