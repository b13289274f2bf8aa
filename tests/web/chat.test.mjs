// The chat view of the demo page: saved conversations, branches, tools, attachments, streaming Markdown.
//
// Screenshots go to the folder TILEWRIGHT_SCREENSHOTS, if set.

import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, test } from "node:test";

import { openBrowser } from "./browser.mjs";
import { pageModule, pageScript } from "./page-module.mjs";
import { bytesInMemory, startServer } from "./server.mjs";
import { withTemplate } from "./template.mjs";

const limited = { timeout: 120_000 };
const DATABASE = "tilewright-conversations";
const TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]";
const screenshots = process.env.TILEWRIGHT_SCREENSHOTS;
if (screenshots) mkdirSync(screenshots, { recursive: true });

let server;
let chromium;
before(async () => {
  server = await startServer();
  server.files.set("chat.gguf", bytesInMemory(withTemplate(TEMPLATE)));
  chromium = await openBrowser({ gpu: false, serviceWorkers: "block" });
});
afterEach(async () => {
  await chromium.closePages();
  await forgetAll();
});
after(async () => {
  await chromium?.close();
  await server?.stop();
});

const waitFor = (page, wanted) => page.waitForFunction((wanted) => document.documentElement.dataset.state === wanted, wanted);
const texts = (page, role) => page.locator(`#output .message[data-role=${role}]`).allInnerTexts();
const listed = (page) => page.locator("#conversation-list .conversation span:first-child").allInnerTexts();
const noticed = (page, code) => page.locator(`.notice[data-code=${code}] p`).innerText();
const action = (page, turn, name) => page.locator("#output .turn").nth(turn).locator(`[data-action=${name}]`);

/** Runs in a page before its scripts. */
function watchStates() {
  globalThis.states = [];
  new MutationObserver(() => states.push(document.documentElement.dataset.state)).observe(document, { subtree: true, attributes: true, attributeFilter: ["data-state"] });
}

/** Opens the page with the built-in model. */
async function openPage(...scripts) {
  const page = await chromium.open(`${server.origin}/blank.html`);
  for (const script of [watchStates, ...scripts]) await page.addInitScript(script);
  await page.goto(`${server.origin}/www/`);
  page.on("console", (message) => {
    if (message.type() === "error") page.problems.push(message.text());
  });
  await waitFor(page, "ready");
  return page;
}

async function close(page) {
  assert.deepEqual(page.problems, [], "errors in the page's console");
  await page.close();
}

/** Loads the story model with a chat template, which the page stores. */
async function loadChat(page) {
  await page.fill("#model-url", `${server.origin}/files/chat.gguf`);
  await page.click("#model-url-load");
  await page.waitForFunction(() => document.documentElement.dataset.mode === "chat" && document.documentElement.dataset.state === "ready");
}

const openSettings = (page) => page.locator("#settings").evaluate((details) => (details.open = true));

async function set(page, values) {
  await openSettings(page);
  for (const [name, value] of Object.entries(values)) {
    await page.fill(`#setting-${name}`, value);
    await page.locator(`#setting-${name}`).blur();
  }
}

/** Triggers an answer and waits for its end. */
async function answered(page, begin) {
  await page.evaluate(() => (states.length = 0));
  await begin();
  await page.waitForFunction(() => states.includes("generating") && states.at(-1) !== "generating");
  assert.equal(await page.evaluate(() => states.at(-1)), "ready", await page.innerText("#error"));
}

const ask = (page, text) => answered(page, async () => {
  await page.fill("#prompt", text);
  await page.press("#prompt", "Enter");
});

/** Runs in a page: reads or writes the database. */
async function inDatabase({ name, put = [], version }) {
  const request = indexedDB.open(name, version);
  request.onupgradeneeded = () => {
    if (!request.result.objectStoreNames.contains("conversations")) request.result.createObjectStore("conversations");
  };
  const database = await new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const transaction = database.transaction("conversations", "readwrite");
  const store = transaction.objectStore("conversations");
  for (const [key, value] of put) store.put(value, key);
  const all = store.getAll();
  await new Promise((resolve) => (transaction.oncomplete = resolve));
  database.close();
  return all.result;
}

/** Stored records, including those of other tests. */
const stored = (page) => page.evaluate(inDatabase, { name: DATABASE });

/** Deletes conversations, settings and the last model. */
async function forgetAll() {
  const page = await chromium.open(`${server.origin}/blank.html`);
  await page.evaluate(() => localStorage.clear());
  await page.evaluate((name) => new Promise((resolve) => (indexedDB.deleteDatabase(name).onsuccess = resolve)), DATABASE);
  await page.close();
}

/** Text of the file that an action saves. */
async function saved(page, begin) {
  const [download] = await Promise.all([page.waitForEvent("download"), begin()]);
  return { name: download.suggestedFilename(), text: readFileSync(await download.path(), "utf8") };
}

const inMenu = async (page, selector) => {
  await page.locator("#conversation-menu").evaluate((menu) => (menu.open = true));
  await page.click(selector);
};

test("arithmetic: precedence, functions, and what is wrong in words", async () => {
  const { calculate } = await pageModule("chat/calculator");
  const values = {
    "1+2*3": 7, "(1+2)*3": 9, "2^3^2": 512, "-2^2": -4, "2^-1": 0.5, "10 % 4 - 1": 1, "1.5e3/3": 500, ".5*4": 2, "7 - 2 - 3": 2, "16/4/2": 2,
    "sqrt(16) + abs(-3)": 7, "max(1, 5, 3) - min(2, 1)": 4, "2**3": 8, "6 × 7 ÷ 2 − 1": 20, "round(pi * 100)": 314, "log(1000)": 3, "--4": 4, "LN(e)": 1,
  };
  for (const [expression, value] of Object.entries(values)) assert.ok(Math.abs(calculate(expression) - value) < 1e-12, `${expression} is ${calculate(expression)}`);
  const wrong = {
    "": /expected a number, found the end/, "1+": /found the end/, "(1": /expected \), found the end/, "1 2": /expected the end, found 2/, "1/0": /division by zero/,
    "foo(1)": /there is no foo/, "constructor(1)": /there is no constructor/, "alert`1`": /found `1`|there is no alert/, "1;2": /found ;2/, "9^9^9": /no finite number/,
    [`${"(".repeat(200)}1`]: /deeper/, [`1${"+1".repeat(600)}`]: /characters/, "a=1": /there is no a|found =1/,
  };
  for (const [expression, message] of Object.entries(wrong)) assert.throws(() => calculate(expression), { message }, expression);
});

test("tools say what they found, or what is wrong, and never throw", async () => {
  const { runTool, SCHEMAS } = await pageModule("chat/tools");
  assert.deepEqual(SCHEMAS.map(({ function: { name } }) => name), ["calculator", "clock", "search"]);
  const surroundings = { texts: [{ name: "a.md", text: "Foxes sleep by day.\n\nOwls hunt by night." }, { name: "b.csv", text: "animal,food\nowl,mice\nfox,eggs" }] };
  assert.equal(runTool("calculator", { expression: "6*7" }, surroundings), "42");
  assert.match(runTool("clock", {}, surroundings), /\d{4}/);
  assert.equal(runTool("search", { query: "when do OWLS hunt?" }, surroundings), "a.md: Owls hunt by night.");
  assert.equal(runTool("search", { query: "fox" }, surroundings), "b.csv: fox · eggs");
  assert.equal(runTool("search", { query: "whale" }, surroundings), "nothing was found");
  assert.equal(runTool("search", { query: "whale" }, { texts: [] }), "no file is attached");
  for (const name of ["weather", "constructor", "__proto__"]) assert.match(runTool(name, {}, surroundings), /^error: there is no tool/);
  assert.match(runTool("calculator", { expression: "1/0" }, surroundings), /^error: division by zero/);
});

test("turns go only where the turn that they follow is, and nothing is stored that could not be read again", async () => {
  const { putTurn, removeTurn, restoreTurns } = await pageModule("chat/tree");
  const { newConversation } = await pageModule("chat/records");
  const turn = (id, parent, createdAt) => ({ id, parent, mode: "chat", prompt: id, attachments: [], steps: [], note: "", createdAt });
  const [a, b, c, d] = [turn("a", null, 1), turn("b", "a", 2), turn("c", "b", 3), turn("d", "c", 4)];
  const ids = ({ turns }) => turns.map(({ id }) => id).join("");
  const conversation = newConversation();
  for (const it of [a, b, c, d]) putTurn(conversation, it);
  const last = removeTurn(conversation, "c");
  assert.equal(ids(conversation), "ab");
  putTurn(conversation, d);
  assert.equal(ids(conversation), "ab", "its parent is gone");
  restoreTurns(conversation, [d, c]);
  assert.equal(ids(conversation), "abcd");
  removeTurn(conversation, "b");
  restoreTurns(conversation, last);
  assert.equal(ids(conversation), "a", "neither has what it followed");

  const { BroadcastChannel } = globalThis;
  globalThis.BroadcastChannel = class extends EventTarget { postMessage() {} };
  try {
    const { Conversations } = await pageModule("chat/store");
    // Node has no database: conversations stay in memory.
    const store = await Conversations.open({ changed() {}, told() {} });
    await store.add(conversation);
    await assert.rejects(store.update(conversation.id, ({ turns }) => turns.push(d)), /a parent that is not there/);
    assert.equal(ids(await store.get(conversation.id)), "a");
  } finally {
    globalThis.BroadcastChannel = BroadcastChannel;
  }
});

test("a conversation that could not be stored stays on the page, and is stored when there is room again", limited, async () => {
  const page = await openPage(() => {
    const { put } = IDBObjectStore.prototype;
    IDBObjectStore.prototype.put = function (...given) {
      if (globalThis.isFull) throw new DOMException("no room", "QuotaExceededError");
      return put.apply(this, given);
    };
    // Each piece of an answer is saved.
    performance.now = ((now) => () => now += 1000)(performance.now());
  });
  await set(page, { maxTokens: "8" });
  await page.evaluate(() => (globalThis.isFull = true));
  await ask(page, "A red boat");
  assert.match(await noticed(page, "conversations"), /could not be stored: no room/);
  assert.deepEqual(await texts(page, "user"), ["A red boat"]);
  assert.deepEqual(await stored(page), []);
  await page.evaluate(() => (globalThis.isFull = false));
  await ask(page, "A green hill");
  const [{ turns }] = await until(page, stored, ([record]) => record?.turns.length === 2 && record.turns.every(({ usedTokens }) => usedTokens > 0));
  assert.deepEqual(turns.map(({ prompt }) => prompt), ["A red boat", "A green hill"]);
  assert.equal(await page.locator(".notice[data-code=conversations]").count(), 1, "nothing was deleted elsewhere");

  // Undo restores a deletion in a hidden conversation, and loading a model keeps the button.
  await action(page, 1, "delete").click();
  await until(page, stored, ([record]) => record.turns.length === 1);
  await page.click("#clear");
  await ask(page, "A blue bird");
  await loadChat(page);
  await page.getByRole("button", { name: "Undo" }).click();
  await until(page, stored, (records) => records.some(({ turns }) => turns.map(({ prompt }) => prompt).join() === "A red boat,A green hill"));
  assert.deepEqual(await texts(page, "user"), ["A blue bird"]);
  await close(page);
});

test("a conversation is there after a reload, with its title, and so is an answer that was not complete", limited, async () => {
  const page = await openPage();
  await set(page, { maxTokens: "24" });
  await ask(page, "One day a fox\nmet a bear");
  const [before] = await texts(page, "assistant");
  assert.deepEqual(await listed(page), ["One day a fox"]);
  await page.reload();
  await waitFor(page, "ready");
  assert.deepEqual(await texts(page, "assistant"), [before]);
  assert.equal(await page.inputValue("#conversation-title"), "One day a fox");

  // An answer that never ends: the page has only what it saved while streaming. The end is never saved, however late
  // this test looks.
  await page.evaluate(() => {
    performance.now = ((now) => () => now += 1000)(performance.now());
    const { put } = IDBObjectStore.prototype;
    IDBObjectStore.prototype.put = function (record, ...rest) {
      const isEnd = record.turns.length > 1 && record.turns[1].note !== "broken off";
      return isEnd ? this.get(record.id) : put.call(this, record, ...rest);
    };
  });
  await set(page, { maxTokens: "400" });
  await page.fill("#prompt", "Once upon a time");
  await page.press("#prompt", "Enter");
  const [record] = await until(page, stored, ([record]) => record.turns[1]?.steps[0]?.text.length > 10 && record.turns[1].note === "broken off");
  await page.goto(`${server.origin}/blank.html`);
  await page.goto(`${server.origin}/www/`);
  await waitFor(page, "ready");
  const [first, second] = await texts(page, "assistant");
  assert.equal(first, before);
  assert.ok(second.trim().startsWith(record.turns[1].steps[0].text.trim().slice(0, 10)), second);
  await page.click("#clear");
  assert.equal(await page.locator("#output .turn").count(), 0);
  assert.deepEqual(await listed(page), ["One day a fox"], "the old one stays");
  await close(page);
});

/** Waits until a function of a page returns the expected value, and returns it. */
async function until(page, get, isWanted) {
  for (;;) {
    const value = await get(page);
    if (isWanted(value)) return value;
    await page.waitForTimeout(20);
  }
}

test("edited prompts and new answers are branches; a turn that was deleted comes back", limited, async () => {
  const page = await openPage();
  await loadChat(page);
  await set(page, { maxTokens: "6" });
  await ask(page, "Tell me of a dog.");
  await ask(page, "And then?");
  const [dog, then] = await texts(page, "assistant");

  await action(page, 0, "edit").click();
  await page.locator("#output textarea").fill("Tell me of a cat.");
  await answered(page, () => page.press("#output textarea", "Enter"));
  assert.deepEqual(await texts(page, "user"), ["Tell me of a cat."]);
  assert.equal(await page.locator(".branches span").innerText(), "2 of 2");
  await answered(page, () => action(page, 0, "regenerate").click());
  assert.equal(await page.locator(".branches span").innerText(), "3 of 3");
  assert.ok(await action(page, 0, "next").isDisabled());
  await action(page, 0, "before").click();
  await action(page, 0, "before").click();
  assert.deepEqual(await texts(page, "user"), ["Tell me of a dog.", "And then?"]);
  assert.deepEqual(await texts(page, "assistant"), [dog, then]);
  assert.ok(await action(page, 0, "before").isDisabled());
  await until(page, stored, ([{ turns, chosen }]) => turns.length === 4 && chosen[""] === turns[0].id);
  await page.reload();
  await waitFor(page, "ready");
  assert.deepEqual(await texts(page, "user"), ["Tell me of a dog.", "And then?"]);
  assert.equal(await page.locator(".branches:visible span").innerText(), "1 of 3");

  await action(page, 0, "delete").click();
  assert.deepEqual(await texts(page, "user"), ["Tell me of a cat."], "the next branch");
  assert.match(await noticed(page, "deleted"), /and 1 behind it/);
  assert.equal((await until(page, stored, ([{ turns }]) => turns.length === 2))[0].turns.length, 2);
  await page.getByRole("button", { name: "Undo" }).click();
  assert.deepEqual(await texts(page, "user"), ["Tell me of a dog.", "And then?"]);
  assert.deepEqual(await texts(page, "assistant"), [dog, then]);
  await close(page);
});

test("conversations are renamed, found, exported, deleted, imported and equal; a hostile file changes nothing", limited, async () => {
  const page = await openPage();
  await set(page, { maxTokens: "5" });
  for (const prompt of ["A red boat", "A green hill", "A blue bird"]) {
    if (prompt !== "A red boat") await page.click("#clear");
    await ask(page, prompt);
  }
  await page.fill("#conversation-title", "Birds & <b>others</b>");
  await page.press("#conversation-title", "Enter");
  assert.deepEqual(await until(page, listed, ([first]) => first !== "A blue bird"), ["Birds & <b>others</b>", "A green hill", "A red boat"]);
  for (const [query, found] of [["GREEN", ["A green hill"]], ["blue others", ["Birds & <b>others</b>"]], ["nothing of this", []], ["", [1, 2, 3]]]) {
    await page.fill("#conversation-search", query);
    await until(page, listed, (titles) => titles.length === found.length && (query === "" || titles.every((title, i) => title === found[i])));
  }

  const before = await stored(page);
  const file = await saved(page, () => page.click("#conversations-export"));
  const one = await saved(page, () => inMenu(page, "#export-json"));
  const markdown = await saved(page, () => inMenu(page, "#export-markdown"));
  assert.deepEqual([file.name, one.name, markdown.name], ["conversations.json", "Birds-b-others-b.json", "Birds-b-others-b.md"]);
  assert.equal(JSON.parse(one.text).conversations.length, 1);
  assert.ok(markdown.text.startsWith("# Birds & <b>others</b>\n\nA blue bird"), markdown.text);
  await inMenu(page, "#conversation-delete");
  await until(page, listed, ({ length }) => length === 2);
  await page.getByRole("button", { name: "Undo" }).click();
  await until(page, listed, ({ length }) => length === 3);

  await forgetAll();
  await page.reload();
  await waitFor(page, "ready");
  const give = (text, name = "mine.json") => page.setInputFiles("#conversations-import", { name, mimeType: "application/json", buffer: Buffer.from(text) });
  await give(file.text);
  await until(page, listed, ({ length }) => length === 3);
  const byId = (records) => [...records].sort((a, b) => (a.id < b.id ? -1 : 1));
  assert.deepEqual(byId(await stored(page)), byId(before));

  const whole = JSON.parse(file.text);
  const changed = (change) => {
    const copy = structuredClone(whole);
    change(copy.conversations[1], copy);
    return JSON.stringify(copy);
  };
  const hostile = {
    "no JSON": ["{", /no JSON/],
    "another file": ["[1,2]", /no conversations of this page/],
    null: ["null", /no conversations of this page/],
    "an older version": [changed((it) => (it.format = 0)), /conversation 2 of 3: it was stored by an older version/],
    "a newer version": [changed((it) => (it.format = 7)), /newer version/],
    "no object": [changed((_, all) => (all.conversations[2] = "x")), /conversation 3 of 3/],
    "a title that is none": [changed((it) => (it.title = { toString: 1 })), /title/],
    "a text that is none": [changed((it) => (it.turns[0].steps[0].text = 5)), /turns\.0\.steps\.0\.text/],
    "a circle": [changed((it) => (it.turns[0].parent = it.turns[0].id)), /their own parents/],
    "no such parent": [changed((it) => (it.turns[0].parent = "x")), /a parent that is not there/],
    "two of the same": [changed((it) => it.turns.push(it.turns[0])), /the same id/],
    "calls that are none": [changed((it) => (it.turns[0].steps[0].calls = [{ id: "", name: "clock", arguments: "alert(1)" }])), /JSON object/],
  };
  for (const [what, [text, message]] of Object.entries(hostile)) {
    await give(text, `${what}.json`);
    const notice = page.locator(".notice[data-code=conversations]").filter({ hasText: `${what}.json` });
    assert.match(await notice.innerText(), message, what);
    assert.match(await notice.innerText(), /^Nothing was imported from/, what);
    await notice.getByRole("button").click();
    assert.deepEqual(byId(await stored(page)), byId(before), what);
  }
  // An existing conversation is kept, and the import added beside it.
  await give(one.text);
  assert.equal((await until(page, listed, ({ length }) => length === 4)).filter((title) => title.startsWith("Birds")).length, 2);
  await close(page);
});

test("a record that cannot be read is told, and hides and changes no other; a database that cannot be opened is told", limited, async () => {
  const page = await openPage();
  await set(page, { maxTokens: "5" });
  await ask(page, "A red boat");
  const [good] = await stored(page);
  const bad = [
    ["broken", { ...good, id: "broken", turns: [{ ...good.turns[0], steps: "none" }] }], ["older", { ...good, id: "older", format: 0 }],
    ["text", "<img src=x onerror=alert(1)>"], ["cut", { format: 1, id: "cut" }],
  ];
  await page.evaluate(inDatabase, { name: DATABASE, put: bad });
  await page.reload();
  await waitFor(page, "ready");
  await until(page, (page) => page.locator("#conversation-list li").count(), (count) => count === 5);
  assert.deepEqual(await listed(page), ["A red boat"]);
  const problem = (id) => page.getAttribute(`#conversation-list li[data-id=${id}]`, "data-problem");
  assert.match(await problem("broken"), /^turns\.0\.steps: /);
  assert.match(await problem("older"), /older version/);
  await ask(page, "A green hill");
  const ids = bad.map(([id]) => id);
  assert.deepEqual((await stored(page)).filter((record) => ids.includes(record.id ?? "text")), bad.map(([, record]) => record).sort((a, b) => ((a.id ?? "text") < (b.id ?? "text") ? -1 : 1)));
  const { text } = await saved(page, () => page.locator("li[data-id=older]").getByRole("button", { name: /Save/ }).click());
  assert.equal(JSON.parse(text).format, 0);
  await page.locator("li[data-id=older]").getByRole("button", { name: "Delete" }).click();
  await until(page, (page) => page.locator("#conversation-list li").count(), (count) => count === 4);
  await close(page);

  // A newer version of the page has another database.
  await forgetAll();
  const blank = await chromium.open(`${server.origin}/blank.html`);
  await blank.evaluate(inDatabase, { name: DATABASE, put: [["new", { format: 9 }]], version: 99 });
  const newer = await openPage();
  assert.match(await noticed(newer, "conversations"), /cannot be stored here.*a newer version of this page/);
  await ask(newer, "A red boat");
  assert.deepEqual(await until(newer, listed, ({ length }) => length === 1), ["A red boat"], "kept as long as the page");
  assert.deepEqual(await blank.evaluate(inDatabase, { name: DATABASE }), [{ format: 9 }]);
  await close(newer);
  await forgetAll();

  const forbidden = await openPage(() => {
    Object.defineProperty(globalThis, "indexedDB", { get: () => ({ open: () => { throw new DOMException("not in private windows", "SecurityError"); } }) });
    Object.defineProperty(globalThis, "sessionStorage", { get: () => { throw new DOMException("no", "SecurityError"); } });
  });
  assert.match(await noticed(forbidden, "conversations"), /not in private windows/);
  await ask(forbidden, "A red boat");
  await close(forbidden);
});

test("two tabs: what one changes the other shows, and neither undoes the other's changes", limited, async () => {
  const first = await openPage();
  await set(first, { maxTokens: "5" });
  await ask(first, "A red boat");
  const second = await openPage();
  await second.locator("#conversation-list button").click();
  assert.deepEqual(await until(second, (page) => texts(page, "user"), ({ length }) => length === 1), ["A red boat"]);
  // Both continue from the same turn; the first one loads the second one's when shown.
  await ask(second, "A green hill");
  await until(first, (page) => texts(page, "user"), ({ length }) => length === 2);
  await first.fill("#conversation-title", "Boats");
  await first.press("#conversation-title", "Enter");
  await until(second, (page) => page.inputValue("#conversation-title"), (title) => title === "Boats");
  await Promise.all([ask(first, "A blue bird"), ask(second, "A white cloud")]);
  const [record] = await until(first, stored, ([{ turns }]) => turns.length === 4 && turns.every(({ usedTokens }) => usedTokens > 0));
  assert.deepEqual(record.turns.map(({ prompt }) => prompt).sort(), ["A blue bird", "A green hill", "A red boat", "A white cloud"]);
  assert.equal(record.title, "Boats");
  await inMenu(second, "#conversation-delete");
  await first.locator(".notice[data-code=conversations]").waitFor();
  assert.match(await noticed(first, "conversations"), /deleted in another tab/);
  assert.equal(await first.locator("#output .turn").count(), 0);
  assert.deepEqual(await stored(first), []);
  await close(first);
  await close(second);
});

test("the list of conversations closes when another view is shown", limited, async () => {
  const page = await openPage();
  await page.setViewportSize({ width: 500, height: 700 });
  await page.click("#conversations-toggle");
  assert.equal(await page.locator("[inert]").count(), 3);
  // As when texts are dropped.
  await page.evaluate(() => (location.hash = "#search"));
  await page.waitForFunction(() => document.documentElement.dataset.view === "search");
  assert.equal(await page.locator("[inert]").count(), 0);
  await page.close();
});

test("files are attached as text or refused in a sentence; tools are called, and what they say is fed back", limited, async () => {
  const page = await openPage();
  assert.ok(await page.locator("#attach").isHidden(), "a story takes no files");
  await inMenu(page, "#chat-head");
  await loadChat(page);
  await set(page, { maxTokens: "40", seed: "3" });
  const attach = (name, text) => page.setInputFiles("#attach", { name, mimeType: "text/plain", buffer: Buffer.from(text) });
  for (const [name, text, message] of [
    ["picture.png", Buffer.from([0x89, 0x50, 0xff]), /no text in UTF-8/], ["zero.txt", "a\0b", /no text/], ["empty.md", " \n", /empty/],
    ["long.txt", "Tom and the big dog. ".repeat(200), /takes [\d,]+ tokens, \d+ % of the context of 512; files may take 75 % together/],
    ["huge.log", "x".repeat(1024 * 1024 + 1), /at most 1.0 MB/],
  ]) {
    await attach(name, text);
    const notice = page.locator(".notice[data-code=attachment]").filter({ hasText: name });
    assert.match(await notice.innerText(), message);
    await notice.getByRole("button").click();
  }
  assert.ok(await page.locator("#attachments").isHidden());
  await attach("owls.md", "Owls hunt by night.");
  await until(page, (page) => page.innerText("#attachments"), (text) => /owls\.md.*19 bytes, \d+ % of the context/s.test(text));
  await page.getByRole("button", { name: "Remove owls.md" }).click();
  await attach("owls.md", "Owls hunt by night.");
  await page.locator(".attachment").waitFor();
  await ask(page, "What of owls?");
  assert.match(await page.locator(".turn .attachments").innerText(), /owls\.md/);
  assert.ok(await page.locator("#attachments").isHidden());
  const [{ turns: [turn] }] = await until(page, stored, ([record]) => record?.turns[0].usedTokens > 0);
  assert.deepEqual(turn.attachments, [{ name: "owls.md", text: "Owls hunt by night." }]);
  const { promptWith } = await pageModule("chat/attachments").catch(() => ({}));
  if (promptWith) assert.equal(promptWith("What?", [{ name: "a.md", text: "```\nx\n```" }]), "What?\n\nFile a.md:\n````\n```\nx\n```\n````");

  await page.locator("#conversation-menu").evaluate((menu) => (menu.open = true));
  assert.deepEqual(JSON.parse(await page.locator("#tools-schema").textContent()).map(({ function: { name } }) => name), ["calculator", "clock", "search"]);
  await page.selectOption("#conversation-tools", "required");
  await page.keyboard.press("Escape");
  await set(page, { maxTokens: "120", temperature: "0" });
  await ask(page, "What time is it?");
  const [{ turns }] = await until(page, stored, ([record]) => record.turns[1]?.usedTokens > 0);
  const { steps } = turns[1];
  assert.ok(steps.length >= 2 && steps.length <= 6, JSON.stringify(steps));
  assert.ok(steps[0].calls.length > 0 && steps[0].calls.every(({ name, result }) => ["calculator", "clock", "search"].includes(name) && result.length > 0), JSON.stringify(steps));
  assert.match(await page.locator(".call summary").first().innerText(), /^(calculator|clock|search) \{.*\} → /);
  await page.reload();
  await waitFor(page, "ready");
  assert.equal(await page.locator(".call").count(), steps.reduce((sum, { calls }) => sum + calls.length, 0));
  await close(page);
});

test("when the context is full the older turns are dropped, and it is said where", limited, async () => {
  const page = await openPage();
  await loadChat(page);
  await set(page, { maxTokens: "100", temperature: "1" });
  let n = 0;
  for (; n < 9 && await page.locator(".forgets:visible").count() === 0; n += 1) {
    await ask(page, `Tell me more about the big dog and the little cat, part ${n}.`);
    assert.match(await page.innerText("#status-context"), /^[\d,]+ of 512 tokens$/);
  }
  assert.ok(n > 2 && n < 9, `${n} turns`);
  const meter = await page.locator("#context-meter").evaluate((meter) => meter.value);
  assert.ok(meter > 0 && meter <= 1, String(meter));
  // The mark is before the first turn in the context, and usage matches the rest.
  const at = await page.locator("#output .turn").evaluateAll((turns) => turns.findIndex((turn) => turn.querySelector(".forgets:not([hidden])")));
  assert.ok(at > 0 && at < n, `turn ${at} of ${n}`);
  await page.reload();
  await waitFor(page, "ready");
  assert.equal(await page.locator(".forgets:visible").count(), 1);
  await close(page);
});

test("a conversation that is opened again goes on without its prompt being computed", limited, async () => {
  const page = await openPage();
  await loadChat(page);
  await set(page, { maxTokens: "8", temperature: "0" });
  await ask(page, "Tell me of a dog that ran over the green hill to the old man.");
  await page.waitForFunction(() => Number(document.querySelector("#status-context").dataset.kept) > 0);
  await page.reload();
  await page.waitForFunction(() => document.documentElement.dataset.mode === "chat" && document.documentElement.dataset.state === "ready");
  const [before] = await texts(page, "assistant");
  await answered(page, () => action(page, 0, "regenerate").click());
  const [, kept, all] = /kept ([\d,]+) of ([\d,]+) prompt tokens/.exec(await page.locator(".note").innerText());
  // The last one is computed, since it gives the answer's first token.
  assert.equal(Number(kept), Number(all) - 1);
  assert.deepEqual(await texts(page, "assistant"), [before]);
  await close(page);
});

/** Markdown, and the HTML of its expected elements. */
const TREES = {
  "A **bold *and both*** `co<de` ~~no~~.": "<p>A <strong>bold <em>and both</em></strong> <code>co&lt;de</code> <del>no</del>.</p>",
  "# One\n### Three\ntext\nand more": '<h3 data-level="1">One</h3><h3 data-level="3">Three</h3><p>text<br>and more</p>',
  "- a\n- b\n  - c\n\n3. x\n4. y": '<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol start="3"><li>x</li><li>y</li></ol>',
  "- [x] done\n- [ ] open": '<ul><li class="task">☑ done</li><li class="task">☐ open</li></ul>',
  "| a | b |\n|:-:|--:|\n| 1 | **2** |": '<div class="table" tabindex="0"><table><thead><tr><th data-align="center">a</th><th data-align="right">b</th></tr></thead>'
    + '<tbody><tr><td data-align="center">1</td><td data-align="right"><strong>2</strong></td></tr></tbody></table></div>',
  "> quoted\n> more\n\n---": "<blockquote><p>quoted<br>more</p></blockquote><hr>",
  "```js\nlet a = '<b>';\n\n// x\n```": '<div class="code"><div class="code-head" data-language="js"><button type="button" class="copy quiet" aria-label="Copy this code"></button></div>'
    + "<pre tabindex=\"0\"><code>let a = '&lt;b&gt;';\n\n// x</code></pre></div>",
  "[site](https://example.org/a?b=1&c=2) <me@example.org>": '<p><a href="https://example.org/a?b=1&amp;c=2" target="_blank" rel="noopener noreferrer nofollow">site</a> '
    + '<a href="mailto:me@example.org" target="_blank" rel="noopener noreferrer nofollow">me@example.org</a></p>',
  "[a](javascript:alert(1)) [b](JaVaScRiPt&#58;alert(1)) [c](data:text/html,x) [d](/here) [e](vbscript:x)": "<p>a b c d e</p>",
  "![a picture](https://example.org/x.png)": '<p><span class="image">a picture</span></p>',
  "<script>alert(1)</script>\n\n<img src=x onerror=alert(1)>\n\na <b onclick=x>b</b> c<br>d &lt;i&gt; &#x41;":
    "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p><p>&lt;img src=x onerror=alert(1)&gt;</p><p>a &lt;b onclick=x&gt;b&lt;/b&gt; c<br>d &lt;i&gt; A</p>",
  "It costs $5 and x_1 for $6, $7 = $8, or 2 * 3 * 4 and snake_case_here.": "<p>It costs $5 and x_1 for $6, $7 = $8, or 2 * 3 * 4 and snake_case_here.</p>",
};

test("Markdown becomes elements, the same piece by piece as at once; nothing of it is HTML", limited, async () => {
  server.besidePage.set("markdown-test.js", await pageScript("markdown"));
  const page = await openPage();
  try {
    const render = (given) => page.evaluate(async ({ texts, steps }) => {
      const { GrowingMarkdown } = await import(new URL("markdown-test.js", location.href).href);
      return texts.map((text) => steps.map((step) => {
        const into = document.createElement("div");
        document.querySelector("#output").append(into);
        const markdown = new GrowingMarkdown(into);
        for (let at = 0; at < text.length; at += step) markdown.append(text.slice(at, at + step));
        markdown.end();
        return into.innerHTML;
      }));
    }, given);
    const steps = [1e9, 1, 3, 7];
    const all = await render({ texts: Object.keys(TREES), steps });
    Object.values(TREES).forEach((tree, i) => all[i].forEach((html, j) => assert.equal(html, tree, `${steps[j]} at a time`)));
    // All of it concatenated gives the same.
    const [whole] = await render({ texts: [Object.keys(TREES).join("\n\n")], steps: [1e9, 5, 64] });
    for (const html of whole) assert.equal(html, whole[0]);
    assert.equal(whole[0], Object.values(TREES).join(""));
    // Potentially slow input stays text, and is complete.
    for (const mark of ["*a ", "[", "> ", "1. ", "$$", "\\(", "_a", "a@", "```", "- "]) {
      const text = mark.repeat(3000);
      const [[html]] = await render({ texts: [text], steps: [1e9] });
      assert.ok(html.length > 0, mark);
    }
    assert.ok(await page.evaluate(() => !document.querySelector("#output script, #output img, #output b, #output [onclick]")));

    // Formulas and colours load on demand. MathML contains neither HTML nor handlers from the formula.
    await render({ texts: ["Then $x^2+1$ and \\(y\\) and\n\n$$\\frac{a}{b}$$\n\nand \\[\\int_0^1\\] but $\\href{javascript:alert(1)}{z}$ $\\wrong$\n\n```python\ndef f(x): return 'a' # c\n```"], steps: [1e9] });
    await page.waitForFunction(() => document.querySelectorAll("#output math").length >= 4);
    assert.deepEqual(await page.evaluate(() => [...document.querySelectorAll("#output .math a, #output .math [href], #output .math [style]")].map((it) => it.outerHTML)), []);
    assert.equal(await page.locator("#output mfrac").count(), 1);
    await page.waitForFunction(() => ["code-keyword", "code-string", "code-comment"].every((name) => CSS.highlights.has(name)));
    const coloured = await page.evaluate(() => [...CSS.highlights.entries()].flatMap(([name, ranges]) => [...ranges]
      .filter((range) => range.startContainer.data.startsWith("def")).map((range) => [name, range.startContainer.data.slice(range.startOffset, range.endOffset)])));
    assert.ok(coloured.some(([name, text]) => name === "code-keyword" && text === "def"), JSON.stringify(coloured));
    assert.ok(coloured.some(([name, text]) => name === "code-string" && text === "'a'"), JSON.stringify(coloured));
    assert.ok(coloured.some(([name, text]) => name === "code-comment" && text === "# c"), JSON.stringify(coloured));
  } finally {
    server.besidePage.delete("markdown-test.js");
  }
  await close(page);
});

test("while text streams a selection stays and nothing moves; the longest task of the page is told", limited, async (t) => {
  server.besidePage.set("markdown-test.js", await pageScript("markdown"));
  const page = await openPage(() => {
    globalThis.longTasks = [];
    globalThis.shifts = [];
    new PerformanceObserver((list) => longTasks.push(...list.getEntries().map(({ duration }) => duration))).observe({ type: "longtask" });
    // Shifts after a key or a click are expected.
    new PerformanceObserver((list) => shifts.push(...list.getEntries().filter(({ hadRecentInput }) => !hadRecentInput)
      .map(({ value, sources }) => ({ value, of: sources.map(({ node }) => node?.id || node?.className || node?.nodeName).join(", ") })))).observe({ type: "layout-shift" });
  });
  try {
    // A model's answer: the selection is in its first words.
    await loadChat(page);
    await set(page, { maxTokens: "300", temperature: "0.8" });
    await page.evaluate(() => new Promise((resolve) => setTimeout(resolve, 600)));
    await page.evaluate(() => (longTasks.length = shifts.length = 0));
    await page.fill("#prompt", "Tell me of a dog.");
    await page.press("#prompt", "Enter");
    const selected = await page.waitForFunction(() => {
      const node = document.querySelector("#output .message[data-role=assistant] p")?.firstChild;
      if (!(node instanceof Text) || node.length < 12) return "";
      getSelection().setBaseAndExtent(node, 2, node, 10);
      return getSelection().toString();
    });
    await page.waitForFunction(() => states.at(-1) === "ready");
    assert.equal(await page.evaluate(() => getSelection().toString()), await selected.jsonValue());
    const streamed = await page.evaluate(() => ({ longTasks: longTasks.splice(0), shifts: shifts.splice(0) }));

    // A long answer with all Markdown features, one piece per frame; the selection is in the growing block.
    const text = `${Object.keys(TREES).join("\n\n")}\n\n`.repeat(4);
    const kept = await page.evaluate(async (text) => {
      const { GrowingMarkdown } = await import(new URL("markdown-test.js", location.href).href);
      const into = document.createElement("div");
      into.className = "message";
      document.querySelector("#output").append(into);
      await new Promise((resolve) => setTimeout(resolve, 300));
      longTasks.length = shifts.length = 0;
      const markdown = new GrowingMarkdown(into);
      const lost = [];
      for (let at = 0; at < text.length; at += 24) {
        markdown.append(text.slice(at, at + 24));
        const node = into.querySelector(":scope > p:first-child")?.firstChild;
        if (at === 24) getSelection().setBaseAndExtent(node, 0, node, 2);
        if (at > 24 && getSelection().toString() !== "A ") lost.push(at);
        await new Promise((resolve) => requestAnimationFrame(resolve));
      }
      markdown.end();
      await new Promise((resolve) => setTimeout(resolve, 200));
      return { lost, longTasks, shifts };
    }, text);
    assert.deepEqual(kept.lost, []);
    const moved = (shifts) => shifts.reduce((sum, { value }) => sum + value, 0);
    const longest = (tasks) => Math.max(0, ...tasks).toFixed(0);
    t.diagnostic(`streamed by a model: longest task ${longest(streamed.longTasks)} ms, layout shift ${moved(streamed.shifts)}; Markdown: ${longest(kept.longTasks)} ms, ${moved(kept.shifts)}`);
    // Less than a pixel of a line.
    assert.ok(moved(streamed.shifts) < 1e-4, JSON.stringify(streamed.shifts));
    assert.deepEqual(kept.shifts, []);
  } finally {
    server.besidePage.delete("markdown-test.js");
  }
  await close(page);
});

test("at 360 pixels, light and dark, nothing is wider than the screen, and the list opens and closes", limited, async () => {
  const page = await openPage();
  await page.setInputFiles("#conversations-import", { name: "sample.json", mimeType: "application/json", buffer: Buffer.from(sampleFile()) });
  await page.setViewportSize({ width: 360, height: 740 });
  await page.click("#conversations-toggle");
  await page.locator("#conversation-list").getByText("Sample").click();
  assert.ok(await page.locator("#conversations").isHidden());
  await page.waitForFunction(() => document.querySelector("#output math"));
  for (const [name, width, height] of [["phone", 360, 740], ["desk", 1280, 800], ["wide", 1600, 900]]) {
    for (const colorScheme of ["light", "dark"]) {
      await page.setViewportSize({ width, height });
      await page.emulateMedia({ colorScheme });
      if (screenshots) await page.screenshot({ path: join(screenshots, `chat-${name}-${colorScheme}.png`) });
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), name);
    }
  }
  await page.setViewportSize({ width: 360, height: 740 });
  await page.click("#conversations-toggle");
  if (screenshots) await page.screenshot({ path: join(screenshots, "chat-list.png") });
  await page.keyboard.press("Escape");
  assert.equal(await page.evaluate(() => document.activeElement.id), "conversations-toggle");
  const unnamed = await page.evaluate(() => [...document.querySelectorAll("#view-chat :is(button, input, select, textarea, a, summary, meter)")]
    .filter((it) => !(it.getAttribute("aria-label") || it.labels?.length || it.textContent.trim())).map((it) => it.outerHTML));
  assert.deepEqual(unnamed, []);
  await close(page);
});

/** A file with a conversation that has everything possible in a turn. */
function sampleFile() {
  const turn = (id, parent, prompt, steps, more = {}) => ({ id, parent, mode: "chat", prompt, attachments: [], steps, note: "52 tokens · 40 tokens/s", createdAt: 1, ...more });
  const step = (text, more = {}) => ({ thinking: "", text, calls: [], ...more });
  const turns = [
    turn("a", null, "What is 6 times 7? Look into the file, too.", [
      step("", { thinking: "I should compute this.", calls: [{ id: "1", name: "calculator", arguments: '{"expression":"6*7"}', result: "42" }] }),
      step("It is **42**, and $6 \\cdot 7 = \\sum_{i=1}^{6} 7$."),
    ], { attachments: [{ name: "numbers.csv", text: "a,b\n6,7\n" }] }),
    turn("b", "a", "Show me a table and some code.", [step("## A table\n\n| Name | Size | Note |\n|---|--:|---|\n| small | 1.2 MB | fits anywhere |\n| large | 4.8 GB | needs a GPU |\n\n- one\n- two\n  1. deeper\n\n> A quote.\n\n```python\ndef area(r: float) -> float:\n    \"\"\"Area of a circle.\"\"\"\n    return 3.14159 * r ** 2  # about\n```\n\nSee [the site](https://example.org).\n\n$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$")], { usedTokens: 300 }),
    turn("c", "a", "Show me less.", [step("No.")]),
  ];
  const conversation = { format: 1, id: "sample", title: "Sample of everything", isNamed: true, systemPrompt: "", tools: "auto", createdAt: 1, updatedAt: Date.now(), turns, chosen: { a: "b" } };
  return JSON.stringify({ kind: "tilewright conversations", format: 1, conversations: [conversation] });
}
