// Links to the page that name a model and a prompt: `?model=hf:owner/name:Q8_0&prompt=..`. No DOM in here.
import { BUILTIN, choiceOfAddress, type ModelChoice } from "../sources.js";

/** What a link asks for. */
export interface Link {
  /** A model of Hugging Face, which the page loads when the user says so, or the built-in one. */
  choice?: ModelChoice;
  /** An address elsewhere, which the page must not ask for before the user has seen it. */
  address?: string;
  prompt?: string;
  /** A sentence about what of the link is not used. */
  problem?: string;
}

const MAX_PROMPT = 20_000;
/** Longer than any address of a model. */
const MAX_ADDRESS = 2000;

/** Reads the part of the page's address behind `?`. */
export function readLink(search: string, base: string): Link {
  const params = new URLSearchParams(search);
  const [model, prompt] = [params.get("model")?.trim(), params.get("prompt")];
  const link: Link = prompt === null || prompt === "" ? {} : { prompt: prompt.slice(0, MAX_PROMPT) };
  if (model === undefined || model === "") return link;
  if (model === "builtin") return { ...link, choice: BUILTIN };
  const shown = model.length > 100 ? `${model.slice(0, 100)}…` : model;
  const problem = `The link names the model “${shown}”, which is no address of one. It should be like hf:owner/name or hf:owner/name:Q8_0.`;
  if (model.length > MAX_ADDRESS) return { ...link, problem };
  try {
    const choice = choiceOfAddress(model, base);
    if (typeof choice.source === "object" && "revision" in choice.source) return { ...link, choice };
    if (!/^https?:/i.test(model)) return { ...link, problem };
    const { host } = new URL(model);
    return { ...link, address: model, problem: `The link names a model on ${host}. Nothing was asked of it; press “Load” beside the address if you want it.` };
  } catch {
    return { ...link, problem };
  }
}
