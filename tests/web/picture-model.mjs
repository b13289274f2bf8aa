// Tiny random models that take pictures, with a vocabulary and a template, as files of a Hugging Face folder.

import { readFileSync } from "node:fs";
import { join } from "node:path";

import { repository } from "./server.mjs";
import { tensors } from "./tensors.mjs";

/** Texts of tokens that stand around and for pictures, by id; of the others it is `<t17>`. */
const MARKS = {
  "qwen3-vl": { 285: "<|vision_start|>", 286: "<|vision_end|>", 287: "<|image_pad|>" },
  "lfm2-vl": { 285: "<|image_start|>", 286: "<|image_end|>", 287: "<image>" },
};
/** What a template writes for a picture. */
const PLACEHOLDERS = { "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>", "lfm2-vl": "<image>" };
const VOCABULARY = 293;

const folderOf = (name) => join(repository, "tests/data/tiny-random-pictures", name);

/** A template for messages of texts and pictures. */
const chatTemplate = (name) => `{%- for m in messages %}<t5>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}`
  + `{% if p.type == 'image' %}${PLACEHOLDERS[name]}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<t6>{% endfor %}`;

/** The tokens of a reference's case as a template writes them, whatever the messages are. */
export function templateOf(name, ids) {
  const marks = MARKS[name];
  const text = ids.map((id) => marks[id] ?? `<t${id}>`).join("");
  return text.replace(new RegExp(`${escaped(marks[285])}(?:${escaped(marks[287])})+${escaped(marks[286])}`, "g"), PLACEHOLDERS[name]);
}

const escaped = (text) => text.replace(/[^\w]/g, "\\$&");

/**
 * References of a case: its ids, the last row of logits, the tokens that follow greedily, as far as they are known, and the
 * picture as the processor resized it, RGB, which is not resized again.
 */
export function references(name) {
  const read = tensors(join(folderOf(name), "refs.safetensors"));
  // Greedy tokens are those of case 1; LFM2-VL cuts its picture into tiles, beside one of another size.
  const isQwen = name === "qwen3-vl";
  const logits = read(isQwen ? "1.last_logits" : "0.logits").slice(-VOCABULARY);
  const greedy = isQwen ? read("greedy.ids") : [logits.indexOf(Math.max(...logits))];
  return { ids: read(isQwen ? "1.ids" : "0.ids"), logits, greedy, pixels: pixelsOf(name, read) };
}

function pixelsOf(name, read) {
  const side = 8;
  const values = read(name === "qwen3-vl" ? "1.pixel_values" : "0.pixel_values");
  const [rows, columns] = name === "qwen3-vl" ? read("1.image_grid_thw").slice(1) : read("0.spatial_shapes");
  const [width, height] = [columns * side, rows * side];
  const data = new Uint8Array(width * height * 3);
  const places = Array.from({ length: rows * columns }, (_, at) => [Math.floor(at / columns), at % columns]);
  // Qwen's patches are in blocks of four, and have each channel twice, for two equal frames.
  if (name === "qwen3-vl") places.sort(([a, b], [c, d]) => (a >> 1) - (c >> 1) || (b >> 1) - (d >> 1) || a - c || b - d);
  places.forEach(([row, column], patch) => {
    for (let channel = 0; channel < 3; channel += 1) {
      for (let y = 0; y < side; y += 1) {
        for (let x = 0; x < side; x += 1) {
          const at = name === "qwen3-vl" ? patch * 384 + channel * 128 + y * side + x : patch * 192 + (y * side + x) * 3 + channel;
          data[((row * side + y) * width + column * side + x) * 3 + channel] = Math.round((values[at] + 1) / 2 * 255);
        }
      }
    }
  });
  return { width, height, data };
}

/** The files of a model. With a template all tokens are special; without, messages are lower-case words, and answers can be read. */
export function pictureModel(name, template) {
  const read = (file) => readFileSync(join(folderOf(name), file));
  const texts = Array.from({ length: VOCABULARY }, (_, id) => MARKS[name][id] ?? `<t${id}>`);
  const isSpecial = (id) => template !== undefined || id in MARKS[name] || id < 7;
  if (template === undefined) [..."abcdefghijklmnopqrstuvwxyz "].forEach((letter, i) => (texts[200 + i] = letter));
  const tokenizer = {
    version: "1.0", truncation: null, padding: null, normalizer: null, pre_tokenizer: null, post_processor: null, decoder: null,
    added_tokens: texts.map((content, id) => ({ id, content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true }))
      .filter(({ id }) => isSpecial(id)),
    model: { type: "Unigram", unk_id: 0, vocab: texts.map((text, id) => [text, text.length > 1 ? -100 : -1 - id / 1000]) },
  };
  return {
    "config.json": read("config.json"),
    "model.safetensors": read("model.safetensors"),
    "preprocessor_config.json": read("preprocessor_config.json"),
    "tokenizer.json": Buffer.from(JSON.stringify(tokenizer)),
    "tokenizer_config.json": Buffer.from(JSON.stringify({ tokenizer_class: "PreTrainedTokenizerFast" })),
    "chat_template.jinja": Buffer.from(template ?? chatTemplate(name)),
  };
}
