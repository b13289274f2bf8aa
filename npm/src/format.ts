/** What a text must match and which tools may be called, as callers say it, checked and made into what the worker is told. */

import { ensure, messageOf, TilewrightError } from "./errors.js";
import type { ResponseFormat, ToolChoice } from "./types.js";

/** The other key of each format, and what its value is. */
const KEYS = {
  json_object: undefined,
  json_schema: ["schema", ["object", "boolean"]],
  regex: ["pattern", ["string"]],
  grammar: ["grammar", ["string"]],
  gbnf: ["grammar", ["string"]],
} as const;

/**
 * JSON of what a text must match; nothing for any text.
 *
 * @throws {@link TilewrightError}: `option` for what is no format, `constraint` for a schema that is no JSON.
 */
export function constraintOf(format: ResponseFormat | undefined): string | undefined {
  if (format === undefined || format?.type === "text") {
    return undefined;
  }
  if (typeof format !== "object" || format === null || !Object.hasOwn(KEYS, format.type)) {
    const types = ["text", ...Object.keys(KEYS)].map((type) => `{ type: "${type}" }`).join(", ");
    throw new TilewrightError("option", `responseFormat is none that is known, expected ${types}`);
  }
  const key = KEYS[format.type];
  if (key === undefined) {
    return asJson("responseFormat", { type: format.type });
  }
  const [name, kinds] = key;
  const value = (format as unknown as Record<string, unknown>)[name];
  ensure(value !== null && (kinds as readonly string[]).includes(typeof value),
    "option", `responseFormat.${name} is ${value === null ? "null" : typeof value}, expected ${kinds.join(" or ")}`);
  return asJson("responseFormat", { type: format.type, [name]: value });
}

/**
 * `auto`, `none`, `required`, or the name of the tool.
 *
 * @throws {@link TilewrightError}, `option`, for what is no choice.
 */
export function toolChoiceOf(choice: ToolChoice | undefined): Exclude<ToolChoice, object> | { name: string } {
  if (choice === undefined || choice === "auto" || choice === "none" || choice === "required") {
    return choice ?? "auto";
  }
  const name: unknown = choice?.function?.name;
  ensure(typeof name === "string",
    "option", 'toolChoice is none that is known, expected "auto", "none", "required" or { type: "function", function: { name } }');
  return { name };
}

/** JSON of what a caller gave. What is too deep or goes round in circles is none. */
export function asJson(option: string, value: unknown): string {
  try {
    return JSON.stringify(value);
  } catch (error) {
    throw new TilewrightError("constraint", `${option} is no JSON: ${messageOf(error)}`, { cause: error });
  }
}
