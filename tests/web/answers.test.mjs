// Constrained output, tool calls and reasoning of the package, in Chromium and in Node.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

import { chromium, everywhere, places, server } from "./places.mjs";
import { markId, withTemplate } from "./template.mjs";

const Ajv = createRequire(new URL("../../npm/package.json", import.meta.url))("ajv/dist/2020.js").default;
const validator = (schema) => new Ajv({ strict: false, validateFormats: false }).compile(schema);

const word = { type: "string", maxLength: 8 };
const object = (properties, more = {}) => ({
  type: "object", properties, required: Object.keys(properties), additionalProperties: false, ...more,
});
/** All with bounded length. */
const SCHEMAS = [
  { type: "boolean" },
  { type: "null" },
  { type: "integer", minimum: -50, maximum: 1000 },
  { type: "number", minimum: 0, maximum: 9.5 },
  { type: "integer", minimum: 0, exclusiveMaximum: 100, multipleOf: 7 },
  word,
  { type: "string", minLength: 3, maxLength: 5 },
  { type: "string", pattern: "^[a-z]{2,6}$" },
  { type: "string", pattern: "^\\d{3}-\\d{4}$" },
  { enum: ["red", "green", "north east", "it's \"so\"", "naïve"] },
  { const: [1, { a: "b" }] },
  { type: ["boolean", "null"] },
  { type: ["string", "integer"], maxLength: 6, minimum: 0, maximum: 99 },
  { type: "array", items: { type: "integer", minimum: 0, maximum: 9 }, minItems: 2, maxItems: 4 },
  { type: "array", prefixItems: [word, { type: "boolean" }], minItems: 2, items: false },
  { anyOf: [{ type: "integer", minimum: 1, maximum: 5 }, { type: "null" }, object({ a: word })] },
  object({ name: word, age: { type: "integer", minimum: 0, maximum: 120 } }),
  object({ größe: { type: "number", minimum: 0, maximum: 2 }, "max tokens": { type: "boolean" }, "a/b": { enum: ["x"] } }),
  object({ tags: { type: "array", items: word, maxItems: 3 }, kind: { enum: ["cat", "dog"] } }),
  object({ nested: object({ deep: object({ flag: { type: "boolean" } }) }) }),
  object({ start: { $ref: "#/$defs/point" }, end: { $ref: "#/$defs/point" } }, {
    $defs: { point: object({ x: { type: "integer", minimum: 0, maximum: 9 }, y: { type: "integer", minimum: 0, maximum: 9 } }) },
  }),
  { type: "object", properties: { a: { type: "boolean" }, b: word }, required: ["a"], additionalProperties: false },
  object({ city: { type: "string", pattern: "^[A-Z][a-z]{1,8}$" }, unit: { enum: ["celsius", "fahrenheit"] } }),
  { type: "array", items: object({ id: { type: "integer", minimum: 1, maximum: 99 } }), minItems: 1, maxItems: 2 },
];

/** Runs in the place: texts for schemas, sampled from all tokens. */
async function textsOf({ Model }, { schemas, device, seed }) {
  const model = await Model.builtin({ device });
  const all = [];
  for (const [at, schema] of schemas.entries()) {
    const generation = model.generate("Once upon a time", {
      temperature: 1, topK: 0, topP: 1, minP: 0, seed: seed + at, maxTokens: 300, responseFormat: { type: "json_schema", schema },
    });
    all.push({ text: await generation.text(), stopReason: (await generation.result).stopReason });
  }
  model.free();
  return all;
}

function areValid(schemas, texts) {
  let valid = 0;
  for (const [at, { text, stopReason }] of texts.entries()) {
    assert.ok(["complete", "eos"].includes(stopReason), `${stopReason}: ${text}`);
    const matches = validator(schemas[at]);
    assert.ok(matches(JSON.parse(text)), `${text} is not of ${JSON.stringify(schemas[at])}`);
    valid += 1;
  }
  assert.equal(valid, schemas.length);
}

everywhere(
  "texts of JSON schemas are valid at temperature 1",
  textsOf,
  (texts) => areValid(SCHEMAS, texts),
  { schemas: SCHEMAS, device: "cpu", seed: 1 },
);

test("Chromium: texts of JSON schemas are valid on a GPU", { timeout: 120_000 }, async () => {
  const some = SCHEMAS.slice(15, 18);
  areValid(some, await places.Chromium(textsOf, { schemas: some, device: "gpu", seed: 7 }));
});

everywhere(
  "objects of any content, regular expressions and grammars are kept to, and the same seed gives the same text",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const of = async (responseFormat, options) => {
      const generation = model.generate("Once upon a time", { temperature: 1, seed: 5, maxTokens: 200, responseFormat, ...options });
      return [await generation.text(), (await generation.result).stopReason];
    };
    const regex = { type: "regex", pattern: "[A-Z][a-z]{2,9}: [0-9]{1,3}(\\.[0-9])?" };
    const gbnf = { type: "gbnf", grammar: 'root ::= "<" [a-z]{1,5} ">"' };
    const grammar = { type: "grammar", grammar: 'start: "(" (NUMBER | start) "+" NUMBER ")"\nNUMBER: /[0-9]{1,2}/' };
    const texts = {
      object: await of({ type: "json_object" }, { maxTokens: 400, temperature: 0 }),
      regex: await of(regex),
      again: await of(regex),
      grammar: await of(grammar),
      gbnf: await of(gbnf),
      cut: await of(regex, { maxTokens: 2 }),
      text: await of({ type: "text" }, { maxTokens: 5 }),
      plain: await of(undefined, { maxTokens: 5 }),
    };
    model.free();
    return texts;
  },
  ({ object, regex, again, grammar, gbnf, cut, text, plain }) => {
    assert.ok(object[0].startsWith("{"), object[0]);
    if (object[1] !== "max_tokens") assert.equal(typeof JSON.parse(object[0]), "object");
    assert.match(regex[0], /^[A-Z][a-z]{2,9}: [0-9]{1,3}(\.[0-9])?$/);
    assert.deepEqual(regex, again);
    assert.match(grammar[0], /^\(+[0-9]{1,2}(\+[0-9]{1,2}\))+$/);
    assert.match(gbnf[0], /^<[a-z]{1,5}>$/);
    assert.equal(cut[1], "max_tokens");
    assert.deepEqual(text, plain);
  },
);

everywhere(
  "what cannot be used is refused, and the model answers all the same",
  async ({ Model }) => {
    const model = await Model.builtin({ device: "cpu" });
    const schema = (schema) => ({ type: "json_schema", schema });
    const deep = (n, inner = { type: "integer" }) => {
      for (let left = n; left > 0; left -= 1) inner = { type: "array", items: inner };
      return inner;
    };
    const chain = (n) => ({
      $ref: "#/$defs/d0",
      $defs: Object.fromEntries(Array.from({ length: n }, (_, i) => [`d${i}`, i + 1 === n ? { type: "boolean" } : { $ref: `#/$defs/d${i + 1}` }])),
    });
    const round = {};
    round.items = round;
    const formats = [
      schema({ type: "integer", minimum: 5, maximum: 3 }),
      schema({ not: { type: "string" } }),
      schema(deep(150)),
      schema(deep(100_000)),
      schema(round),
      schema({ enum: Array.from({ length: 1_000_000 }, (_, i) => i) }),
      schema({ type: "string", pattern: "^(a{1000}){1000}$" }),
      schema({ $ref: "#" }),
      { type: "regex", pattern: "(" },
      { type: "regex", pattern: `${"(".repeat(2000)}a${")".repeat(2000)}` },
      { type: "regex", pattern: "(a|b|ab)*c?".repeat(1000) },
      { type: "grammar", grammar: "start: b" },
      { type: "grammar", grammar: `start: ${"(".repeat(2000)}"a"${")".repeat(2000)}` },
      { type: "grammar", grammar: "start: A\nA: /(.*a.{200}){3}/ & /(.*b.{300}){3}/ & ~/(.*c.{100}){2}/" },
      { type: "regex" },
      { type: "xml" },
      "json",
    ];
    const answers = [];
    const ask = async (responseFormat) => {
      const begin = performance.now();
      const code = await model.generate("a", { responseFormat, maxTokens: 2 }).text().then(() => "worked", (error) => `${error.code}: ${error.message}`);
      return { code, ms: Math.round(performance.now() - begin) };
    };
    // The module and the vocabulary are loaded from now on.
    const first = await ask({ type: "regex", pattern: "x" });
    for (const format of formats) answers.push(await ask(format));
    // Some thousand references may overflow the stack: an error or an answer.
    const long = await ask(schema(chain(4000)));
    const after = await model.generate("a", { responseFormat: { type: "regex", pattern: "hello" } }).text();
    const lookedUp = await ask({ type: "regex", pattern: "x" });
    const guesses = await model.generate("a", { responseFormat: { type: "regex", pattern: "x" }, promptLookup: 4 }).text().catch(({ code }) => code);
    const plain = await model.generate("Once upon a time", { maxTokens: 4 }).text();
    model.free();
    return { first, answers, long, after, lookedUp, guesses, plain };
  },
  ({ first, answers, long, after, lookedUp, guesses, plain }) => {
    assert.deepEqual([first.code, lookedUp.code, after, guesses], ["worked", "worked", "hello", "option"]);
    const codes = answers.map(({ code }) => code.split(":")[0]);
    assert.deepEqual(codes, [...Array(14).fill("constraint"), "option", "option", "option"], JSON.stringify(answers, null, 1));
    assert.ok(["constraint", "worked"].includes(long.code.split(":")[0]), long.code);
    // Time is reported only: other programs may use the processor.
    const slowest = answers.reduce((a, b) => a.ms > b.ms ? a : b);
    console.log(`the slowest refusal took ${slowest.ms} ms: ${slowest.code}`);
    assert.ok(plain.length > 0);
  },
);

/** A template with tool calls in Hermes format, and a variable that enables reasoning. */
const TEMPLATE = "{% if tools %}<tool_call>{% for t in tools %}{{ t|tojson }}{% endfor %}{\"name\", \"arguments\"}</tool_call>{% endif %}"
  + "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments|tojson }}){% endfor %} {% endfor %}"
  + "{% if add_generation_prompt %}[assistant] {% if enable_thinking %}<think>{% endif %}{% endif %}";
const SUN = { type: "function", function: { name: "sun", parameters: { type: "object", properties: { day: { type: "integer" } } } } };

everywhere(
  "an answer is taken apart: thinking, text and calls, piece by piece and as a whole",
  async ({ Model }, { file, tools }) => {
    const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
    const user = { role: "user", content: "Will the sun shine?" };
    const chat = async (messages, options) => {
      const pieces = [];
      const generation = model.chat(messages, { temperature: 1, seed: 3, maxTokens: 200, ...options });
      for await (const piece of generation) pieces.push(piece);
      return { pieces, text: await generation.text(), result: await generation.result };
    };
    // The grammar forces output that only a larger model would write.
    const written = (text) => ({ type: "grammar", grammar: `start: ${text}` });
    const call = String.raw`"<tool_call>{\"name\": \"sun\", \"arguments\": {\"day\": " /[1-9]/ "}}</tool_call>"`;
    const called = await chat([user], { toolChoice: "none", tools, responseFormat: written(`"<think>" /[a-z ]{3,9}/ "!</think>" "Let me see. " ${call}`) });
    const opened = await chat([user], { thinking: true, maxTokens: 4 });
    const unthought = await chat([user], { thinking: false, maxTokens: 4 });
    const broken = await chat([user], { toolChoice: "none", tools, responseFormat: written(String.raw`"<tool_call>{\"name\": 3}</tool_call>"`) });
    const answer = { role: "assistant", content: called.text, tool_calls: called.result.toolCalls };
    const answered = await chat([user, answer, { role: "tool", content: "yes" }], { maxTokens: 3 });
    const said = await chat([user, { role: "assistant", content: called.text }, { role: "tool", content: "yes" }], { maxTokens: 3 });
    const plain = await chat([user], { maxTokens: 3 });
    const codes = [];
    for (const options of [{ toolChoice: "any" }, { tools: [{ loop: 1n }] }]) {
      codes.push(await chat([user], options).then(() => "worked", (error) => error.code ?? error.name));
    }
    model.free();
    return { called, opened, unthought, broken, answered, said, plain, codes };
  },
  ({ called, opened, unthought, broken, answered, said, plain, codes }) => {
    const { pieces, result, text } = called;
    assert.match(result.thinking, /^[a-z ]*!$/);
    assert.equal(pieces.map(({ thinking = "" }) => thinking).join(""), result.thinking);
    assert.equal(text, "Let me see.");
    assert.deepEqual(pieces.flatMap(({ toolCalls = [] }) => toolCalls), result.toolCalls);
    const [{ id, type, function: { name, arguments: given } }] = result.toolCalls;
    assert.deepEqual([result.toolCalls.length, type, name], [1, "function", "sun"]);
    assert.match(id, /^call[0-9]{5}$/);
    assert.ok(validator(SUN.function.parameters)(given) && given.day >= 1, JSON.stringify(given));
    assert.equal(result.stopReason, "complete");
    assert.ok(opened.pieces.every(({ text }) => text === "") && opened.result.thinking !== "", JSON.stringify(opened.pieces));
    assert.equal(broken.text, '<tool_call>{"name": 3}</tool_call>');
    assert.match(broken.pieces.find(({ problem }) => problem !== undefined).problem, /hermes/);
    assert.deepEqual(broken.result.toolCalls, []);
    assert.deepEqual([unthought.result.thinking, unthought.text === ""], ["", false]);
    assert.equal(answered.result.generatedTokens, 3);
    assert.ok(answered.result.promptTokens > said.result.promptTokens, "the template was given the call");
    assert.deepEqual([plain.result.thinking, plain.result.toolCalls, Object.keys(plain.pieces[0])], ["", [], ["id", "text"]]);
    assert.deepEqual(codes, ["option", "constraint"]);
  },
  { file: withTemplate(TEMPLATE).toString("base64"), tools: [SUN] },
);

/**
 * A template without tools: then a call is the whole answer, as JSON, which even the story model completes, unless it
 * may reason first.
 */
const PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]";
const TOOLS = [
  ["weather", object({ city: { type: "string", pattern: "^[A-Z][a-z]{2,8}$" }, unit: { enum: ["celsius", "fahrenheit"] } })],
  ["order", object({ items: { type: "array", items: object({ id: { type: "integer", minimum: 1, maximum: 99 }, gift: { type: "boolean" } }), minItems: 1, maxItems: 2 } })],
  ["now", object({})],
].map(([name, parameters]) => ({ type: "function", function: { name, parameters } }));

everywhere(
  "calls that are asked for come, can be read, and are valid by the tools' schemas at temperature 1",
  async ({ Model }, { file, tools }) => {
    const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
    const user = { role: "user", content: "What now?" };
    const results = [];
    const chat = async (options) => (await model.chat([user], { temperature: 1, topK: 0, topP: 1, minP: 0, maxTokens: 400, tools, thinking: false, ...options }).result);
    for (let seed = 0; seed < 8; seed += 1) results.push(await chat({ seed, toolChoice: "required", parallelToolCalls: seed % 2 === 1 }));
    const ordered = await chat({ seed: 9, toolChoice: { type: "function", function: { name: "order" } } });
    const none = await chat({ seed: 10, toolChoice: "none", maxTokens: 40 });
    const fail = (options) => chat(options).then(() => "worked", ({ code, message }) => `${code}: ${message}`);
    const errors = [
      await fail({ toolChoice: { type: "function", function: { name: "cancel" } } }),
      await fail({ tools: [], toolChoice: "required" }),
      await fail({ toolChoice: "required", responseFormat: { type: "json_object" } }),
      await fail({ tools: [{ type: "function", function: { name: "odd", parameters: { type: "object", properties: { a: { not: { type: "string" } } } } } }] }),
    ];
    model.free();
    return { results, ordered, none, errors };
  },
  ({ results, ordered, none, errors }) => {
    const schemas = Object.fromEntries(TOOLS.map(({ function: { name, parameters } }) => [name, validator(parameters)]));
    let whole = 0;
    for (const [seed, { toolCalls, stopReason }] of [...results, ordered].entries()) {
      // A truncated list of calls is not a call.
      if (stopReason === "max_tokens" && seed % 2 === 1) continue;
      whole += 1;
      assert.ok(seed % 2 === 1 ? toolCalls.length > 0 : seed === 8 || toolCalls.length === 1, `${stopReason}: ${JSON.stringify(toolCalls)}`);
      for (const { function: { name, arguments: given } } of toolCalls) assert.ok(schemas[name](given), `${name}(${JSON.stringify(given)})`);
    }
    assert.ok(whole >= 5, `${whole} of 9 answers ended`);
    assert.ok(ordered.stopReason === "max_tokens" || ordered.toolCalls.length > 0, JSON.stringify(ordered));
    assert.ok(ordered.toolCalls.every(({ function: { name } }) => name === "order"));
    assert.deepEqual(none.toolCalls, []);
    assert.match(errors[0], /^constraint: .*cancel/);
    assert.match(errors[1], /^option: .*no tools/);
    assert.match(errors[2], /^option: .*responseFormat/);
    assert.match(errors[3], /^constraint: .*odd/);
  },
  { file: withTemplate(PLAIN).toString("base64"), tools: TOOLS },
);

/** Minimal templates that identify the tool-call formats of model families. Marks that are tokens come first. */
const FAMILIES = {
  hermes: [["<think>", "</think>", "<tool_call>", "</tool_call>"], '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson }}}</tool_call>'],
  xml: [
    ["<think>", "</think>", "<tool_call>", "</tool_call>"],
    "<tool_call><function={{ f.name }}>{% for k, v in f.arguments|items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>",
  ],
  llama3: [["<think>", "</think>", "<|python_tag|>"], '<|python_tag|>{"name": "{{ f.name }}", "parameters": {{ f.arguments|tojson }}}'],
  mistral: [["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments|tojson }}"],
  gemma4: [["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'], "<|tool_call>call:{{ f.name }}{}<tool_call|>"],
  harmony: [
    ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"],
    "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments|tojson }}<|call|>",
  ],
  lfm2: [["<think>", "</think>", "<|tool_call_start|>", "<|tool_call_end|>"], "<|tool_call_start|>[{{ f.name }}()]<|tool_call_end|>"],
  granite: [["<think>", "</think>", "<|tool_call|>", "<|/tool_call|>"], '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments|tojson }}}]'],
  json: [["<think>", "</think>"], undefined],
};
const templateOf = (family, call, begun = "") => (call === undefined ? "" : `{% for t in tools or [] %}{{ t.function.name }} {% endfor %}`)
  + "{% for m in messages %}[{{ m.role }}] {{ m.content }} "
  + (call === undefined ? "" : `{% for c in m.tool_calls or [] %}{% set f = c.function %}${call}{% endfor %}`)
  + `{% endfor %}{% if add_generation_prompt %}${family === "harmony" ? "<|start|>assistant" : "[assistant]"}${begun}{% endif %}`;
const FAMILY_TOOLS = [
  ...TOOLS,
  { type: "function", function: { name: "note-down", parameters: object({ text: word, tags: { type: "array", items: word, maxItems: 2 }, urgent: { type: "boolean" } }) } },
  { type: "function", function: { name: "set_level", parameters: object({ level: { type: "number", minimum: -1, maximum: 1 }, room: { type: ["string", "null"], maxLength: 6 } }) } },
];
const N_DRAWS = process.env.TILEWRIGHT_FULL ? 24 : 3;
/** Token types of the marks in the vocabulary. */
const ALL_KINDS = ["control", "userDefined", "text"];
/**
 * The types that a place tests for the `i`th family. Both run the same module, so by default each tests different
 * ones.
 */
const kindsOf = (place, i) => process.env.TILEWRIGHT_FULL ? ALL_KINDS : [ALL_KINDS[(i + (place === "Node" ? 1 : 0)) % ALL_KINDS.length]];

everywhere(
  "calls in the format of every family can be read, and are valid by the tools' schemas at temperature 1",
  async ({ Model }, { models, tools, nDraws, callMark }) => {
    const drawn = [];
    for (const { family, kind, file } of models) {
      const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
      const user = { role: "user", content: "What now?" };
      for (let seed = 0; seed < nDraws; seed += 1) {
        const { function: { name } } = tools[seed % tools.length];
        const isNamed = seed % 3 === 2;
        const parallelToolCalls = seed % 3 === 1;
        const generation = model.chat([user], {
          temperature: 1, topK: 0, topP: 1, minP: 0, maxTokens: 150, seed, tools, thinking: false, parallelToolCalls,
          toolChoice: isNamed ? { type: "function", function: { name } } : "required",
        });
        const text = await generation.text();
        const { toolCalls, stopReason } = await generation.result;
        drawn.push({ family, kind, seed, parallelToolCalls, name: isNamed ? name : null, text, toolCalls, stopReason });
      }
      // The model decides: biased towards the mark that begins calls, if it is a token.
      if (kind !== "text" && family !== "json" && family !== "harmony") {
        const generation = model.chat([user], { temperature: 1, seed: 1, maxTokens: 150, tools, thinking: false, parallelToolCalls: false, logitBias: { [callMark]: 7 } });
        const text = await generation.text();
        const { toolCalls, stopReason } = await generation.result;
        drawn.push({ family, kind, seed: "auto", parallelToolCalls: false, name: null, text, toolCalls, stopReason });
      }
      model.free();
    }
    return drawn;
  },
  (drawn, place) => {
    const schemas = Object.fromEntries(FAMILY_TOOLS.map(({ function: { name, parameters } }) => [name, validator(parameters)]));
    const tally = Object.fromEntries(Object.keys(FAMILIES).map((family) => [family, { answers: 0, cut: 0, calls: 0 }]));
    for (const { family, kind, seed, parallelToolCalls, name, text, toolCalls, stopReason } of drawn) {
      const about = `${family}, ${kind}, seed ${seed}, ${stopReason}: ${JSON.stringify(text)} ${JSON.stringify(toolCalls)}`;
      const counts = tally[family];
      counts.answers += 1;
      counts.calls += toolCalls.length;
      for (const { function: { name: called, arguments: given } } of toolCalls) {
        assert.ok(schemas[called]?.(given), about);
        assert.ok(name === null || called === name, about);
      }
      if (stopReason === "max_tokens") {
        counts.cut += 1;
        continue;
      }
      assert.ok(parallelToolCalls ? toolCalls.length > 0 : toolCalls.length === 1, about);
      if (seed !== "auto") assert.equal(text.trim(), "", about);
    }
    for (const [family, { answers, cut, calls }] of Object.entries(tally)) {
      console.log(`${place}, ${family}: ${calls} calls in ${answers} answers, of which ${cut} were cut off`);
      assert.ok(calls >= answers / 2 && cut * 3 <= answers, `${family}: ${calls} calls, ${cut} of ${answers} answers cut off`);
    }
  },
  (place) => ({
    models: Object.entries(FAMILIES).flatMap(([family, [marks, call]], i) => kindsOf(place, i).map((kind) => ({
      family, kind, file: withTemplate(templateOf(family, call), kind === "text" ? [] : marks, kind).toString("base64"),
    }))),
    tools: FAMILY_TOOLS,
    nDraws: N_DRAWS,
    callMark: markId(2),
  }),
);

const HARMONY = templateOf("harmony", FAMILIES.harmony[1]);
const HARMONY_BEGUN = templateOf("harmony", FAMILIES.harmony[1], "<|channel|>analysis<|message|>");

everywhere(
  "of answers with channels, the text of the final one matches, after a thought or without one",
  async ({ Model }, { files, schema, end }) => {
    const answers = {};
    for (const [name, { file, thinking }] of Object.entries(files)) {
      const model = await Model.load(new Blob([Uint8Array.from(atob(file), (c) => c.charCodeAt(0))]), { device: "cpu" });
      answers[name] = [];
      for (let seed = 0; seed < 8; seed += 1) {
        const generation = model.chat([{ role: "user", content: "What now?" }], {
          // A model untrained on reasoning would not end it.
          temperature: 1, topK: 0, topP: 1, minP: 0, seed, maxTokens: 200, thinking, logitBias: { [end]: 8 }, responseFormat: { type: "json_schema", schema },
        });
        answers[name].push(await generation.text().then(async (text) => ({ text, ...await generation.result }), ({ code, message }) => `${code}: ${message}`));
      }
      model.free();
    }
    return answers;
  },
  ({ free, unthought, begun, cutShort, letters }, place) => {
    const matches = validator(SCHEMAS[16]);
    for (const { text, stopReason } of [...free, ...unthought, ...begun, ...cutShort]) {
      assert.ok(["complete", "eos"].includes(stopReason), `${stopReason}: ${text}`);
      assert.ok(matches(JSON.parse(text)), text);
    }
    const thoughts = (answers) => answers.filter(({ thinking }) => thinking !== "").length;
    console.log(`${place}: ${thoughts(free)} of ${free.length} answers begin with reasoning, of those with reasoning opened by the prompt ${thoughts(begun)}`);
    assert.ok(thoughts(free) > 0 && thoughts(free) < free.length);
    assert.ok(thoughts(begun) > 0);
    assert.deepEqual([thoughts(unthought), thoughts(cutShort)], [0, 0]);
    for (const told of letters) assert.match(told, /^constraint: .*responseFormat.*without `<\|start\|>`/);
  },
  {
    files: Object.fromEntries(Object.entries({
      free: [HARMONY, "auto"],
      unthought: [HARMONY, false],
      begun: [HARMONY_BEGUN, "auto"],
      cutShort: [HARMONY_BEGUN, false],
      letters: [HARMONY, "auto"],
    }).map(([name, [template, thinking]]) => [name, { file: withTemplate(template, name === "letters" ? [] : FAMILIES.harmony[0]).toString("base64"), thinking }])),
    schema: SCHEMAS[16],
    end: markId(FAMILIES.harmony[0].indexOf("<|end|>")),
  },
);

test("Chromium: the module for answers is fetched when it is first needed, once, and what it holds for a generation is freed", { timeout: 120_000 }, async () => {
  const fetched = [];
  const seen = (request) => fetched.push(new URL(request.url()).pathname);
  chromium.context.on("request", seen);
  try {
    const page = await chromium.open(`${server.origin}/blank.html`);
    await page.evaluate(async () => {
      const { Model } = await import("/npm/index.js");
      globalThis.model = await Model.builtin({ device: "cpu" });
      await globalThis.model.generate("Once", { maxTokens: 4 }).text();
    });
    const before = fetched.filter((path) => path.endsWith(".wasm"));
    assert.deepEqual(before, ["/npm/tilewright_cpu_bg.wasm"]);
    const heaps = await page.evaluate(async () => {
      const { model } = globalThis;
      const heaps = [(await model.memory()).wasmHeapBytes];
      const schema = { type: "object", properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer", minimum: 0, maximum: 99 } } };
      for (let round = 0; round < 30; round += 1) {
        const generation = model.generate("Once", { temperature: 1, seed: round, maxTokens: 60, responseFormat: { type: "json_schema", schema } });
        // Some are dropped early.
        for await (const _ of generation) if (round % 3 === 2) break;
        heaps.push((await model.memory()).wasmHeapBytes);
      }
      model.free();
      return heaps;
    });
    assert.deepEqual(fetched.filter((path) => path.endsWith(".wasm")), [...before, "/npm/tilewright_text_bg.wasm"]);
    assert.ok(heaps[1] > heaps[0], `${heaps}`);
    assert.equal(heaps.at(-1), heaps[10], `${heaps}`);
  } finally {
    chromium.context.off("request", seen);
  }
});
