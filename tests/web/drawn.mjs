// What is drawn anew each time where software is too slow for all of it: in an order of a seed that is printed, for so many seconds.

const seed = Number(process.env.TILEWRIGHT_SEED ?? Date.now() % 1_000_000);
const isFull = Boolean(process.env.TILEWRIGHT_FULL);

/** A number of 32 bits for each pair of a seed and a position (the finaliser of MurmurHash3). */
function hash(position) {
  let it = (seed + Math.imul(position + 1, 0x9e3779b9)) >>> 0;
  it = Math.imul(it ^ (it >>> 16), 0x85ebca6b);
  it = Math.imul(it ^ (it >>> 13), 0xc2b2ae35);
  return (it ^ (it >>> 16)) >>> 0;
}

/**
 * The first item and then others in the order of the seed, as long as the seconds last; with TILEWRIGHT_FULL all of them in their own
 * order. Prints the seed with a test's diagnostics; TILEWRIGHT_SEED draws the same order again.
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
  console.log(`TILEWRIGHT_SEED=${seed}`);
  return [items[seed % items.length]];
}
