/** Decodes images by the browser, to the pixels of the file: as they are stored, neither resized nor blended. */

import { codeOf, ensure, messageOf, TilewrightError } from "../errors.js";
import { importHidden, isNode } from "../platform.js";
import type { GivenImage } from "../protocol.js";
import type { ImagePixels } from "../types.js";

/** Limits of a file, as natively. */
const MAX_BYTES = 32 << 20;
const MAX_PIXELS = 1 << 26;
/** Pixels that are read back at a time: some browsers limit a canvas to 16 million. */
const STRIP_PIXELS = 1 << 22;

type Format = "PNG" | "JPEG" | "WebP" | "GIF";

/** A file's facts, by its first bytes. A JPEG's size is before it is turned. */
interface Header {
  format: Format;
  width: number;
  height: number;
  hasAlpha: boolean;
  /** How EXIF turns it, where not all browsers do. */
  orientation?: number;
}

/**
 * The pixels of an image.
 *
 * @throws {@link TilewrightError} that names the image: `format` for a broken file or one of another kind, `truncated`,
 * `unsupported` above a limit, `network` or `http` for an address, `unsupported_platform` without a decoder.
 */
export async function pixelsOf({ name, image }: GivenImage, signal: AbortSignal): Promise<ImagePixels> {
  try {
    if (typeof image === "string") {
      return await decode(await fetched(image, signal));
    }
    if (image instanceof Blob) {
      return await decode(image);
    }
    if ("data" in image) {
      return checked(image);
    }
    try {
      return withAlpha(image);
    } finally {
      image.close();
    }
  } catch (error) {
    signal.throwIfAborted();
    throw new TilewrightError(codeOf(error), `${name}: ${messageOf(error)}`, { cause: error });
  }
}

function checked({ width, height, data }: ImagePixels): ImagePixels {
  const isBytes = data instanceof Uint8Array || data instanceof Uint8ClampedArray;
  ensure(isBytes, "option", `data is ${Object.prototype.toString.call(data).slice(8, -1)}, expected a Uint8Array or a Uint8ClampedArray`);
  checkSize("the image", width, height);
  const n = width * height;
  ensure(data.length === 3 * n || data.length === 4 * n,
    "option", `data has ${data.length} bytes, expected ${3 * n} or ${4 * n}: 3 or 4 for each of ${width} × ${height} pixels`);
  return { width, height, data };
}

function checkSize(what: string, width: number, height: number): void {
  const isValid = Number.isInteger(width) && Number.isInteger(height) && width > 0 && height > 0 && width * height <= MAX_PIXELS;
  ensure(isValid, "unsupported", `${what} has ${width} × ${height} pixels, expected 1 to ${MAX_PIXELS} in all`);
}

async function fetched(url: string, signal: AbortSignal): Promise<Blob> {
  if (url.startsWith("data:")) {
    return ofDataUrl(url);
  }
  if (isNode && url.startsWith("file:")) {
    const { readFile } = await importHidden<typeof import("node:fs/promises")>("node:fs/promises");
    return new Blob([await readFile(new URL(url))]);
  }
  let response: Response;
  try {
    response = await fetch(url, { signal });
    ensure(response.ok, "http", `${url} is an error (HTTP status ${response.status})`, { status: response.status });
    checkBytes(Number(response.headers.get("content-length") ?? 0));
    return await blobOf(response);
  } catch (error) {
    throw error instanceof TilewrightError ? error
      : new TilewrightError("network", `${url} could not be fetched: ${messageOf(error)}`, { cause: error });
  }
}

/** The body, which may be longer than announced. */
async function blobOf(response: Response): Promise<Blob> {
  const reader = response.body?.getReader();
  const parts: Uint8Array<ArrayBuffer>[] = [];
  let size = 0;
  for (let part = await reader?.read(); part?.value !== undefined; part = await reader?.read()) {
    parts.push(part.value);
    size += part.value.length;
    if (size > MAX_BYTES) {
      await reader?.cancel();
      checkBytes(size);
    }
  }
  return new Blob(parts);
}

/** Decoded here, because a page's policy may forbid requests of such addresses. */
function ofDataUrl(url: string): Blob {
  const [, type = "", isBase64, text = ""] = /^data:([^,;]*)(?:;(?!base64,)[^,;]*)*(;base64)?,([^]*)$/.exec(url) ?? [];
  ensure(url.includes(","), "option", "the data: address has no comma, expected data:image/png;base64,…");
  ensure(text.length <= MAX_BYTES * 2, "unsupported", `the data: address has ${text.length} characters, expected at most ${MAX_BYTES} bytes`);
  let bytes: string;
  try {
    bytes = isBase64 === undefined ? text.replace(/%([0-9a-f]{2})/gi, (_, code: string) => String.fromCharCode(parseInt(code, 16))) : atob(decodeURIComponent(text));
  } catch (error) {
    throw new TilewrightError("format", "the data: address is no valid base64", { cause: error });
  }
  return new Blob([Uint8Array.from(bytes, (character) => character.charCodeAt(0))], { type });
}

function checkBytes(size: number): void {
  ensure(size <= MAX_BYTES, "unsupported", `the file has ${size} bytes, expected at most ${MAX_BYTES}`);
}

async function decode(file: Blob): Promise<ImagePixels> {
  checkBytes(file.size);
  const bytes = new Uint8Array(await file.arrayBuffer());
  const { format, width, height, hasAlpha, orientation = 1 } = headerOf(bytes);
  checkSize(`the ${format} file`, width, height);
  ensure("createImageBitmap" in globalThis && "OffscreenCanvas" in globalThis,
    "unsupported_platform", `there is no decoder of ${format} files here, expected { width, height, data } with the pixels, 3 or 4 bytes each`);
  let bitmap: ImageBitmap;
  try {
    // The type decides nothing, but one of an SVG would.
    bitmap = await createImageBitmap(new Blob([bytes], { type: `image/${format.toLowerCase()}` }),
      { colorSpaceConversion: "none", premultiplyAlpha: hasAlpha ? "none" : "default" });
  } catch (error) {
    throw new TilewrightError("format", `the ${format} file is broken: ${messageOf(error)}`, { cause: error });
  }
  try {
    const isWhole = [bitmap.width, bitmap.height].sort().join() === [width, height].sort().join();
    ensure(isWhole, "format", `the ${format} file has ${bitmap.width} × ${bitmap.height} pixels, and its header says ${width} × ${height}`);
    return turned(hasAlpha ? withAlpha(bitmap) : opaque(bitmap), orientation);
  } finally {
    bitmap.close();
  }
}

/** Pixels without alpha, by strips through a canvas. */
function opaque(bitmap: ImageBitmap): ImagePixels {
  const { width, height } = bitmap;
  const rows = Math.max(1, Math.min(height, Math.floor(STRIP_PIXELS / width)));
  const canvas = new OffscreenCanvas(width, rows);
  const context = canvas.getContext("2d", { willReadFrequently: true, alpha: false });
  ensure(context, "unsupported_platform", "the browser makes no canvas of this size, whose pixels could be read");
  context.imageSmoothingEnabled = false;
  const data = new Uint8Array(width * height * 3);
  for (let top = 0; top < height; top += rows) {
    const n = Math.min(rows, height - top);
    context.drawImage(bitmap, 0, top, width, n, 0, 0, width, n);
    dropAlpha(context.getImageData(0, 0, width, n).data, data.subarray(top * width * 3));
  }
  return { width, height, data };
}

/** Pixels whose colours a canvas would multiply by alpha, by a texture. */
function withAlpha(bitmap: ImageBitmap): ImagePixels {
  const { width, height } = bitmap;
  checkSize("the image", width, height);
  const gl = new OffscreenCanvas(1, 1).getContext("webgl2", { antialias: false, depth: false });
  ensure(gl, "unsupported_platform", "the image is transparent, and the browser has no WebGL 2, by which its colours are read");
  try {
    const limit = gl.getParameter(gl.MAX_TEXTURE_SIZE) as number;
    ensure(width <= limit && height <= limit,
      "unsupported", `the image has ${width} × ${height} pixels and is transparent, expected at most ${limit} on each side here`);
    gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
    gl.pixelStorei(gl.UNPACK_PREMULTIPLY_ALPHA_WEBGL, false);
    gl.pixelStorei(gl.UNPACK_COLORSPACE_CONVERSION_WEBGL, gl.NONE);
    gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA8, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
    gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer());
    gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, gl.getParameter(gl.TEXTURE_BINDING_2D) as WebGLTexture, 0);
    const rows = Math.max(1, Math.min(height, Math.floor(STRIP_PIXELS / width)));
    const strip = new Uint8Array(width * rows * 4);
    const data = new Uint8Array(width * height * 3);
    for (let top = 0; top < height; top += rows) {
      const n = Math.min(rows, height - top);
      gl.readPixels(0, top, width, n, gl.RGBA, gl.UNSIGNED_BYTE, strip);
      dropAlpha(strip.subarray(0, width * n * 4), data.subarray(top * width * 3));
    }
    const error = gl.getError();
    ensure(error === gl.NO_ERROR, "unsupported_platform", `the browser could not read the colours of a transparent image (WebGL error ${error})`);
    return { width, height, data };
  } finally {
    gl.getExtension("WEBGL_lose_context")?.loseContext();
  }
}

function dropAlpha(rgba: Uint8Array | Uint8ClampedArray, rgb: Uint8Array): void {
  for (let from = 0, to = 0; from < rgba.length; from += 4, to += 3) {
    rgb[to] = rgba[from] ?? 0;
    rgb[to + 1] = rgba[from + 1] ?? 0;
    rgb[to + 2] = rgba[from + 2] ?? 0;
  }
}

/** Pixels as an orientation of EXIF turns them: from 5 on rows become columns. */
function turned(image: ImagePixels, orientation: number): ImagePixels {
  if (orientation < 2 || orientation > 8) {
    return image;
  }
  const { width, height, data } = image;
  const [isTransposed, flipsX, flipsY] = [orientation >= 5, [2, 3, 6, 7].includes(orientation), [3, 4, 7, 8].includes(orientation)];
  const [newWidth, newHeight] = isTransposed ? [height, width] : [width, height];
  const rgb = new Uint8Array(data.length);
  for (let y = 0, to = 0; y < newHeight; y += 1) {
    for (let x = 0; x < newWidth; x += 1, to += 3) {
      const [column, row] = [flipsX ? newWidth - 1 - x : x, flipsY ? newHeight - 1 - y : y];
      const from = 3 * (isTransposed ? column * width + row : row * width + column);
      rgb.set(data.subarray(from, from + 3), to);
    }
  }
  return { width: newWidth, height: newHeight, data: rgb };
}

const EXPECTED = "PNG, JPEG, WebP or GIF";

/** Reads what a file is, before anything is decoded. */
function headerOf(bytes: Uint8Array): Header {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  try {
    const start = String.fromCharCode(...bytes.subarray(0, 16));
    if (start.startsWith("\x89PNG\r\n\x1a\n")) {
      return ofPng(bytes, view);
    }
    if (start.startsWith("\xff\xd8")) {
      return ofJpeg(bytes, view);
    }
    if (/^RIFF[^]{4}WEBP/.test(start)) {
      return ofWebP(bytes, view);
    }
    if (/^GIF8[79]a/.test(start)) {
      const hasAlpha = true; // Pixels without colour count as transparent.
      return { format: "GIF", width: view.getUint16(6, true), height: view.getUint16(8, true), hasAlpha };
    }
  } catch (error) {
    throw error instanceof RangeError ? new TilewrightError("truncated", `the file ends within its header, after ${bytes.length} bytes`) : error;
  }
  throw new TilewrightError("format", `the file is ${impostor(bytes)}, expected ${EXPECTED}`);
}

function impostor(bytes: Uint8Array): string {
  const text = new TextDecoder("latin1").decode(bytes.subarray(0, 512)).replace(/^\u00ef\u00bb\u00bf/, "").trimStart().toLowerCase();
  return bytes.length === 0 ? "empty"
    : /^(<\?xml[^>]*>\s*)?(<!--[^]*?-->\s*)*(<!doctype svg[^>]*>\s*)?<svg/.test(text) ? "an SVG drawing, which has no pixels"
    : /^<(!doctype html|html|head|body)/.test(text) ? "a web page"
    : text.startsWith("%pdf") ? "a PDF document"
    : text.slice(4, 8) === "ftyp" ? "an HEIC or AVIF image, or a video"
    : text.startsWith("bm") ? "a BMP image"
    : /^(ii\*\0|mm\0\*)/.test(text) ? "a TIFF image"
    : "of an unknown format";
}

function ofPng(bytes: Uint8Array, view: DataView): Header {
  const [width, height, colorType] = [view.getUint32(16), view.getUint32(20), view.getUint8(25)];
  let hasAlpha = colorType === 4 || colorType === 6;
  for (let at = 8; ; at += 12 + view.getUint32(at)) {
    ensure(at + 12 <= bytes.length, "truncated", `the PNG file ends early, after ${bytes.length} bytes`);
    const name = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
    hasAlpha ||= name === "tRNS";
    if (name === "IEND") {
      return { format: "PNG", width, height, hasAlpha };
    }
  }
}

function ofJpeg(bytes: Uint8Array, view: DataView): Header {
  let header: Header | undefined;
  for (let at = 2; ;) {
    ensure(view.getUint8(at) === 0xff, "format", `the JPEG file has no marker at byte ${at}`);
    const marker = view.getUint8(at + 1);
    if (marker === 0xff) {
      at += 1;
      continue;
    }
    // A frame, but for the tables of Huffman and arithmetic coding, and JPG.
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) {
      header = { format: "JPEG", height: view.getUint16(at + 5), width: view.getUint16(at + 7), hasAlpha: false };
    }
    if (marker === 0xda) {
      ensure(header, "format", "the JPEG file has no size before its pixels");
      const rest = bytes.subarray(at);
      let end = rest.indexOf(0xff);
      while (end >= 0 && rest[end + 1] !== 0xd9) {
        end = rest.indexOf(0xff, end + 1);
      }
      ensure(end >= 0, "truncated", `the JPEG file ends early, after ${bytes.length} bytes`);
      return header;
    }
    at += 2 + view.getUint16(at + 2);
  }
}

function ofWebP(bytes: Uint8Array, view: DataView): Header {
  const needed = 8 + view.getUint32(4, true);
  ensure(bytes.length >= needed, "truncated", `the WebP file ends early, after ${bytes.length} of ${needed} bytes`);
  const chunk = String.fromCharCode(...bytes.subarray(12, 16));
  const uint24 = (at: number): number => view.getUint16(at, true) + (view.getUint8(at + 2) << 16);
  if (chunk === "VP8X") {
    const orientation = takeOrientation(bytes, view);
    return { format: "WebP", width: uint24(24) + 1, height: uint24(27) + 1, hasAlpha: (view.getUint8(20) & 0x10) !== 0, orientation };
  }
  if (chunk === "VP8L") {
    const bits = view.getUint32(21, true);
    return { format: "WebP", width: (bits & 0x3fff) + 1, height: (bits >>> 14 & 0x3fff) + 1, hasAlpha: (bits >>> 28 & 1) !== 0 };
  }
  ensure(chunk === "VP8 ", "format", `the WebP file begins with ${JSON.stringify(chunk)}, expected VP8, VP8L or VP8X`);
  return { format: "WebP", width: view.getUint16(26, true) & 0x3fff, height: view.getUint16(28, true) & 0x3fff, hasAlpha: false };
}

/** The orientation in a WebP file's EXIF data, which is hidden: some browsers turn the picture, and others do not. */
function takeOrientation(bytes: Uint8Array, view: DataView): number {
  for (let at = 12; at + 8 <= bytes.length;) {
    const length = view.getUint32(at + 4, true);
    if (String.fromCharCode(...bytes.subarray(at, at + 4)) === "EXIF") {
      bytes.set([0x58], at);
      return orientationIn(bytes.subarray(at + 8, at + 8 + length));
    }
    // Chunks of odd length are padded.
    at += 8 + length + length % 2;
  }
  return 1;
}

/** The orientation in EXIF data: tag 0x112 of the first directory of a TIFF file. */
function orientationIn(exif: Uint8Array): number {
  const start = String.fromCharCode(...exif.subarray(0, 4)) === "Exif" ? 6 : 0;
  const view = new DataView(exif.buffer, exif.byteOffset + Math.min(start, exif.length), Math.max(0, exif.length - start));
  try {
    const isLittle = view.getUint16(0) === 0x4949;
    const directory = view.getUint32(4, isLittle);
    const entries = Array.from({ length: view.getUint16(directory, isLittle) }, (_, i) => directory + 2 + 12 * i);
    const found = entries.find((at) => view.getUint16(at, isLittle) === 0x112);
    return found === undefined ? 1 : view.getUint16(found + 8, isLittle);
  } catch {
    // It is broken, which is no reason to refuse the picture.
    return 1;
  }
}
