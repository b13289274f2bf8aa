// What the kernels of attention have in common.
//
// Keys are either cached, `[Hkv, slots, row]`, and all queries see the same ones; or they are packed with their queries,
// rows of `[T, (H + 2 Hkv) D]`, where a table of tiles says which rows are a sequence. `paged` says in which slot the key of a
// position is: a layer with a window keeps what passes can see, not all positions.
//
// Query heads that share a key/value head are taken together: row r of key/value head g is query head
// g * share + r % share of token r / share, with share = H / Hkv. The T * share rows of a head read the same keys.
#import paged

struct AttentionParams {
    n_tokens: u32, n_heads: u32, n_kv_heads: u32, head_dim: u32, // T, H, Hkv, D
    capacity: u32, window: u32, scale: f32, soft_cap: f32,       // window, soft_cap 0: none
    flags: u32, splits: u32, step: u32, first_group: u32,
    query_stride: u32, key_stride: u32, head_stride: u32, n_tiles: u32, // in quads, or in units of a cache's rows
    query_start: u32, key_start: u32, value_start: u32, slots: u32,
    rot_dims: u32, style: u32, eps: f32, query_row: u32, // what decoding makes of a projection; see `turn`
    row_words: u32, reach: u32, _pad0: u32, _pad1: u32,          // see `rows`, and `biases`
}

// Where keys hold their values, as latent ones do (DeepSeek-AI 2024, arXiv:2405.04434): the first quad of a key that is its
// value's. 0: values are apart.
override VALUES_FROM: u32 = 0u;

fn value_quads() -> u32 {
    return params.head_dim / 4u - VALUES_FROM;
}

// Stands for minus infinity, which WGSL cannot write.
const LOWEST: f32 = -3.4028234e38;

const CAUSAL: u32 = 1u;
const PACKED: u32 = 2u;
const WHOLE_PASS: u32 = 4u; // queries that are not causal see all keys of their pass, whatever the window
const OWN_KEYS: u32 = 8u; // the token has keys and values of its own, which are to be cached

fn n_rows() -> u32 {
    return params.n_tokens * (params.n_heads / params.n_kv_heads);
}

// Rows that are taken together, all of one sequence, and the sequence's keys.
struct Tile {
    first: u32,
    end: u32,
    keys: vec2<u32>, // first and end
    state: u32,      // where the row of the step state begins that tells of the sequence
    token: u32,      // the token that rows are counted from
}

fn is_causal() -> bool {
    return (params.flags & CAUSAL) != 0u;
}

fn is_packed() -> bool {
    return (params.flags & PACKED) != 0u;
}

// All rows of a pass over cached keys. Padding of the last chunk may lie past the cache.
fn all_rows() -> Tile {
    let end = select(state[POS] + state[N_TOKENS], params.capacity, is_causal());
    return Tile(0u, n_rows(), vec2<u32>(0u, min(end, params.capacity)), 0u, 0u);
}

// The rows of one token of a pass whose tokens are of different sequences, or of its only one.
fn rows_of(token: u32) -> Tile {
    let at = token * params.row_words;
    let end = min(state[at + POS] + 1u, params.capacity);
    return Tile(0u, params.n_heads / params.n_kv_heads, vec2<u32>(0u, end), at, token);
}

// Tile `i` of `size` rows.
fn tile_at(i: u32, size: u32) -> Tile {
    if (is_packed()) {
        return Tile(state[4u * i], state[4u * i + 1u], vec2<u32>(state[4u * i + 2u], state[4u * i + 3u]), 0u, 0u);
    }
    var tile = all_rows();
    tile.first = i * size;
    tile.end = min(tile.first + size, tile.end);
    return tile;
}

// Four rows of a tile from `row` on; past the end the last one again.
fn rows_from(row: u32, tile: Tile) -> vec4<u32> {
    return min(vec4<u32>(row, row + 1u, row + 2u, row + 3u), vec4<u32>(tile.end - 1u));
}

fn tokens_of(rows: vec4<u32>) -> vec4<u32> {
    return rows / (params.n_heads / params.n_kv_heads);
}

// Where the queries of rows start, in quads.
fn queries_from(rows: vec4<u32>, kv_head: u32) -> vec4<u32> {
    let share = params.n_heads / params.n_kv_heads;
    let head = kv_head * share + rows % share;
    return params.query_start + rows / share * params.query_stride + head * (params.head_dim / 4u);
}

// Where key `s` of a head starts, in quads or units, without the start that keys and values have.
fn slot_at(tile: Tile, kv_head: u32, s: u32) -> u32 {
    return kv_head * params.head_stride + slot_of(tile.state, s) * params.key_stride;
}

// Places of rows among the heads of all tokens, from the tile's token on.
fn queries_of(rows: vec4<u32>, kv_head: u32) -> vec4<u32> {
    let share = params.n_heads / params.n_kv_heads;
    return rows / share * params.n_heads + kv_head * share + rows % share;
}

// Position of a token of a tile.
fn position_of(token: u32, tile: Tile) -> u32 {
    if (is_packed()) {
        return token;
    }
    return state[tile.state + POS] + token;
}

// First key that a token sees by its own position, and the end: among those that its sequence has, none behind its own if the
// attention is causal, and none as far away as the window. Tokens of a pass over cached keys that is not causal, rows of an
// image, see all those after them.
fn visible(own: u32, keys: vec2<u32>) -> vec2<u32> {
    let has_window = params.window > 0u;
    let ahead = select(params.window, 1u, is_causal());
    let end = select(keys.y, min(own + ahead, keys.y), is_causal() || (has_window && is_packed()));
    // Padding sees the last keys.
    let next = select(min(own + 1u, end), own + 1u, is_packed() && !is_causal());
    let first = select(keys.x, next - params.window, has_window && next > keys.x + params.window);
    return vec2<u32>(select(first, min(first, state[POS]), (params.flags & WHOLE_PASS) != 0u), end);
}

// Keys that any row of a tile sees; the last row's token is the latest. Where sequences share the slots, those of a window begin at
// a multiple of the keys that are taken together, so that a row's are added up in the same order whatever rows its tile has.
fn visible_to(tile: Tile, together: u32) -> vec2<u32> {
    let share = params.n_heads / params.n_kv_heads;
    let ends = vec2<u32>(position_of(tile.first / share, tile), position_of((tile.end - 1u) / share, tile));
    let first = visible(ends.x, tile.keys).x;
    return vec2<u32>(first - select(0u, first % together, PAGE_TABLE > 0u), visible(ends.y, tile.keys).y);
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

// Where a part of a query starts in the output, in quads; with a single part that is its row of the result. Queries are counted
// from the first token's on.
fn part_start(query: u32, split: u32) -> u32 {
    let quads = value_quads();
    return select((query * params.splits + split) * (quads + 1u), query * quads, params.splits == 1u);
}
