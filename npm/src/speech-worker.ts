/** The worker of transcribers, whose engine has nothing else. */

import { engineModule } from "./wasm.js";
import { serve } from "./worker/serve.js";
import { speechHandlers } from "./worker/transcriber.js";

engineModule.file = "tilewright_speech_bg.wasm";
void serve({ handlers: speechHandlers, what: "a transcriber" });
