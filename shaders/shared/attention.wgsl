// What the kernels of attention have in common.
//
// Query heads that share a key/value head are taken together: row r of key/value head g is query head
// g * share + r % share of token r / share, with share = H / Hkv. The T * share rows of a head read the same keys.
//
// Decoding has few rows and cuts the keys into parts instead, `splits` at most, each a multiple of `step` keys. A part is
// D sums that are still to be divided, then highest score and sum of weights.
#import state

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;

fn n_rows() -> u32 {
    return params.n_tokens * (params.n_heads / params.n_kv_heads);
}

// Four rows from `row` on; past the end the last one again.
fn rows_from(row: u32) -> vec4<u32> {
    return min(vec4<u32>(row, row + 1u, row + 2u, row + 3u), vec4<u32>(n_rows() - 1u));
}

fn tokens_of(rows: vec4<u32>) -> vec4<u32> {
    return rows / (params.n_heads / params.n_kv_heads);
}

// Places of rows among all tokens and heads.
fn queries_of(rows: vec4<u32>, kv_head: u32) -> vec4<u32> {
    let share = params.n_heads / params.n_kv_heads;
    return rows / share * params.n_heads + kv_head * share + rows % share;
}

// First key that a token sees, and the end; padding of the last chunk may lie past the cache.
fn visible(token: u32) -> vec2<u32> {
    if (params.causal == 0u) {
        return vec2<u32>(0u, min(state[POS] + state[N_TOKENS], params.capacity));
    }
    let end = min(state[POS] + token + 1u, params.capacity);
    return vec2<u32>(select(0u, end - params.window, params.window > 0u && end > params.window), end);
}

// Keys that any of these rows sees; the last row's token is the latest.
fn visible_to(rows: vec2<u32>) -> vec2<u32> {
    let share = params.n_heads / params.n_kv_heads;
    return vec2<u32>(visible(rows.x / share).x, visible(rows.y / share).y);
}

// Which of four rows see a key, by their own ranges.
fn sees(key: u32, first: vec4<u32>, end: vec4<u32>) -> vec4<bool> {
    return (vec4<u32>(key) >= first) & (vec4<u32>(key) < end);
}

// Scores from products of queries and a key. Written with `exp`, because WGSL lets `tanh` be wrong by 1e-5.
fn scores(products: vec4<f32>) -> vec4<f32> {
    let x = params.scale * products;
    if (params.soft_cap == 0.0) {
        return x;
    }
    let small = exp(-2.0 * abs(x) / params.soft_cap);
    return params.soft_cap * sign(x) * (1.0 - small) / (1.0 + small);
}

// Keys of a part that covers `n_keys` together with the others.
fn part_keys(n_keys: u32) -> u32 {
    let each = (n_keys + params.splits - 1u) / params.splits;
    return (each + params.step - 1u) / params.step * params.step;
}

// The range of keys that a part has in this pass; empty where the first are enough.
fn part_range(split: u32) -> vec2<u32> {
    let all = visible_to(vec2<u32>(0u, n_rows() - 1u));
    let n = part_keys(all.y - all.x);
    return min(all.x + split * n + vec2<u32>(0u, n), vec2<u32>(all.y));
}

// Where a part of a query starts in the output, in quads; with a single part that is its row of the result.
fn part_start(query: u32, split: u32) -> u32 {
    let quads = params.head_dim / 4u;
    return select((query * params.splits + split) * (quads + 1u), query * quads, params.splits == 1u);
}
