/** OpenAI's HTTP API without a network. */

import { messageOf } from "../errors.js";
import { decoded } from "../helpers.js";
import type { Client } from "./client-types.js";
import { CompletionStream } from "./common.js";
import { errorResponse, type ErrorBody } from "./errors.js";

/** A path's handlers, by method. */
type Route = Partial<Record<string, (body: object, signal: AbortSignal, rest: string) => Promise<unknown>>>;

/** A `fetch` over these calls. */
export function fetchFrom(client: Omit<Client, "fetch">): Client["fetch"] {
  const routes: [path: RegExp, route: Route][] = [
    [/^chat\/completions$/, { POST: (body, signal) => client.chat.completions.create(body as never, { signal }) }],
    [/^completions$/, { POST: (body, signal) => client.completions.create(body as never, { signal }) }],
    [/^embeddings$/, { POST: (body, signal) => client.embeddings.create(body as never, { signal }) }],
    [/^models$/, { GET: () => client.models.list() }],
    [/^models\/(.+)$/, { GET: (_, __, name) => client.models.retrieve(decoded(name)) }],
  ];
  return async (input, init) => {
    const request = new Request(input, init);
    const { method, signal, url } = request;
    const path = /\/v1\/(.+)$/.exec(new URL(url).pathname)?.[1] ?? "";
    const [pattern, route] = routes.find(([pattern]) => pattern.test(path)) ?? [];
    if (pattern === undefined || route === undefined) {
      return refusal(404, `nothing answers ${method} ${url} here`, "unknown_url");
    }
    const handler = route[method];
    if (handler === undefined) {
      return refusal(405, `${url} takes ${Object.keys(route).join()}, and not ${method}`, "method_not_allowed");
    }
    let body: unknown = {};
    if (method === "POST") {
      const type = request.headers.get("content-type") ?? "application/json";
      if (!type.startsWith("application/json")) {
        return refusal(415, `the request is ${type}, expected application/json`, "unsupported_media_type");
      }
      try {
        body = await request.json();
      } catch (error) {
        signal.throwIfAborted();
        return refusal(400, `the request is no JSON: ${messageOf(error)}`, "invalid_json");
      }
    }
    try {
      const value = await handler(body as object, signal, pattern.exec(path)?.[1] ?? "");
      return value instanceof CompletionStream ? eventsOf(value, signal) : Response.json(value);
    } catch (error) {
      signal.throwIfAborted();
      const { status, body } = errorResponse(error);
      return failed(status, body);
    }
  };
}

/** Clients must not retry: the response would be the same. */
function failed(status: number, body: ErrorBody): Response {
  return Response.json(body, { status, headers: { "x-should-retry": "false" } });
}

function refusal(status: number, message: string, code: string): Response {
  return failed(status, { error: { message, type: "invalid_request_error", param: null, code } });
}

/** A stream as server-sent events. */
function eventsOf(stream: CompletionStream<unknown>, signal: AbortSignal): Response {
  const encoder = new TextEncoder();
  const event = (data: string): Uint8Array => encoder.encode(`data: ${data}\n\n`);
  const body = new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const { done, value } = await stream.next();
        controller.enqueue(event(done === true ? "[DONE]" : JSON.stringify(value)));
        if (done === true) {
          controller.close();
        }
      } catch (error) {
        if (signal.aborted) {
          controller.error(signal.reason);
        } else {
          // The status has been sent, so an error is the last event.
          controller.enqueue(event(JSON.stringify(errorResponse(error).body)));
          controller.close();
        }
      }
    },
    async cancel() {
      await stream.return();
    },
  }, { highWaterMark: 0 });
  return new Response(body, { headers: { "content-type": "text/event-stream", "cache-control": "no-store" } });
}
