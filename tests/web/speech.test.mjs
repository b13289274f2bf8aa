// Speech to text in the package, in Chromium and in Node, on WebGPU and on the CPU: a tiny model's probabilities and tokens are those of
// transformers, its transcripts those that Rust has, with the same tokens and times; a real model's text; sound files that the browser decodes; aborting, invalid input, a lost device.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { devicesIn, everywhere, places, published, server } from "./places.mjs";
import { bytesInMemory, dataPath, lacksData, repository } from "./server.mjs";
import { tensors, uniform } from "./tensors.mjs";

const limited = { timeout: process.env.TILEWRIGHT_FULL ? 600_000 : 120_000 };
const folder = join(repository, "tests/data/tiny-random-sound");
const files = Object.fromEntries(
  readdirSync(folder).filter((name) => /^(config|generation_config|tokenizer)\.json$|^model\.safetensors$/.test(name)).map((name) => [name, readFileSync(join(folder, name))]));
const want = JSON.parse(readFileSync(join(folder, "transcript.json"), "utf8"));

/** Samples of a WAV file of 8 or 16 bits in one channel. */
function samplesOf(path) {
  const bytes = readFileSync(path);
  const at = bytes.indexOf("data") + 8;
  const pcm = bytes.subarray(at, at + bytes.readUInt32LE(at - 4));
  return bytes.readUInt16LE(34) === 8 ? Float32Array.from(pcm, (sample) => (sample - 128) / 128)
    : Float32Array.from({ length: pcm.length / 2 }, (_, i) => pcm.readInt16LE(2 * i) / 32768);
}

/** The sounds of `tests/sound.rs`, one after the other. */
const sound = (() => {
  const [first, second] = ["chirp.wav", "short.wav"].map((name) => samplesOf(join(folder, name)));
  return [first, second, first, second].flatMap((part) => [...part]);
})();

/** Neither retries nor silence: the weights are random. */
const greedy = { language: "English", temperatures: [0], maxNoSpeech: 2, timestamps: false, words: true };

/** Runs in a place: a transcript, as told while it comes and as a whole, and its subtitles. */
async function transcribed({ Transcriber }, { source, device, sound, options, isLost }) {
  const notices = [];
  const transcriber = await Transcriber.load(source, { device, cache: false, kvType: "f32", onNotice: ({ code }) => notices.push(code) });
  const told = [];
  const given = Float32Array.from(sound);
  if (isLost) await transcriber.destroyDevice();
  const found = await transcriber.transcribe(given, { ...options, onSegment: (segment) => told.push(segment) });
  const detected = await transcriber.detectLanguage(given.slice(0, 48_000));
  const subtitles = { srt: await transcriber.toSrt(found), vtt: await transcriber.toVtt(found) };
  const memory = await transcriber.memory();
  const outcome = { found, told, detected, subtitles, info: transcriber.info, on: transcriber.device, isKept: given.length === sound.length, memory, notices };
  transcriber.free();
  return outcome;
}

function isTheTranscript({ found, told, detected, subtitles, info, isKept, memory }) {
  assert.deepEqual([info.name, info.architecture, info.languages, info.translates, info.nEncoderLayers], ["tiny", "whisper", ["en", "de"], true, 2]);
  assert.ok(info.fileBytes > 280_000 && memory.totalBytes > 100_000 && memory.wasmHeapBytes > 0);
  assert.ok(isKept, "the caller's samples are still there");
  assert.deepEqual([found.text, found.language], [want.text, "en"]);
  assert.ok(Math.abs(found.seconds - sound.length / 16_000) < 1e-9);
  const rounded = (seconds) => Math.round(seconds * 1000) / 1000;
  const of = (text, { start, end }) => [text, rounded(start), rounded(end)];
  assert.deepEqual(
    found.segments.map((it) => ({ span: of(it.text, it), tokens: it.tokens, seek: it.seek, words: it.words.map((word) => of(word.text, word)) })),
    want.segments.map((it) => ({ span: of(it.text, it), tokens: it.tokens, seek: it.seek, words: it.words.map((word) => of(word.word, word)) })),
  );
  found.segments.forEach(({ meanLogProbability, noSpeech, compressionRatio }, i) => {
    const { avg_logprob, no_speech_prob, compression_ratio } = want.segments[i];
    for (const [one, other] of [[meanLogProbability, avg_logprob], [noSpeech, no_speech_prob], [compressionRatio, compression_ratio]]) {
      assert.ok(Math.abs(one - other) < 1e-3, `${one}, expected ${other}`);
    }
  });
  assert.deepEqual(told, found.segments);
  // The language of the first sound, by the references' logits behind the start.
  const [, sure] = [3, 4].map((id) => logitsOf(0, 0)[id]).map((logit, i, both) => 1 / (1 + Math.exp(both[1 - i] - logit)));
  assert.equal(detected.language, sure > 0.5 ? "de" : "en");
  assert.ok(Math.abs(detected.probability - Math.max(sure, 1 - sure)) < TOLERANCE, `${detected.probability}, expected ${sure}`);
  assert.equal(subtitles.srt.match(/ --> /g).length, found.segments.length);
  assert.match(subtitles.srt, /^1\n00:00:00,\d{3} --> 00:00:0\d,\d{3}\n/);
  assert.match(subtitles.vtt, /^WEBVTT\n\n00:00:00\.\d{3} --> /);
}

/** A test in each place and on each of its devices; skipped where Node has no WebGPU. */
function onDevices(name, body) {
  for (const [place, execute] of Object.entries(places)) {
    for (const device of devicesIn(place)) {
      test(`${place}, ${device}: ${name}`, limited, async (t) => {
        try {
          await body(place, async (run, given) => {
            const outcome = await execute(run, { device, ...given });
            assert.deepEqual([].concat(outcome).map(({ on }) => on.backend === "cpu"), [].concat(outcome).map(() => device === "cpu"));
            return outcome;
          });
        } catch (error) {
          if (place === "Chromium" || error.code !== "webgpu_unavailable" || process.env.REQUIRE_ADAPTER) throw error;
          t.skip(error.message);
        }
      });
    }
  }
}

const TOLERANCE = 2e-4;
const N_TOKENS = 293;
const references = tensors(join(folder, "refs.safetensors"));

/**
 * Files that let the model continue any of the references' tokens: those before the last two are a prompt, behind a token for earlier text, and
 * those two are called the start and the one that asks for no times. What may follow is below the last one. `noSpeech`: the token whose
 * probability behind the start is told as that of no speech.
 */
function continuing(ids, { noSpeech, end }) {
  const [earlier, prompt, [start, noTimes]] = [ids.length > 2 ? ids[0] : undefined, ids.slice(1, -2), ids.slice(-2)];
  const taken = new Set([...ids, noSpeech, end]);
  const spare = Array.from({ length: N_TOKENS - 1 }, (_, id) => id).filter((id) => !taken.has(id));
  const texts = Array.from({ length: N_TOKENS }, (_, id) => `text${id}`);
  const special = { startofprev: earlier, notimestamps: noTimes, nospeech: noSpeech };
  for (const [name, id] of Object.entries(special)) if (id !== undefined) texts[id] = `<|${name}|>`;
  // A space begins a prompt; its tokens are single letters, but for the first.
  [texts[spare[0]], texts[spare[1]]] = ["Ġ", "a"];
  const letters = [...new Set(prompt)].map((id, i) => [id, i ? String.fromCharCode(97 + i) : "Ġa"]);
  for (const [id, letter] of letters) texts[id] = letter;
  const added = (id) => ({ id, content: texts[id], single_word: false, lstrip: false, rstrip: false, normalized: false, special: true });
  const bytes = { type: "ByteLevel", add_prefix_space: false, trim_offsets: true, use_regex: true };
  const tokenizer = {
    version: "1.0", added_tokens: Object.values(special).filter((id) => id !== undefined).map(added), pre_tokenizer: bytes, decoder: bytes,
    model: { type: "BPE", vocab: Object.fromEntries(texts.map((text, id) => [text, id])), merges: prompt.length ? ["Ġ a"] : [] },
  };
  const generation = { decoder_start_token_id: start, eos_token_id: end, is_multilingual: false };
  const byId = new Map(letters);
  return {
    files: { ...files, "tokenizer.json": JSON.stringify(tokenizer), "generation_config.json": JSON.stringify(generation) },
    prompt: prompt.map((id) => byId.get(id).replace("Ġ", "")).join(""),
  };
}

/** Runs in a place: the first segment of each sound with a model of its own. */
async function continued({ Transcriber }, { device, cases }) {
  const found = [];
  for (const { source, sound, prompt } of cases) {
    const transcriber = await Transcriber.load(source, { device, cache: false, kvType: "f32" });
    const options = { prompt, temperatures: [0], maxNoSpeech: 2, timestamps: false };
    const { segments } = await transcriber.transcribe(Float32Array.from(sound), options);
    found.push({ ...segments[0], on: transcriber.device });
    transcriber.free();
  }
  return found;
}

/** The logits behind the `n`-th token of a case. */
const logitsOf = (i, n) => references(`${i}.logits`).slice(n * N_TOKENS, (n + 1) * N_TOKENS);
const highestOf = (logits, isAllowed) => logits.reduce((most, logit, id) => isAllowed(id) && !(logit <= logits[most]) ? id : most, undefined);

function logProbability(logits, id) {
  const most = Math.max(...logits);
  return logits[id] - most - Math.log(logits.reduce((sum, logit) => sum + Math.exp(logit - most), 0));
}

onDevices("probabilities and greedy tokens are the references'", async (place, execute) => {
  const [first, second] = ["chirp.wav", "short.wav"].map((name) => [...samplesOf(join(folder, name))]);
  const ids = references("0.ids");
  const [greedyFirst, greedySecond] = [0, 1].map((i) => references(`${i}.greedy.ids`));
  const likeliest = (logits, without) => highestOf(logits, (id) => !without.includes(id));
  const given = [
    // Behind all of the first case's tokens.
    { i: 0, row: ids.length - 2, sound: first, ids, end: 2 },
    // Behind the first three of its greedy tokens, up to the end.
    { i: 0, sound: first, ids: [1, ...greedyFirst.slice(0, 3)], end: 2, greedy: greedyFirst.slice(3, greedyFirst.indexOf(2)) },
    // Behind the first greedy token of the second case, as far as tokens are below it.
    { i: 1, row: 0, sound: second, ids: [1, greedySecond[0]], end: 2, greedy: greedySecond.slice(1, greedySecond.findIndex((id) => id > greedySecond[0])) },
  ];
  for (const it of given) it.noSpeech = likeliest(logitsOf(it.i, it.row ?? 0), [...it.ids, it.end, ...(it.greedy ?? [])]);
  const models = given.map((it) => continuing(it.ids, it));
  const cases = models.map(({ files, prompt }, n) => ({ source: published(place, `case${n}`, files), sound: given[n].sound, prompt }));
  const found = await execute(continued, { cases });
  given.forEach(({ i, row, ids, noSpeech, end, greedy }, n) => {
    const { tokens, noSpeech: probability } = found[n];
    if (row !== undefined) {
      const off = Math.abs(Math.log(probability) - logProbability(logitsOf(i, row), noSpeech));
      // Both the logit and the sum may be off.
      assert.ok(off < 2 * TOLERANCE, `case ${n}: off by ${off}`);
    }
    if (greedy) {
      assert.ok(greedy.length > 2);
      assert.deepEqual(tokens.slice(0, greedy.length), greedy, `case ${n}`);
      if (n === 1) assert.equal(tokens.length, greedy.length);
    } else {
      const isAllowed = (id) => id < ids.at(-1) && ![ids[0], ids.at(-2), noSpeech, end].includes(id);
      assert.equal(tokens[0], highestOf(logitsOf(i, row + 1), isAllowed));
    }
  });
});

onDevices("a transcript has the tokens and times that it has in Rust", async (place, execute) => {
  isTheTranscript(await execute(transcribed, { source: published(place, "tiny", files), sound, options: greedy }));
});

test("Chromium: a transcript is the same after the device was lost", limited, async () => {
  const outcome = await places.Chromium(transcribed, { source: published("Chromium", "tiny", files), device: "gpu", sound, options: greedy, isLost: true });
  isTheTranscript(outcome);
  assert.ok(outcome.notices.includes("device_rebuilt"), outcome.notices.join());
});

/** Runs in a page: texts of a sound in all forms, and what of it is no sound. */
async function ofAllForms({ Transcriber }, { source, url, options, bad }) {
  const transcriber = await Transcriber.load(source, { device: "cpu", cache: false, kvType: "f32" });
  const bytes = await (await fetch(url)).arrayBuffer();
  const decoded = await new OfflineAudioContext(1, 1, 16_000).decodeAudioData(bytes.slice(0));
  const faster = await new OfflineAudioContext(1, 1, 48_000).decodeAudioData(bytes.slice(0));
  const refused = (sound, more) => transcriber.transcribe(sound, { ...options, ...more }).then(() => "no error", ({ code, message }) => `${code}: ${message}`);
  const told = { texts: [], errors: [] };
  for (const sound of [url, new URL(url), new Blob([bytes]), new File([bytes], "a.wav"), bytes.slice(0), new Uint8Array(bytes), decoded, decoded.getChannelData(0)]) {
    const { text, seconds } = await transcriber.transcribe(sound, options);
    told.texts.push([text, seconds]);
  }
  // Resampled by the browser: other samples, nearly as many.
  for (const [sound, more] of [[faster, {}], [faster.getChannelData(0), { sampleRate: 48_000 }]]) {
    told.texts.push([undefined, (await transcriber.transcribe(sound, { ...options, ...more })).seconds]);
  }
  told.errors.push(await refused(new Blob(["words"])), await refused(bad), await refused(5), await refused(decoded, { sampleRate: 8000 }), await refused(new Float32Array(2), { sampleRate: 0 }));
  transcriber.free();
  return told;
}

test("Chromium: files of all forms are decoded and resampled, and what is no sound is refused", limited, async () => {
  server.files.set("chirp.wav", bytesInMemory(readFileSync(join(folder, "chirp.wav"))));
  const { texts, errors } = await places.Chromium(ofAllForms, {
    source: published("Chromium", "tiny", files), url: `${server.origin}/files/chirp.wav`, bad: `${server.origin}/files/none.wav`, options: { ...greedy, words: false },
  });
  const [[text]] = texts;
  assert.ok(text.length > 0);
  for (const [other, seconds] of texts) {
    assert.ok(other === undefined || other === text, other);
    assert.ok(Math.abs(seconds - 3) < 0.001, `${seconds} s`);
  }
  assert.match(errors[0], /^not_a_sound: the sound cannot be decoded/);
  assert.match(errors[1], /^http: .*none\.wav is an error \(HTTP status 404\)/);
  assert.match(errors[2], /^option: sound is Number, expected a Float32Array/);
  assert.match(errors[3], /^option: sampleRate is for samples/);
  assert.match(errors[4], /^option: sampleRate is 0, expected 1 to 768000/);
});

/** Runs in a place: errors by their codes, and calls after them. */
async function faulty({ Embedder, Transcriber }, { source, textModel, sound, options }) {
  const transcriber = await Transcriber.load(source, { device: "cpu", cache: false, kvType: "f32" });
  const given = Float32Array.from(sound);
  const said = (promise) => promise.then(() => "no error", (error) => error?.code === undefined ? String(error) : `${error.code}: ${error.message}`);
  const abort = new AbortController();
  const aborted = said(transcriber.transcribe(given, { temperatures: [0], signal: abort.signal, onSegment: () => abort.abort("enough") }));
  const errors = {
    aborted: await aborted,
    nan: await said(transcriber.transcribe(Float32Array.of(0.1, NaN))),
    language: await said(transcriber.transcribe(given, { language: "klingon" })),
    task: await said(transcriber.transcribe(given, { task: "sing" })),
    temperatures: await said(transcriber.transcribe(given, { temperatures: [] })),
    blob: await said(transcriber.transcribe(new Blob(["RIFF"]))),
    rate: await said(transcriber.transcribe(given, { sampleRate: 8000 })),
    on: await said(Embedder.load(source, { on: transcriber })),
    text: await said(Transcriber.load(textModel, { device: "cpu", cache: false })),
  };
  const silence = [];
  for (const length of [0, 1, 80_000]) {
    const samples = new Float32Array(length);
    silence.push({ ...await transcriber.transcribe(samples), detected: await transcriber.detectLanguage(samples) });
  }
  const after = (await transcriber.transcribe(given, options)).text;
  transcriber.free();
  return { errors, silence, after, freed: await said(transcriber.transcribe(given)) };
}

everywhere("what cannot be transcribed is refused, and the next call works", faulty, ({ errors, silence, after, freed }, place) => {
  assert.equal(errors.aborted, "enough");
  assert.match(errors.nan, /^operand: sound: `samples` is NaN at sample 1/);
  assert.match(errors.language, /^option: option language is klingon, expected .*en, de/);
  assert.match(errors.task, /^option: option task is sing, expected transcribe, translate/);
  assert.match(errors.temperatures, /^option: option temperatures is/);
  assert.match(errors.on, /^option: a transcriber cannot be what another object is loaded on/);
  assert.match(errors.text, /^unsupported: .*a Hugging Face folder of a Whisper model/);
  if (place === "Node") {
    assert.match(errors.blob, /^option: sound is Blob, expected a Float32Array of samples at 16000 Hz: here is no OfflineAudioContext/);
    assert.match(errors.rate, /^option: the samples have 8000 Hz, expected a Float32Array of samples at 16000 Hz/);
  } else {
    assert.match(errors.blob, /^not_a_sound: /);
    assert.equal(errors.rate, "no error");
  }
  for (const { text, language, segments, detected } of silence) assert.deepEqual([text, language, segments, detected], ["", "", [], null]);
  assert.equal(after, want.text);
  assert.match(freed, /^disposed: /);
}, (place) => ({
  source: published(place, "tiny", files), sound, options: greedy,
  textModel: place === "Chromium" ? server.url("assets/stories.gguf") : join(repository, "assets/stories.gguf"),
}));

/** A random model in whisper.cpp's format, with a window of 3 seconds: the tokens are single bytes. */
function tinyGgml() {
  const [dim, nRows, nContext, nBands, nText, nMarks] = [16, 150, 64, 80, 256, 1510];
  const parts = [Buffer.from("lmgg")];
  const put = (...numbers) => parts.push(Buffer.from(Uint32Array.from(numbers).buffer));
  put(nText + nMarks, nRows, dim, 2, 1, nContext, dim, 2, 1, nBands, 0);
  put(nBands, 2);
  parts.push(Buffer.alloc(4 * nBands * 2));
  put(nText);
  for (let byte = 0; byte < nText; byte++) {
    put(1);
    parts.push(Buffer.from([byte]));
  }
  let seed = 1;
  const tensor = (name, ...shape) => {
    put(shape.length, name.length, 0, ...shape.toReversed());
    const isNorm = /ln[^.]*\.weight$/.test(name);
    parts.push(Buffer.from(name), Buffer.from(uniform(shape.reduce((n, x) => n * x, 1), seed += 1).map((x) => isNorm ? 1 + x / 8 : x / 2).buffer));
  };
  const linear = (name, rows, columns, hasBias = true) => {
    tensor(`${name}.weight`, rows, columns);
    if (hasBias) tensor(`${name}.bias`, rows);
  };
  const norm = (name) => ["weight", "bias"].forEach((part) => tensor(`${name}.${part}`, dim));
  const attention = (name) => {
    norm(`${name}_ln`);
    for (const part of ["query", "key", "value", "out"]) linear(`${name}.${part}`, dim, dim, part !== "key");
  };
  const block = (part, ...attentions) => {
    attentions.forEach((name) => attention(`${part}.blocks.0.${name}`));
    norm(`${part}.blocks.0.mlp_ln`);
    linear(`${part}.blocks.0.mlp.0`, 4 * dim, dim);
    linear(`${part}.blocks.0.mlp.2`, dim, 4 * dim);
  };
  tensor("encoder.positional_embedding", nRows, dim);
  tensor("encoder.conv1.weight", dim, nBands, 3);
  tensor("encoder.conv1.bias", dim, 1);
  tensor("encoder.conv2.weight", dim, dim, 3);
  tensor("encoder.conv2.bias", dim, 1);
  block("encoder", "attn");
  norm("encoder.ln_post");
  tensor("decoder.positional_embedding", nContext, dim);
  tensor("decoder.token_embedding.weight", nText + nMarks, dim);
  block("decoder", "attn", "cross_attn");
  norm("decoder.ln");
  return Buffer.concat(parts);
}

/** Runs in a page: the tokens by a file from the server, from its stored copy, and from memory; and of a file that was cut. */
async function byFile({ cache, Transcriber }, { url, cut, sound, options }) {
  const tokensOf = async (source, more = {}) => {
    const transcriber = await Transcriber.load(source, { device: "cpu", ...more });
    const { segments } = await transcriber.transcribe(Float32Array.from(sound), options);
    const { name } = transcriber.info;
    transcriber.free();
    return [name, segments.flatMap((segment) => segment.tokens)];
  };
  const told = [await tokensOf(url, { cache: false }), await tokensOf(url), await tokensOf(url)];
  told.push(await tokensOf(new File([await (await fetch(url)).arrayBuffer()], "ggml-tiny.bin")));
  const stored = await cache.list();
  const error = await Transcriber.load(cut, { device: "cpu", cache: false }).then(() => "no error", ({ code, message }) => `${code}: ${message}`);
  return { told, stored: stored.filter(({ url }) => url.includes("ggml")).map(({ complete }) => complete), error };
}

test("Chromium: a file of whisper.cpp is downloaded once, and gives the same tokens from everywhere", limited, async () => {
  const bytes = tinyGgml();
  server.files.set("ggml-tiny.bin", bytesInMemory(bytes)).set("ggml-cut.bin", bytesInMemory(bytes.subarray(0, bytes.length - 5000)));
  const url = `${server.origin}/files/ggml-tiny.bin`;
  const { told, stored, error } = await places.Chromium(byFile, { url, cut: url.replace("tiny", "cut"), sound, options: { temperatures: [0], maxNoSpeech: 2, timestamps: false } });
  const [[name, tokens]] = told;
  assert.equal(name, "ggml-tiny");
  assert.ok(tokens.length > 8 && new Set(tokens).size > 2, tokens.join());
  for (const other of told) assert.deepEqual(other, told[0]);
  assert.deepEqual(stored, [true]);
  // Once without a copy, once for it, and once by the page itself.
  assert.equal(server.sent(url), 3 * bytes.length);
  assert.match(error, /^(truncated|format): .*ggml-cut\.bin/);
});

/** Words without case and marks. */
const plain = (text) => text.toLowerCase().replace(/[^a-z ]/g, "").trim();

test("Node: Whisper tiny.en writes down what is said, with times of words", { ...limited, skip: lacksData("whisper-tiny.en", "speech") }, async () => {
  const { text, words } = JSON.parse(readFileSync(dataPath("speech/bridge.json"), "utf8"));
  const spoken = [...samplesOf(dataPath("speech/bridge.wav"))];
  const { found, info } = await places.Node(transcribed, { source: `${dataPath("whisper-tiny.en")}/`, device: "cpu", sound: spoken, options: { words: true } });
  assert.deepEqual([info.languages, info.translates], [["en"], false]);
  assert.equal(plain(found.text), plain(text));
  const heard = found.segments.flatMap((segment) => segment.words);
  assert.equal(heard.length, words.length);
  words.forEach(([start, end], i) => assert.ok(Math.abs(heard[i].start - start) < 0.1 && Math.abs(heard[i].end - end) < 0.1, JSON.stringify(heard[i])));
});
