// Attention of the queries of several tokens with cached keys and values by cooperative matrices in half precision, summed
// in f32: what `attention_prefill` computes, of heads of 16 to 128 elements.
//
//     y[t, h] = sum over s of softmax over s of score(q[t, h], k[g, s]) * v[g, s],   s <= pos + t,  g = h * Hkv / H
//     score(q, k) = scale * q . k, or cap * tanh(scale * q . k / cap)
//
// A workgroup takes 64 rows of a key/value head, a subgroup 16 of them, and walks the keys that any of them sees in tiles
// of 32. A subgroup keeps its queries and its sums as matrices. Each tile's scores go through workgroup memory, where
// invocations make weights of them. Dispatch (Hkv * tiles folded over x and y), with tiles of 64 rows.
//
// Scores are counted in powers of two. Rows of a matrix cannot be multiplied each by a factor of its own, so a row's weights
// are relative to a reference that stays while no weight exceeds 2^LIMIT, and only then becomes 2^-HEADROOM of the highest
// score; then the sums pass through workgroup memory. So a row's highest weight is 2^7 to 2^15, and one of 2^-32 of it or
// more is no zero in half precision. Dao et al. 2022, arXiv:2205.14135; a reference that lags behind is what Zadouri et al.
// 2026, FlashAttention-4, call conditional rescaling.
//
// Queries, times the scale, and weights are rounded to half precision, and so is what a cache of Q8_0 holds. A query's row is
// taken times a power of two where its numbers do not fit, as in `half_rows`, and its scores times the inverse. Keys and
// values beyond 65504, of Q8_0 alone, become that, as they do in a cache of f16. A cache of f32 is left to
// `attention_prefill`: it may hold more, and is meant to be exact.
#import unit matrix8=scores8 matrix16=scores16
#import keys F16=halves_f16 Q8_0=halves_q8_0
#import attention
#import sinks
#import half_exponent
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 16 up to 128
@group(0) @binding(3) var<storage, read> k: array<vec4<u32>>;  // [Hkv, slots, row]
@group(0) @binding(4) var<storage, read> v: array<vec4<u32>>;  // [Hkv, slots, row]
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

override SUBGROUP: u32 = 32u; // of the largest subgroup that the adapter makes, as in `half_matrix`: 16 to 64
override WG: u32 = 4u * SUBGROUP;
override HEAD_DIM: u32 = 128u;
override COLUMNS: u32 = HEAD_DIM / SIZE; // matrices of a head, side by side
const PART: u32 = HIGH * SIZE;           // rows of a subgroup
const ROWS: u32 = 4u * PART;
const KEYS: u32 = 2u * PART;             // of a tile
override LANES: u32 = SUBGROUP / PART;   // invocations of a row
override QUADS: u32 = KEYS / 4u / LANES; // of a row's scores, which an invocation has
const MOST_QUADS: u32 = KEYS / 4u;

// Strides of rows in quads. Rows begin in different banks, at multiples of 16 bytes.
const STRIDE: u32 = KEYS / 4u + 2u;
override KEY_STRIDE: u32 = HEAD_DIM / 4u + 2u;
const SCORE_STRIDE: u32 = KEYS / 4u + 1u;
// The same in elements of the arrays.
const STEP: u32 = STRIDE * 4u / PER;
override KEY_STEP: u32 = KEY_STRIDE * 4u / PER;
const SCORE_STEP: u32 = SCORE_STRIDE * 4u / PER;

// Weights of ROWS x KEYS, in whose place parts of the queries come first; then KEYS keys, or the values of as many keys,
// a row for each column.
const OPERANDS: u32 = ROWS * STRIDE;
override STAGED: u32 = (ROWS + HEAD_DIM + 4u) * STRIDE * (4u / PER);
var<workgroup> staged: array<Staged, STAGED>;
// Of a tile, or sums of SIZE columns on their way to `y`.
var<workgroup> exchange: array<Stored, ROWS * SCORE_STRIDE * (4u / PER)>;
// Four, for the same reason as in `half_matrix`.
var<workgroup> grew: array<atomic<u32>, 4>; // whether a score exceeds its row's reference too far

const LOG2_E: f32 = 1.4426950408889634;
const LIMIT: f32 = 15.0;
const HEADROOM: f32 = 7.0;
const UNSEEN: f32 = -1e30; // a reference before any key was seen: above LOWEST, below all scores

// By name, because a compiler that does not unroll a loop over an array of matrices would keep them in memory. Matrices
// one below the other; `low` is there with HIGH of 2 alone.
struct Left2 { top: Left, low: Left }
struct Sum2 { top: Sum, low: Sum }
// Side by side: up to eight columns, and as many more where matrices are smaller.
struct Left8 { a: Left2, b: Left2, c: Left2, d: Left2, e: Left2, f: Left2, g: Left2, h: Left2 }
struct Sum8 { a: Sum2, b: Sum2, c: Sum2, d: Sum2, e: Sum2, f: Sum2, g: Sum2, h: Sum2 }
struct Queries { near: Left8, far: Left8 }
struct Sums { near: Sum8, far: Sum8 }
// Products with 2 * HIGH times SIZE keys.
struct Products { a: Sum2, b: Sum2, c: Sum2, d: Sum2 }

// What an invocation has read of a tile and not yet staged: eight elements of a key each, or of values of four keys. There
// is room for subgroups of 16.
struct Ahead { halves: array<Halves, 8> }

// The row of the tile that an invocation makes weights of, and which of the row's invocations it is.
fn row_of(local: u32) -> u32 {
    return local / SUBGROUP * PART + local % PART;
}

fn lane_of(local: u32) -> u32 {
    return local % SUBGROUP / PART;
}

// Matrix `i` along a row of the subgroup's weights, or of the staged part of its queries.
fn lefts(local: u32, i: u32) -> Left2 {
    let at = (local / SUBGROUP * PART * STRIDE + i * (SIZE / 4u)) * (4u / PER);
    var x = Left2();
    x.top = coopLoadT<Left>(&staged[at], STEP);
    if (HIGH > 1u) {
        x.low = coopLoadT<Left>(&staged[at + SIZE * STEP], STEP);
    }
    return x;
}

// A staged key is a column of the product's right operand.
fn key_matrix(i: u32, column: u32) -> Right {
    let at = (OPERANDS + i * SIZE * KEY_STRIDE + column * (SIZE / 4u)) * (4u / PER);
    return coopLoad<Right>(&staged[at], KEY_STEP);
}

// And so is a column of the values.
fn value_matrix(i: u32, column: u32) -> Right {
    let at = (OPERANDS + column * SIZE * STRIDE + i * (SIZE / 4u)) * (4u / PER);
    return coopLoad<Right>(&staged[at], STEP);
}

fn multiplied(before: Sum2, x: Left2, right: Right) -> Sum2 {
    var sum = before;
    sum.top = coopMultiplyAdd(x.top, right, sum.top);
    if (HIGH > 1u) {
        sum.low = coopMultiplyAdd(x.low, right, sum.low);
    }
    return sum;
}

// A row's queries: where they begin, and what they are taken times.
struct Query { start: u32, scale: f32, exponent: f32 }

fn query_quad(query: Query, quad: u32) -> vec4<f32> {
    return query.scale * q[query.start + quad];
}

// Columns are asked for one after the other: the first of KEYS has all of them staged.
fn query_matrix(local: u32, query: Query, column: u32) -> Left2 {
    let i = column % (KEYS / SIZE);
    if (i == 0u) {
        workgroupBarrier();
        let first = column * (SIZE / 4u);
        for (var quad = lane_of(local); quad < min(MOST_QUADS, HEAD_DIM / 4u - first); quad += LANES) {
            let value = query.exponent * query_quad(query, first + quad);
            place(row_of(local) * STRIDE + quad, vec4<f16>(value));
        }
        workgroupBarrier();
    }
    return lefts(local, i);
}

fn eight_queries(local: u32, query: Query, first: u32) -> Left8 {
    var x = Left8();
    x.a = query_matrix(local, query, first);
    if (COLUMNS > first + 1u) {
        x.b = query_matrix(local, query, first + 1u);
    }
    if (COLUMNS > first + 2u) {
        x.c = query_matrix(local, query, first + 2u);
    }
    if (COLUMNS > first + 3u) {
        x.d = query_matrix(local, query, first + 3u);
    }
    if (COLUMNS > first + 4u) {
        x.e = query_matrix(local, query, first + 4u);
    }
    if (COLUMNS > first + 5u) {
        x.f = query_matrix(local, query, first + 5u);
    }
    if (COLUMNS > first + 6u) {
        x.g = query_matrix(local, query, first + 6u);
    }
    if (COLUMNS > first + 7u) {
        x.h = query_matrix(local, query, first + 7u);
    }
    return x;
}

fn with_column(before: Products, x: Left2, column: u32) -> Products {
    var sum = before;
    sum.a = multiplied(sum.a, x, key_matrix(0u, column));
    sum.b = multiplied(sum.b, x, key_matrix(1u, column));
    if (HIGH > 1u) {
        sum.c = multiplied(sum.c, x, key_matrix(2u, column));
        sum.d = multiplied(sum.d, x, key_matrix(3u, column));
    }
    return sum;
}

fn with_columns(before: Products, x: Left8, first: u32) -> Products {
    var sum = with_column(before, x.a, first);
    if (COLUMNS > first + 1u) {
        sum = with_column(sum, x.b, first + 1u);
    }
    if (COLUMNS > first + 2u) {
        sum = with_column(sum, x.c, first + 2u);
    }
    if (COLUMNS > first + 3u) {
        sum = with_column(sum, x.d, first + 3u);
    }
    if (COLUMNS > first + 4u) {
        sum = with_column(sum, x.e, first + 4u);
    }
    if (COLUMNS > first + 5u) {
        sum = with_column(sum, x.f, first + 5u);
    }
    if (COLUMNS > first + 6u) {
        sum = with_column(sum, x.g, first + 6u);
    }
    if (COLUMNS > first + 7u) {
        sum = with_column(sum, x.h, first + 7u);
    }
    return sum;
}

// Adds the values of SIZE keys, the i-th of the tile, on these weights.
fn with_values(before: Sum8, weights: Left2, i: u32, first: u32) -> Sum8 {
    var sum = before;
    sum.a = multiplied(sum.a, weights, value_matrix(i, first));
    if (COLUMNS > first + 1u) {
        sum.b = multiplied(sum.b, weights, value_matrix(i, first + 1u));
    }
    if (COLUMNS > first + 2u) {
        sum.c = multiplied(sum.c, weights, value_matrix(i, first + 2u));
    }
    if (COLUMNS > first + 3u) {
        sum.d = multiplied(sum.d, weights, value_matrix(i, first + 3u));
    }
    if (COLUMNS > first + 4u) {
        sum.e = multiplied(sum.e, weights, value_matrix(i, first + 4u));
    }
    if (COLUMNS > first + 5u) {
        sum.f = multiplied(sum.f, weights, value_matrix(i, first + 5u));
    }
    if (COLUMNS > first + 6u) {
        sum.g = multiplied(sum.g, weights, value_matrix(i, first + 6u));
    }
    if (COLUMNS > first + 7u) {
        sum.h = multiplied(sum.h, weights, value_matrix(i, first + 7u));
    }
    return sum;
}

// Where matrix `i` along a row of the subgroup's scores is.
fn scores_at(local: u32, i: u32) -> u32 {
    return (local / SUBGROUP * PART * SCORE_STRIDE + i * (SIZE / 4u)) * (4u / PER);
}

fn put_scores(local: u32, i: u32, sum: Sum2) {
    let at = scores_at(local, i);
    coopStoreT(sum.top, &exchange[at], SCORE_STEP);
    if (HIGH > 1u) {
        coopStoreT(sum.low, &exchange[at + SIZE * SCORE_STEP], SCORE_STEP);
    }
}

// A row's invocations tell each other a number, past the columns that the sums of a head's first matrix take.
fn number_at(local: u32, lane: u32) -> u32 {
    return row_of(local) * SCORE_STRIDE + KEYS / 8u + lane;
}

fn tell(local: u32, number: f32) {
    put_score_quad(number_at(local, lane_of(local)), vec4<f32>(number));
    workgroupBarrier();
}

fn told(local: u32, lane: u32) -> f32 {
    return score_quad(number_at(local, lane)).x;
}

// Sums of column `column`, each row times its factor. Neighbours take turns in `scores`, so that one may be stored while
// others still load the one before.
fn rescaled_column(local: u32, before: Sum2, column: u32, factor: f32) -> Sum2 {
    let i = column % 2u;
    put_scores(local, i, before);
    workgroupBarrier();
    for (var quad = lane_of(local); quad < SIZE / 4u; quad += LANES) {
        let at = row_of(local) * SCORE_STRIDE + i * (SIZE / 4u) + quad;
        put_score_quad(at, factor * score_quad(at));
    }
    workgroupBarrier();
    let at = scores_at(local, i);
    var sum = Sum2();
    sum.top = coopLoadT<Sum>(&exchange[at], SCORE_STEP);
    if (HIGH > 1u) {
        sum.low = coopLoadT<Sum>(&exchange[at + SIZE * SCORE_STEP], SCORE_STEP);
    }
    return sum;
}

fn rescaled(local: u32, before: Sum8, first: u32, factor: f32) -> Sum8 {
    var sum = before;
    sum.a = rescaled_column(local, sum.a, first, factor);
    if (COLUMNS > first + 1u) {
        sum.b = rescaled_column(local, sum.b, first + 1u, factor);
    }
    if (COLUMNS > first + 2u) {
        sum.c = rescaled_column(local, sum.c, first + 2u, factor);
    }
    if (COLUMNS > first + 3u) {
        sum.d = rescaled_column(local, sum.d, first + 3u, factor);
    }
    if (COLUMNS > first + 4u) {
        sum.e = rescaled_column(local, sum.e, first + 4u, factor);
    }
    if (COLUMNS > first + 5u) {
        sum.f = rescaled_column(local, sum.f, first + 5u, factor);
    }
    if (COLUMNS > first + 6u) {
        sum.g = rescaled_column(local, sum.g, first + 6u, factor);
    }
    if (COLUMNS > first + 7u) {
        sum.h = rescaled_column(local, sum.h, first + 7u, factor);
    }
    return sum;
}

// Puts the sums of column `column` times a row's factor into `y`, where the row starts, if it has a place there.
fn finish_column(local: u32, sum: Sum2, column: u32, factor: f32, start: u32, has_place: bool) {
    let i = column % 2u;
    put_scores(local, i, sum);
    workgroupBarrier();
    for (var quad = lane_of(local); quad < SIZE / 4u; quad += LANES) {
        if (has_place) {
            let value = score_quad(row_of(local) * SCORE_STRIDE + i * (SIZE / 4u) + quad);
            y[start + column * (SIZE / 4u) + quad] = factor * value;
        }
    }
}

fn finish(local: u32, sum: Sum8, first: u32, factor: f32, start: u32, has_place: bool) {
    finish_column(local, sum.a, first, factor, start, has_place);
    if (COLUMNS > first + 1u) {
        finish_column(local, sum.b, first + 1u, factor, start, has_place);
    }
    if (COLUMNS > first + 2u) {
        finish_column(local, sum.c, first + 2u, factor, start, has_place);
    }
    if (COLUMNS > first + 3u) {
        finish_column(local, sum.d, first + 3u, factor, start, has_place);
    }
    if (COLUMNS > first + 4u) {
        finish_column(local, sum.e, first + 4u, factor, start, has_place);
    }
    if (COLUMNS > first + 5u) {
        finish_column(local, sum.f, first + 5u, factor, start, has_place);
    }
    if (COLUMNS > first + 6u) {
        finish_column(local, sum.g, first + 6u, factor, start, has_place);
    }
    if (COLUMNS > first + 7u) {
        finish_column(local, sum.h, first + 7u, factor, start, has_place);
    }
}

// Eights of a head's elements, and what an invocation reads of a tile: rounds of eight elements of a key, and of the eight
// elements of values of four keys each.
override EIGHTS: u32 = HEAD_DIM / 8u;
override KEY_ROUNDS: u32 = (KEYS * EIGHTS + WG - 1u) / WG;
override VALUE_ROUNDS: u32 = (KEYS / 4u * EIGHTS + WG - 1u) / WG;

// Where the row of the tile's key `i` is, the tile's first one being in slot `slot`, after the last of which comes the first; or
// with pages, at position `slot`. Keys past the last one repeat it.
fn row_at(kv_head: u32, slot: u32, i: u32, n_keys: u32) -> u32 {
    let at = slot + min(i, n_keys - 1u);
    if (PAGE_TABLE > 0u) {
        return kv_head * params.head_stride + slot_of(0u, at) * params.key_stride;
    }
    return kv_head * params.head_stride + select(at, at - params.slots, at >= params.slots) * params.key_stride;
}

fn read_keys(local: u32, kv_head: u32, slot: u32, n_keys: u32) -> Ahead {
    var ahead = Ahead();
    for (var i = 0u; i < KEY_ROUNDS; i++) {
        let item = min(local + i * WG, KEYS * EIGHTS - 1u);
        let at = row_at(kv_head, slot, item / EIGHTS, n_keys);
        ahead.halves[i] = key_halves(params.key_start + at, item % EIGHTS);
    }
    return ahead;
}

fn stage_keys(local: u32, ahead: Ahead) {
    for (var i = 0u; i < KEY_ROUNDS; i++) {
        let item = local + i * WG;
        if (item < KEYS * EIGHTS) {
            let at = OPERANDS + item / EIGHTS * KEY_STRIDE + item % EIGHTS * 2u;
            place(at, ahead.halves[i].near);
            place(at + 1u, ahead.halves[i].far);
        }
    }
}

// Of neighbours, each has the next four keys.
fn read_values(local: u32, kv_head: u32, slot: u32, n_keys: u32) -> Ahead {
    var ahead = Ahead();
    for (var i = 0u; i < VALUE_ROUNDS; i++) {
        let item = min(local + i * WG, KEYS / 4u * EIGHTS - 1u);
        for (var j = 0u; j < 4u; j++) {
            let at = row_at(kv_head, slot, item % (KEYS / 4u) * 4u + j, n_keys);
            ahead.halves[4u * i + j] = value_halves(params.value_start + at, item / (KEYS / 4u));
        }
    }
    return ahead;
}

// A row of four keys' elements for each column.
fn stage_columns(at: u32, a: vec4<f16>, b: vec4<f16>, c: vec4<f16>, d: vec4<f16>) {
    place(at, vec4<f16>(a.x, b.x, c.x, d.x));
    place(at + STRIDE, vec4<f16>(a.y, b.y, c.y, d.y));
    place(at + 2u * STRIDE, vec4<f16>(a.z, b.z, c.z, d.z));
    place(at + 3u * STRIDE, vec4<f16>(a.w, b.w, c.w, d.w));
}

fn stage_values(local: u32, ahead: Ahead) {
    for (var i = 0u; i < VALUE_ROUNDS; i++) {
        let item = local + i * WG;
        if (item < KEYS / 4u * EIGHTS) {
            let a = ahead.halves[4u * i];
            let b = ahead.halves[4u * i + 1u];
            let c = ahead.halves[4u * i + 2u];
            let d = ahead.halves[4u * i + 3u];
            let at = OPERANDS + item / (KEYS / 4u) * 8u * STRIDE + item % (KEYS / 4u);
            stage_columns(at, a.near, b.near, c.near, d.near);
            stage_columns(at + 4u * STRIDE, a.far, b.far, c.far, d.far);
        }
    }
}

// Four products as scores.
fn capped(products: vec4<f32>) -> vec4<f32> {
    if (params.soft_cap == 0.0) {
        return products;
    }
    let small = exp(-2.0 * abs(products) / params.soft_cap);
    return LOG2_E * params.soft_cap * sign(products) * (1.0 - small) / (1.0 + small);
}

fn highest_of(quad: vec4<f32>) -> f32 {
    return max(max(quad.x, quad.y), max(quad.z, quad.w));
}

@compute @workgroup_size(WG)
fn attention_half(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let index = params.first_group + group_index(group, grid);
    let kv_head = index % params.n_kv_heads;
    let tile_index = index / params.n_kv_heads;
    if (tile_index >= params.n_tiles) {
        return;
    }
    let tile = tile_at(tile_index, ROWS);
    if (tile.first >= tile.end) {
        return;
    }
    let keys = visible_to(tile, KEYS);
    let share = params.n_heads / params.n_kv_heads;
    // Keys that all rows see: from the first one of the last row to the end of those of the first.
    let common_keys = vec2<u32>(
        visible(position_of((tile.end - 1u) / share, tile), tile.keys).x,
        visible(position_of(tile.first / share, tile), tile.keys).y,
    );
    let row = rows_from(tile.first + row_of(local), tile);
    let seen = visible(position_of(row.x / share, tile), tile.keys);
    let own_quad = lane_of(local) * QUADS;

    let factor = params.scale * select(1.0, LOG2_E, params.soft_cap == 0.0);
    var query = Query(queries_from(row, kv_head).x, factor, 1.0);
    var most = vec4<u32>();
    for (var quad = lane_of(local); quad < HEAD_DIM / 4u; quad += LANES) {
        most = max(most, bitcast<vec4<u32>>(query_quad(query, quad)) & vec4<u32>(0x7fffffffu));
    }
    tell(local, bitcast<f32>(max(max(most.x, most.y), max(most.z, most.w))));
    for (var i = 0u; i < LANES; i++) {
        most.x = max(most.x, bitcast<u32>(told(local, i)));
    }
    let exponent = row_exponent(most.x);
    query.exponent = bitcast<f32>(exponent << 23u);
    let inverse = bitcast<f32>((254u - exponent) << 23u);

    var queries = Queries();
    queries.near = eight_queries(local, query, 0u);
    if (COLUMNS > 8u) {
        queries.far = eight_queries(local, query, 8u);
    }
    if (local == 0u) {
        atomicStore(&grew[0], 0u);
    }
    var reference = UNSEEN;
    var sum = 0.0; // of the weights that the invocation made
    var sums = Sums();
    // Of the tile's first key; it may pass the last one, but not twice, as each key that is seen has a slot of its own.
    var slot = select(keys.x % params.slots, keys.x, PAGE_TABLE > 0u);
    // Padding may see no key.
    var ahead = read_keys(local, kv_head, slot, max(keys.y, keys.x + 1u) - keys.x);
    for (var s = keys.x; s < keys.y; s += KEYS) {
        stage_keys(local, ahead);
        workgroupBarrier();
        let n_keys = keys.y - s;
        let values = read_values(local, kv_head, slot, n_keys);
        var products = with_columns(Products(), queries.near, 0u);
        if (COLUMNS > 8u) {
            products = with_columns(products, queries.far, 8u);
        }
        put_scores(local, 0u, products.a);
        put_scores(local, 1u, products.b);
        if (HIGH > 1u) {
            put_scores(local, 2u, products.c);
            put_scores(local, 3u, products.d);
        }
        workgroupBarrier();
        stage_values(local, values);
        let is_whole = s >= common_keys.x && s + KEYS <= common_keys.y;
        var own = array<vec4<f32>, MOST_QUADS>();
        var highest = LOWEST;
        for (var i = 0u; i < QUADS; i++) {
            var quad = capped(inverse * score_quad(row_of(local) * SCORE_STRIDE + own_quad + i));
            if (!is_whole) {
                let key = vec4<u32>(s + 4u * (own_quad + i)) + vec4<u32>(0u, 1u, 2u, 3u);
                quad = select(vec4<f32>(LOWEST), quad, (key >= vec4<u32>(seen.x)) & (key < vec4<u32>(seen.y)));
            }
            own[i] = quad;
            highest = max(highest, highest_of(quad));
        }
        if (highest > reference + LIMIT) {
            atomicStore(&grew[0], 1u);
        }
        if (workgroupUniformLoad(&grew[0]) != 0u) {
            tell(local, highest);
            if (local == 0u) {
                atomicStore(&grew[0], 0u);
            }
            for (var i = 0u; i < LANES; i++) {
                highest = max(highest, told(local, i));
            }
            let next = select(reference, highest - HEADROOM, highest > reference + LIMIT);
            let decay = exp2(reference - next);
            reference = next;
            sum *= decay;
            // Before the first tile there are no sums.
            if (s > keys.x) {
                sums.near = rescaled(local, sums.near, 0u, decay);
                if (COLUMNS > 8u) {
                    sums.far = rescaled(local, sums.far, 8u, decay);
                }
            }
        }
        for (var i = 0u; i < QUADS; i++) {
            let weights = exp2(own[i] - reference);
            sum += weights.x + weights.y + weights.z + weights.w;
            place(row_of(local) * STRIDE + own_quad + i, vec4<f16>(weights));
        }
        slot += KEYS;
        // The last tile reads its last key again.
        ahead = read_keys(local, kv_head, slot, max(n_keys, KEYS + 1u) - KEYS);
        workgroupBarrier();
        for (var i = 0u; i < KEYS / SIZE; i++) {
            let weights = lefts(local, i);
            sums.near = with_values(sums.near, weights, i, 0u);
            if (COLUMNS > 8u) {
                sums.far = with_values(sums.far, weights, i, 8u);
            }
        }
        workgroupBarrier();
    }

    tell(local, sum);
    sum = 0.0;
    for (var i = 0u; i < LANES; i++) {
        sum += told(local, i);
    }
    let place_of_query = queries_of(row, kv_head);
    if (SINKS) {
        sum += exp2(LOG2_E * first_scores(place_of_query, true).x - reference);
    }
    let has_place = tile.first + row_of(local) < tile.end;
    let first_quad = place_of_query.x * (HEAD_DIM / 4u);
    let per_sum = select(0.0, 1.0 / sum, sum > 0.0); // padding rows may see no key
    finish(local, sums.near, 0u, per_sum, first_quad, has_place);
    if (COLUMNS > 8u) {
        finish(local, sums.far, 8u, per_sum, first_quad, has_place);
    }
}
