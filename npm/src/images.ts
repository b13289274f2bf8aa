/** Images in messages and for encoders: validated in the caller's thread, decoded in the worker. */

import { isArrayOf } from "./arguments.js";
import { ensure } from "./errors.js";
import { hasPaths } from "./platform.js";
import type { GivenImage } from "./protocol.js";
import type { ChatMessage, ImagePixels, ImageSource } from "./types.js";

/** Separates the images of messages: each such part becomes `{ type: "image" }`, as templates have it. */
export function withoutImages(messages: readonly ChatMessage[]): { messages: ChatMessage[]; images: GivenImage[] } {
  const images: GivenImage[] = [];
  const partOf = (part: object, name: string): object => {
    const { type } = part as { type?: unknown };
    if (type !== "image" && type !== "image_url") {
      return part;
    }
    images.push({ name, image: type === "image" ? imageOf((part as { image?: unknown }).image, `${name}.image`) : addressOf(part, name) });
    return { type: "image" };
  };
  const plain = messages.map(({ ...message }, i): ChatMessage => {
    const { content } = message;
    return Array.isArray(content)
      ? { ...message, content: content.map((part: object, j) => typeof part === "object" && part !== null ? partOf(part, `messages[${i}].content[${j}]`) : part) }
      : message;
  });
  return { messages: plain, images };
}

/** Images in the order given, or the only one. */
export function imagesOf(given: ImageSource | readonly ImageSource[]): GivenImage[] {
  return Array.isArray(given)
    ? given.map((image: unknown, i) => ({ name: `images[${i}]`, image: imageOf(image, `images[${i}]`) }))
    : [{ name: "image", image: imageOf(given, "image") }];
}

const EXPECTED = "a Blob, an ImageBitmap, an address, the bytes of a file, or { width, height, data }";

function imageOf(image: unknown, name: string): GivenImage["image"] {
  const kind = Object.prototype.toString.call(image).slice(8, -1);
  if (typeof image === "string" || kind === "URL") {
    return absolute(String(image), name);
  }
  if (image instanceof Blob || kind === "Blob" || kind === "File") {
    return image as Blob;
  }
  if (kind === "ArrayBuffer" || isArrayOf("Uint8Array", image)) {
    return new Blob([image as ArrayBuffer | Uint8Array<ArrayBuffer>]);
  }
  if (kind === "ImageBitmap") {
    ensure((image as ImageBitmap).width > 0, "option", `${name} is an ImageBitmap that was closed, expected an open one`);
    return image as ImageBitmap;
  }
  const { width, height, data } = (image ?? {}) as Partial<ImagePixels>;
  ensure(typeof width === "number" && typeof height === "number" && ArrayBuffer.isView(data),
    "option", `${name} is ${kind}, expected ${EXPECTED}`);
  return { width, height, data };
}

function addressOf(part: { image_url?: unknown }, name: string): string {
  const { image_url: given } = part;
  const url = typeof given === "object" && given !== null ? (given as { url?: unknown }).url : given;
  ensure(typeof url === "string", "option", `${name}.image_url.url is ${typeof url}, expected an address`);
  return absolute(url, `${name}.image_url.url`);
}

/** An address for the worker, which has another base. */
function absolute(text: string, name: string): string {
  const base = (globalThis as { document?: { baseURI: string } }).document?.baseURI ?? globalThis.location?.href;
  const shown = JSON.stringify(text.length > 80 ? `${text.slice(0, 80)}…` : text);
  ensure(URL.canParse(text, base), "option", `${name} is ${shown}, expected ${hasPaths ? "an address, such as https:, data: or file:" : "an address"}`);
  return text.startsWith("data:") ? text : new URL(text, base).href;
}
