// Samples cases where a software GPU is too slow for all of them. Prints the seed.

const seed = Number(process.env.TILEWRIGHT_SEED ?? Date.now() % 1_000_000);
if (!Number.isInteger(seed)) throw new Error(`TILEWRIGHT_SEED is ${process.env.TILEWRIGHT_SEED}, expected a whole number`);
const isFull = Boolean(process.env.TILEWRIGHT_FULL);

/** A 32-bit number for each pair of seed and position (MurmurHash3's finaliser). */
function hash(position) {
  let it = (seed + Math.imul(position + 1, 0x9e3779b9)) >>> 0;
  it = Math.imul(it ^ (it >>> 16), 0x85ebca6b);
  it = Math.imul(it ^ (it >>> 13), 0xc2b2ae35);
  return (it ^ (it >>> 16)) >>> 0;
}

/**
 * The first item and then others in seeded order until the time is up; with TILEWRIGHT_FULL all of them in their own
 * order. Prints the seed in a test's diagnostics; TILEWRIGHT_SEED repeats the order.
 */
export function* drawn(t, items, seconds) {
  if (isFull) return yield* items;
  t.diagnostic(`TILEWRIGHT_SEED=${seed}`);
  const end = performance.now() + 1000 * seconds;
  const [first, ...others] = items;
  yield first;
  for (const [, item] of others.map((item, i) => [hash(i), item]).sort(([a], [b]) => a - b)) {
    if (performance.now() > end) return;
    yield item;
  }
}

/** One of the items, or all of them with TILEWRIGHT_FULL. */
export function oneOf(items) {
  if (isFull) return items;
  const item = items[seed % items.length];
  console.log(`left out by TILEWRIGHT_SEED=${seed}: all of [${items.join(", ")}] but ${item}`);
  return [item];
}
