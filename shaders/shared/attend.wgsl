// Attention of ROWS rows with a range of keys by one invocation alone; see `shared/attention.wgsl`. Keys are walked by two
// tiles, early and late, so that a loaded query serves 2 TILE keys and a loaded key ROWS queries: a load costs a software
// adapter dozens of products. One tile of 16 keys would be the same loads, but llvmpipe does not unroll loops that long.
// Sums stay in `y`: registers cannot be indexed by a loop over D. Rows past the end repeat the last one and write the
// same numbers, so all rows of a sum are read before one is written. `query_places` and `query_quad` say where queries are.
#import attention
#import sinks

override ROWS: u32 = 8u; // 1 to 4, or 8
const TILE: u32 = 8u;

// Four rows, or the first ROWS of them.
struct Rows {
    query: vec4<u32>,    // where they are, in quads
    place: vec4<u32>,    // and among the heads of all tokens
    out: vec4<u32>,      // where their sums are
    first: vec4<u32>,    // keys that they see
    end: vec4<u32>,
    highest: vec4<f32>,  // score so far
    sum: vec4<f32>,      // of weights so far
}

fn begin(row: u32, tile: Tile, kv_head: u32, keys: vec2<u32>, split: u32) -> Rows {
    var rows = Rows();
    let four = rows_from(row, tile);
    let query = queries_of(four, kv_head);
    rows.query = query_places(four, kv_head);
    rows.place = query;
    let token = tokens_of(four);
    for (var r = 0u; r < min(ROWS, 4u); r++) {
        let seen = visible(position_of(token[r], tile), tile.keys);
        rows.first[r] = seen.x;
        rows.end[r] = min(seen.y, keys.y);
        rows.out[r] = part_start(tile.token * params.n_heads + query[r], split);
        for (var i = 0u; i < value_quads(); i++) {
            y[rows.out[r] + i] = vec4<f32>();
        }
    }
    rows.highest = first_scores(query, split == 0u);
    rows.sum = first_weights(split == 0u);
    return rows;
}

// Columns: a quad of each query.
fn queries_at(query: vec4<u32>, i: u32) -> mat4x4<f32> {
    var quads = mat4x4<f32>();
    for (var r = 0u; r < min(ROWS, 4u); r++) {
        quads[r] = query_quad(query[r] + i);
    }
    return quads;
}

fn products(key: vec4<f32>, queries: mat4x4<f32>) -> vec4<f32> {
    if (ROWS == 1u) {
        return vec4<f32>(dot(key, queries[0]), 0.0, 0.0, 0.0);
    }
    return key * queries;
}

// Makes the products with both tiles of keys from `s` on weights, and returns the factor for older sums.
fn weigh(
    rows: ptr<function, Rows>,
    early: ptr<function, array<vec4<f32>, TILE>>,
    late: ptr<function, array<vec4<f32>, TILE>>,
    s: u32,
) -> vec4<f32> {
    let older = weigh_tile(rows, early, s);
    let old = weigh_tile(rows, late, s + TILE);
    for (var j = 0u; j < TILE; j++) {
        (*early)[j] *= old;
    }
    return older * old;
}

// Makes the products with TILE keys from `s` on weights, and returns the factor for older sums.
fn weigh_tile(rows: ptr<function, Rows>, weights: ptr<function, array<vec4<f32>, TILE>>, s: u32) -> vec4<f32> {
    var highest = (*rows).highest;
    for (var j = 0u; j < TILE; j++) {
        let seen = sees(s + j, (*rows).first, (*rows).end);
        (*weights)[j] = select(vec4<f32>(LOWEST), scores_of((*weights)[j], (*rows).place, s + j), seen);
        highest = max(highest, (*weights)[j]);
    }
    let rescale = exp((*rows).highest - highest);
    var sum = vec4<f32>();
    for (var j = 0u; j < TILE; j++) {
        let seen = sees(s + j, (*rows).first, (*rows).end);
        (*weights)[j] = select(vec4<f32>(), exp((*weights)[j] - highest), seen);
        sum += (*weights)[j];
    }
    (*rows).highest = highest;
    (*rows).sum = (*rows).sum * rescale + sum;
    return rescale;
}

// Columns: a quad of a value, weighed for each row.
fn weighed(value: vec4<f32>, weights: vec4<f32>) -> mat4x4<f32> {
    if (ROWS == 1u) {
        return mat4x4<f32>(value * weights.x, vec4<f32>(), vec4<f32>(), vec4<f32>());
    }
    return mat4x4<f32>(value * weights.x, value * weights.y, value * weights.z, value * weights.w);
}

// sums = sums * factor + tile, of quad `i`.
fn accumulate(out: vec4<u32>, i: u32, factor: vec4<f32>, tile: mat4x4<f32>) {
    var sums = tile;
    for (var r = 0u; r < min(ROWS, 4u); r++) {
        sums[r] += y[out[r] + i] * factor[r];
    }
    for (var r = 0u; r < min(ROWS, 4u); r++) {
        y[out[r] + i] = sums[r];
    }
}

fn finish(rows: Rows) {
    let quads = value_quads();
    if (params.splits > 1u) {
        for (var r = 0u; r < min(ROWS, 4u); r++) {
            y[rows.out[r] + quads] = vec4<f32>(rows.highest[r], rows.sum[r], 0.0, 0.0);
        }
        return;
    }
    for (var i = 0u; i < quads; i++) {
        accumulate(rows.out, i, 1.0 / rows.sum, mat4x4<f32>());
    }
}

// Adds the products of TILE keys with quad `i` of eight queries.
fn add_products(
    near: ptr<function, array<vec4<f32>, TILE>>,
    far: ptr<function, array<vec4<f32>, TILE>>,
    near_queries: mat4x4<f32>,
    far_queries: mat4x4<f32>,
    at: array<u32, TILE>,
    i: u32,
) {
    for (var j = 0u; j < TILE; j++) {
        let key = key_quad(params.key_start + at[j], i);
        (*near)[j] += products(key, near_queries);
        if (ROWS > 4u) {
            (*far)[j] += products(key, far_queries);
        }
    }
}

// Columns: a quad of values, weighed and added up for each row.
struct Weighed {
    near: mat4x4<f32>,
    far: mat4x4<f32>,
}

// Quad `i` of the value whose row begins at unit `at`.
fn cached_value(at: u32, i: u32) -> vec4<f32> {
    if (VALUES_FROM > 0u) {
        return key_quad(at, i + VALUES_FROM);
    }
    return value_quad(at, i);
}

// Adds quad `i` of TILE values.
fn add_values(
    sums: ptr<function, Weighed>,
    near: array<vec4<f32>, TILE>,
    far: array<vec4<f32>, TILE>,
    at: array<u32, TILE>,
    i: u32,
) {
    for (var j = 0u; j < TILE; j++) {
        let value = cached_value(params.value_start + at[j], i);
        (*sums).near += weighed(value, near[j]);
        if (ROWS > 4u) {
            (*sums).far += weighed(value, far[j]);
        }
    }
}

// Where TILE keys from `s` on start. Those past the end repeat the last one, which weighs nothing there.
fn places(tile: Tile, kv_head: u32, s: u32, end: u32) -> array<u32, TILE> {
    var at = array<u32, TILE>();
    for (var j = 0u; j < TILE; j++) {
        at[j] = slot_at(tile, kv_head, min(s + j, end - 1u));
    }
    return at;
}

// Attention of the tile's rows from `row` on, `near` and, in a tile of eight, `far`.
fn attend(near: ptr<function, Rows>, far: ptr<function, Rows>, has_far: bool, tile: Tile, kv_head: u32, keys: vec2<u32>) {
    let quads = params.head_dim / 4u;
    for (var s = keys.x; s < keys.y; s += 2u * TILE) {
        let early = places(tile, kv_head, s, keys.y);
        let late = places(tile, kv_head, s + TILE, keys.y);
        var near_early = array<vec4<f32>, TILE>();
        var near_late = array<vec4<f32>, TILE>();
        var far_early = array<vec4<f32>, TILE>();
        var far_late = array<vec4<f32>, TILE>();
        for (var i = 0u; i < quads; i++) {
            let near_queries = queries_at((*near).query, i);
            var far_queries = mat4x4<f32>();
            if (ROWS > 4u) {
                far_queries = queries_at((*far).query, i);
            }
            add_products(&near_early, &far_early, near_queries, far_queries, early, i);
            add_products(&near_late, &far_late, near_queries, far_queries, late, i);
        }
        let near_rescale = weigh(near, &near_early, &near_late, s);
        var far_rescale = vec4<f32>();
        if (ROWS > 4u) {
            far_rescale = weigh(far, &far_early, &far_late, s);
        }
        for (var i = 0u; i < value_quads(); i++) {
            var sums = Weighed();
            add_values(&sums, near_early, far_early, early, i);
            add_values(&sums, near_late, far_late, late, i);
            accumulate((*near).out, i, near_rescale, sums.near);
            if (has_far) {
                accumulate((*far).out, i, far_rescale, sums.far);
            }
        }
    }
    finish(*near);
    if (has_far) {
        finish(*far);
    }
}
