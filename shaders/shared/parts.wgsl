// Decoding has few rows and cuts the cached keys into parts instead, `splits` at most, each a multiple of `step` keys. A
// part is D sums that are still to be divided, then highest score and sum of weights. The first part also has the key of
// the token itself, unless another layer has cached it. With `attention`.

// What becomes of a token's own key and value. Where tokens may be of one sequence, they are stored by a dispatch before the one
// that reads them.
override STORE: u32 = 0u;
const STORES_ONLY: u32 = 1u; // nothing else is done
const HAS_STORED: u32 = 2u;  // they are in the cache

fn has_own() -> bool {
    return (params.flags & OWN_KEYS) != 0u;
}

// Cached keys that a token at `pos` sees: without those of its own that this pass is to cache.
fn cached_range(pos: u32) -> vec2<u32> {
    let end = min(pos + select(1u, 0u, has_own()), params.capacity);
    return vec2<u32>(min(visible(pos, vec2<u32>(0u, pos + 1u)).x, end), end);
}

// Keys of a part that covers `n_keys` together with the others.
fn part_keys(n_keys: u32) -> u32 {
    let each = (n_keys + params.splits - 1u) / params.splits;
    return (each + params.step - 1u) / params.step * params.step;
}

// The range of keys that a part has in this pass; empty where the first are enough.
fn part_range(split: u32, pos: u32) -> vec2<u32> {
    let all = cached_range(pos);
    let n = part_keys(all.y - all.x);
    return min(all.x + split * n + vec2<u32>(0u, n), vec2<u32>(all.y));
}

// Parts that have keys, or the first one.
fn n_parts(pos: u32) -> u32 {
    let all = cached_range(pos);
    let n = max(part_keys(all.y - all.x), 1u);
    return max((all.y - all.x + n - 1u) / n, 1u);
}
