// Images in messages: taken out of them in order, with their places, and refused where they are none.

import assert from "node:assert/strict";
import { test } from "node:test";

import { withoutImages } from "../build/images.js";

const of = (...content) => withoutImages([{ role: "user", content }]);

test("images are taken out of messages in order, and templates get a part for each", () => {
  const blob = new Blob(["x"]);
  const pixels = { width: 1, height: 2, data: new Uint8Array(6) };
  const text = { type: "text", text: "a" };
  const given = [{ role: "system", content: "b" }, { role: "user", content: [{ type: "image", image: blob }, text] }, {
    role: "user", name: "c", content: [{ type: "image_url", image_url: { url: "https://example.org/a.png" } }, { type: "image_url", image_url: "data:,x" }, { type: "image", image: pixels }],
  }];
  const before = structuredClone(given.map(({ role, content }) => [role, content.length]));
  const { messages, images } = withoutImages(given);
  const image = { type: "image" };
  assert.deepEqual(messages, [given[0], { role: "user", content: [image, text] }, { role: "user", name: "c", content: [image, image, image] }]);
  assert.deepEqual(images, [
    { name: "messages[1].content[0]", image: blob }, { name: "messages[2].content[0]", image: "https://example.org/a.png" },
    { name: "messages[2].content[1]", image: "data:,x" }, { name: "messages[2].content[2]", image: pixels },
  ]);
  assert.deepEqual(given.map(({ role, content }) => [role, content.length]), before);
});

test("bytes are a file, and extra fields of pixels are left out", async () => {
  const { images } = of({ type: "image", image: Uint8Array.of(1, 2) }, { type: "image", image: Object.assign(new Date(), { width: 1, height: 1, data: new Uint8Array(3) }) });
  assert.deepEqual([...new Uint8Array(await images[0].image.arrayBuffer())], [1, 2]);
  assert.deepEqual(Object.keys(images[1].image), ["width", "height", "data"]);
});

test("what is no image is named with its place", () => {
  const refused = (part, message) => assert.throws(() => of("text", part), { name: "TilewrightError", code: "option", message });
  refused({ type: "image" }, /^messages\[0\]\.content\[1\]\.image is Undefined, expected a Blob, an ImageBitmap/);
  refused({ type: "image", image: 5 }, /image is Number/);
  refused({ type: "image", image: { width: 1 } }, /image is Object/);
  refused({ type: "image", image: "not an address" }, /\.image is "not an address", expected an address/);
  refused({ type: "image_url" }, /\.image_url\.url is undefined, expected an address/);
  assert.deepEqual(of({ type: "audio" }).images, []);
});
