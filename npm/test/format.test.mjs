// What a text must match and which tools may be called, as callers say it.

import assert from "node:assert/strict";
import { test } from "node:test";

import { asJson, constraintOf, toolChoiceOf } from "../build/format.js";

test("each format is passed on as JSON, and text is none", () => {
  assert.equal(constraintOf(undefined), undefined);
  assert.equal(constraintOf({ type: "text" }), undefined);
  for (const format of [
    { type: "json_object" }, { type: "json_schema", schema: { type: "null" } }, { type: "json_schema", schema: true }, { type: "regex", pattern: "a" },
    { type: "grammar", grammar: "start: \"a\"" }, { type: "gbnf", grammar: "root ::= \"a\"" },
  ]) assert.deepEqual(JSON.parse(constraintOf({ ...format, more: 1 })), format);
});

test("what is no format is refused, and a schema that is no JSON", () => {
  for (const format of ["json", null, {}, { type: "xml" }, { type: "toString" }, { type: "regex" }, { type: "json_schema", schema: null }, { type: "gbnf", grammar: 3 }]) {
    assert.throws(() => constraintOf(format), { name: "TilewrightError", code: "option", message: /^responseFormat/ }, JSON.stringify(format));
  }
  const round = {};
  round.items = round;
  let deep = {};
  for (let left = 100_000; left > 0; left -= 1) deep = { items: deep };
  for (const schema of [round, deep, { const: 1n }]) assert.throws(() => constraintOf({ type: "json_schema", schema }), { code: "constraint" });
});

test("a choice of tools", () => {
  assert.equal(toolChoiceOf(undefined), "auto");
  assert.equal(toolChoiceOf("required"), "required");
  assert.deepEqual(toolChoiceOf({ type: "function", function: { name: "auto" } }), { name: "auto" });
  for (const choice of ["any", {}, null, 3]) assert.throws(() => toolChoiceOf(choice), { code: "option" });
  assert.equal(asJson("tools", [{ a: undefined }]), "[{}]");
});
