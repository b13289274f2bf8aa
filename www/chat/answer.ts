// An answer as it is written: what of the conversation the model sees, its tools, and how it came out. No DOM in here.
import { TilewrightError, type ChatMessage, type GenerateOptions, type GenerateResult, type Model, type Piece } from "../tilewright/index.js";
import { formatRate } from "../dom.js";
import { TOP_LOGPROBS, type Settings } from "../settings.js";
import { promptWith } from "./attachments.js";
import { answerOf, type Step, type ToolUse, type Turn } from "./records.js";
import { runTool, SCHEMAS } from "./tools.js";

/** How often tools may be called before the model has to answer. */
const MAX_ROUNDS = 5;
/** Tokens around a message that a chat template may add. */
const MESSAGE_TOKENS = 8;

/** What an answer is written from. */
export interface Question {
  model: Model;
  /** The turns before, the first one first. */
  before: readonly Turn[];
  /** Its steps are written. */
  turn: Turn;
  settings: Settings;
  systemPrompt: string;
  tools: ToolUse;
  seed: number;
  signal: AbortSignal;
}

/** What happens while an answer is written. */
export interface Listener {
  /** The answer begins anew, without the steps so far. */
  restart(): void;
  /** The turn has this step now. */
  step(step: Step): void;
  /** The last step goes on with this. */
  piece(piece: Piece): void;
  /** A tool was called, or has said something. */
  called(step: Step): void;
  /** The model sees only these turns, and the question. */
  forgets(turn: Turn): void;
}

/** Whether the model goes on with a text, because it has no chat template. */
export function tellsStories(model: Model): boolean {
  return model.info.chatTemplate === "none";
}

/** Writes an answer into its turn, and resolves with how the last step came out. Rejects with what went wrong, or the signal's reason. */
export async function writeAnswer(question: Question, listener: Listener): Promise<GenerateResult> {
  const { model, turn, settings, seed, signal } = question;
  const { temperature, topK, topP, minP, repeatPenalty, presencePenalty, frequencyPenalty, maxTokens } = settings;
  const options: GenerateOptions = {
    temperature, topK, topP, minP, repeatPenalty, presencePenalty, frequencyPenalty, maxTokens, seed, signal,
    logprobs: settings.probabilities ? TOP_LOGPROBS : undefined,
  };
  turn.steps = [];
  if (turn.mode === "story") return writeStep(question, listener, () => model.generate(turn.prompt, options));

  const texts = [...question.before, turn].flatMap(({ attachments }) => attachments.filter(({ image }) => image === undefined));
  let seen = await seenTurns(question);
  for (let round = 0; ; round += 1) {
    let result: GenerateResult;
    try {
      const choice = round === MAX_ROUNDS ? "none" : round > 0 && question.tools === "required" ? "auto" : question.tools;
      const told = question.tools === "none" ? {} : { tools: SCHEMAS, toolChoice: choice };
      // A call that has to come need not be thought about; what a small model thinks may have no end.
      const thinking = choice === "required" ? false : "auto";
      result = await writeStep(question, listener, () => model.chat(messagesOf(question, seen), { ...options, ...told, thinking }));
    } catch (error) {
      // The estimate was too low.
      if (!(error instanceof TilewrightError) || error.code !== "context_full" || seen.length === 0 || round > 0) throw error;
      seen = seen.slice(Math.ceil(seen.length / 2));
      turn.steps = [];
      listener.restart();
      round -= 1;
      continue;
    } finally {
      const [first] = seen;
      if (seen.length < question.before.length) {
        turn.seenFrom = first?.id ?? turn.id;
        listener.forgets(turn);
      } else delete turn.seenFrom;
    }
    const step = turn.steps.at(-1);
    if (step === undefined || step.calls.length === 0 || round === MAX_ROUNDS) return result;
    for (const call of step.calls) {
      call.result = runTool(call.name, JSON.parse(call.arguments) as Record<string, unknown>, { texts });
    }
    listener.called(step);
    signal.throwIfAborted();
  }
}

async function writeStep({ turn }: Question, listener: Listener, generate: () => ReturnType<Model["generate"]>): Promise<GenerateResult> {
  const step: Step = { thinking: "", text: "", calls: [] };
  turn.steps.push(step);
  listener.step(step);
  const generation = generate();
  for await (const piece of generation) {
    const { text, thinking = "", toolCalls = [] } = piece;
    step.text += text;
    step.thinking += thinking;
    for (const { id, function: { name, arguments: given } } of toolCalls) step.calls.push({ id, name, arguments: JSON.stringify(given) });
    listener.piece(piece);
    if (toolCalls.length > 0) listener.called(step);
  }
  return generation.result;
}

/** A prompt with its pictures, or with what stands for them if the model takes none. */
function contentOf({ prompt, attachments }: Turn, takesImages: boolean): ChatMessage["content"] {
  const text = promptWith(prompt, attachments);
  const pictures = attachments.filter(({ image }) => image !== undefined);
  if (pictures.length === 0) return text;
  if (!takesImages) return [...pictures.map(({ name }) => `(The picture ${name}, which cannot be seen.)`), text].join("\n");
  return [...pictures.map(({ image }) => ({ type: "image", image })), { type: "text", text }];
}

/** Tokens of a turn's pictures. */
function pictureTokens({ attachments }: Turn): number {
  return attachments.reduce((sum, { tokens = 0 }) => sum + tokens, 0);
}

/** The conversation as the model sees it: the system prompt, turns before, and the question with what tools have said so far. */
function messagesOf({ model, turn, systemPrompt }: Question, seen: readonly Turn[]): ChatMessage[] {
  const messages: ChatMessage[] = systemPrompt === "" ? [] : [{ role: "system", content: systemPrompt }];
  for (const it of [...seen, turn]) {
    // A prompt that failed before the first word is no part of the conversation.
    if (it !== turn && it.steps.every(({ thinking, text, calls }) => thinking === "" && text === "" && calls.length === 0)) continue;
    messages.push({ role: "user", content: contentOf(it, model.info.takesImages) });
    for (const { thinking, text, calls } of it.steps) {
      // The one that is about to be written.
      if (thinking === "" && text === "" && calls.length === 0) continue;
      messages.push({
        role: "assistant",
        content: text,
        ...(thinking === "" ? {} : { reasoning_content: thinking }),
        ...(calls.length === 0 ? {} : {
          tool_calls: calls.map(({ id, name, arguments: given }) => ({ type: "function", id, function: { name, arguments: JSON.parse(given) as object } })),
        }),
      });
      for (const { id, name, result } of calls) messages.push({ role: "tool", tool_call_id: id, name, content: result ?? "" });
    }
  }
  return messages;
}

/**
 * The turns before that fit the context with the question. Where they do not, the older half goes at once, so that what follows can go on
 * from what is computed, and not only the next answer.
 */
async function seenTurns({ model, before, turn, settings, systemPrompt, tools }: Question): Promise<readonly Turn[]> {
  const { contextLength } = model.info;
  const from = before.findIndex(({ id }) => id === before.at(-1)?.seenFrom);
  let seen = before.slice(Math.max(0, from));
  const count = async (text: string): Promise<number> => (await model.tokenize(text, { addSpecial: false })).length;
  let room = contextLength - Math.min(settings.maxTokens, contextLength >> 2) - await count(promptWith(turn.prompt, turn.attachments) + systemPrompt);
  room -= pictureTokens(turn);
  if (tools !== "none") room -= await count(JSON.stringify(SCHEMAS));
  const sizes = new Map<Turn, number>();
  for (const it of seen) sizes.set(it, await tokensOf(model, it, count));
  const total = (turns: readonly Turn[]): number => turns.reduce((sum, it) => sum + (sizes.get(it) ?? 0), 0);
  if (total(seen) > room) while (seen.length > 0 && total(seen) > room / 2) seen = seen.slice(1);
  return seen;
}

const counted = new WeakMap<Model, Map<string, number>>();

/** About as many tokens as a turn takes of the context. */
async function tokensOf(model: Model, turn: Turn, count: (text: string) => Promise<number>): Promise<number> {
  const known = counted.get(model) ?? new Map<string, number>();
  counted.set(model, known);
  const results = turn.steps.flatMap(({ calls }) => calls.flatMap(({ arguments: given, result = "" }) => [given, result]));
  const all = [promptWith(turn.prompt, turn.attachments), answerOf(turn), ...results].join("\n");
  // An answer may have grown since.
  const key = `${turn.id} ${all.length}`;
  const tokens = known.get(key) ?? (await count(all)) + pictureTokens(turn) + MESSAGE_TOKENS * (2 + results.length);
  known.set(key, tokens);
  return tokens;
}

/** Numbers about an answer, for people. */
export function noteOf(result: GenerateResult, seed: number | undefined): string {
  const { generatedTokens, decodeSeconds, promptTokens, cachedTokens, stopReason } = result;
  const number = (value: number): string => value.toLocaleString("en");
  return [
    `${number(generatedTokens)} tokens`,
    ...(generatedTokens > 0 && decodeSeconds > 0 ? [`${formatRate(generatedTokens / decodeSeconds)} tokens/s`] : []),
    ...(cachedTokens > 0 ? [`kept ${number(cachedTokens)} of ${number(promptTokens)} prompt tokens`] : []),
    ...(seed === undefined ? [] : [`seed ${seed}`]),
    ...(stopReason === "max_tokens" ? ["stopped at the longest answer"] : []),
    ...(stopReason === "context_full" ? ["stopped: the context is full"] : []),
  ].join(" · ");
}
