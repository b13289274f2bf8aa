// `attention_decode` without barriers: one invocation takes ROWS query heads and a part of the keys alone, for software
// adapters. Its queries lie in its own share of workgroup memory, because registers cannot be indexed there: ROWS * D is at
// most 512.
//
// Dispatch (T * Hkv * ceil(H / Hkv / ROWS) folded over x and y, ceil(splits / 8)).
#kernel attention_decode scalar
#import cache F32=cache_f32 F16=cache_f16 Q8_0=cache_q8_0
#import attend
#import parts
#import heads
#import turn
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [rows, rot_dims / 2] of (cos, sin); those of queries from `query_row` on
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // norms of queries and keys; any buffer without NORM
@group(0) @binding(4) var<storage, read> qkv: array<vec4<f32>>;   // [T, 4 query_start + (H + 2 Hkv) D], D a multiple of 4 up to 512
@group(0) @binding(5) var<storage, read> sinks: array<f32>;       // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> k: array<vec4<u32>>; // [Hkv, slots, row]
@group(0) @binding(7) var<storage, read_write> v: array<vec4<u32>>; // [Hkv, slots, row]
@group(0) @binding(8) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D], or parts [T, H, splits, D + 4]

const WG: u32 = 8u;
const SHARE: u32 = 128u;

var<workgroup> turned: array<vec4<f32>, WG * SHARE>;
var<private> own_share: u32 = 0u;

// Where the queries of rows start, for `query_quad`.
fn query_places(rows: vec4<u32>, kv_head: u32) -> vec4<u32> {
    let quads = params.head_dim / 4u;
    return own_share + (rows - vec4<u32>(rows.x)) * quads;
}

fn query_quad(at: u32) -> vec4<f32> {
    return turned[at];
}

// Head `n` of the tile's token, normalised with what its norm takes.
fn own_head(n: u32, tile: Tile) -> Head {
    let row = 4u * (params.query_start + tile.token * params.query_stride);
    var scale = 1.0;
    if (NORM != 0u && (n < params.n_heads + params.n_kv_heads || NORM == NORM_VALUES)) {
        scale = norm_scale(n, norm_squares(row, n, 0u, 1u));
    }
    return head_at(row, n, scale, state[tile.state + POS], state[tile.state + ROPE_OFFSET]);
}

@compute @workgroup_size(WG)
fn attention_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let kv_head = group_index(group, grid) % params.n_kv_heads;
    let fours = (params.n_heads / params.n_kv_heads + ROWS - 1u) / ROWS;
    let first_row = group_index(group, grid) / params.n_kv_heads % fours * ROWS;
    let token = group_index(group, grid) / params.n_kv_heads / fours;
    if (token >= params.n_tokens || (STORE == STORES_ONLY && first_row > 0u)) {
        return;
    }
    let tile = rows_of(token);
    let pos = state[tile.state + POS];
    let split = group.z * WG + local;
    let keys = part_range(split, pos);
    if (split >= params.splits || (keys.x >= keys.y && split > 0u)) {
        return;
    }
    if (STORE != HAS_STORED && split == 0u && has_own() && first_row == 0u && pos < params.capacity) {
        let key = own_head(params.n_heads + kv_head, tile);
        let value = own_head(params.n_heads + params.n_kv_heads + kv_head, tile);
        for (var u = 0u; u < row_units(); u++) {
            k[slot_at(tile, kv_head, pos) + u] = row_unit(key, u);
            if (VALUES_FROM == 0u) {
                v[slot_at(tile, kv_head, pos) + u] = row_unit(value, u);
            }
        }
    }
    if (STORE == STORES_ONLY) {
        return;
    }
    own_share = local * SHARE;
    let quads = params.head_dim / 4u;
    let four = rows_from(first_row, tile);
    let query = queries_of(four, kv_head); // query heads
    for (var r = 0u; r < ROWS; r++) {
        let head = own_head(query[r], tile);
        for (var i = 0u; i < quads; i++) {
            turned[query_places(four, kv_head)[r] + i] = head_quad(head, i);
        }
    }
    var rows = begin(first_row, tile, kv_head, keys, split);
    if (split == 0u && has_own()) {
        add_own(&rows, tile, kv_head);
    }
    var none = Rows();
    attend(&rows, &none, false, tile, kv_head, keys);
}

// Begins the softmax with the token's own key.
fn add_own(rows: ptr<function, Rows>, tile: Tile, kv_head: u32) {
    let at = slot_at(tile, kv_head, state[tile.state + POS]);
    var key = Head();
    var value = Head();
    if (STORE != HAS_STORED) {
        key = own_head(params.n_heads + kv_head, tile);
        value = own_head(params.n_heads + params.n_kv_heads + kv_head, tile);
    }
    let quads = params.head_dim / 4u;
    var sums = vec4<f32>();
    for (var i = 0u; i < quads; i++) {
        sums += products(own_key_quad(key, at, i), queries_at((*rows).query, i));
    }
    let score = scores(sums);
    let next = max((*rows).highest, score);
    let weight = exp(score - next);
    (*rows).sum = (*rows).sum * exp((*rows).highest - next) + weight;
    (*rows).highest = next;
    for (var i = 0u; i < value_quads(); i++) {
        var own = vec4<f32>();
        if (VALUES_FROM > 0u) {
            own = own_key_quad(key, at, i + VALUES_FROM);
        } else {
            own = own_value_quad(value, at, i);
        }
        accumulate((*rows).out, i, vec4<f32>(), weighed(own, weight));
    }
}

// Quad `i` of the token's key, which is cached from unit `at` on.
fn own_key_quad(key: Head, at: u32, i: u32) -> vec4<f32> {
    if (STORE == HAS_STORED) {
        return key_quad(at, i);
    }
    return cached_quad(key, i);
}

// The same of its value.
fn own_value_quad(value: Head, at: u32, i: u32) -> vec4<f32> {
    if (STORE == HAS_STORED) {
        return value_quad(at, i);
    }
    return cached_quad(value, i);
}
