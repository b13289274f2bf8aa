/** Converts response formats and tool choices into the worker's terms. */

import { ensure, messageOf, TilewrightError } from "./errors.js";
import type { ResponseFormat, ToolChoice } from "./types.js";

const KEYS = {
  json_object: undefined,
  json_schema: ["schema", ["object", "boolean"]],
  regex: ["pattern", ["string"]],
  grammar: ["grammar", ["string"]],
  gbnf: ["grammar", ["string"]],
} as const;

/**
 * A format as JSON; `undefined` for any text.
 *
 * @throws {@link TilewrightError}: `option` for an unknown format, `constraint` for a schema that is no JSON.
 */
export function constraintOf(format: ResponseFormat | undefined): string | undefined {
  if (format === undefined || format?.type === "text") {
    return undefined;
  }
  if (typeof format !== "object" || format === null || !Object.hasOwn(KEYS, format.type)) {
    const types = ["text", ...Object.keys(KEYS)].map((type) => `{ type: "${type}" }`).join(", ");
    throw new TilewrightError("option", `responseFormat is unknown, expected ${types}`);
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

export function toolChoiceOf(choice: ToolChoice | undefined): Exclude<ToolChoice, object> | { name: string } {
  if (choice === undefined || choice === "auto" || choice === "none" || choice === "required") {
    return choice ?? "auto";
  }
  const name: unknown = choice?.function?.name;
  ensure(typeof name === "string",
    "option", 'toolChoice is unknown, expected "auto", "none", "required" or { type: "function", function: { name } }');
  return { name };
}

/** JSON of a value, which fails for deep and circular ones. */
export function asJson(option: string, value: unknown): string {
  try {
    return JSON.stringify(value);
  } catch (error) {
    throw new TilewrightError("constraint", `${option} is no JSON: ${messageOf(error)}`, { cause: error });
  }
}
