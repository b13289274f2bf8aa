// Attention of one token, or of one of each of several sequences, from its projection on: normalises and rotates its queries and keys, writes keys and values to
// their cache slots, and weighs the values of all keys that the token sees, with grouped queries, an optional window and
// a soft cap:
//
//     qkv = q heads | k heads | v heads;   k[g, pos] = turn(..), v[g, pos] = ..
//     y[h] = sum over s of softmax over s of score(turn(q[h]), k[g, s]) * v[g, s],   s <= pos,  g = h * Hkv / H
//     score(q, k) = scale * q . k, or cap * tanh(scale * q . k / cap)
//
// A workgroup takes ROWS query heads of a key/value head and one part of the cached keys, so that a loaded key serves ROWS
// queries; with several parts, `attention_merge` puts them together. The token's own key belongs to the first part. All
// workgroups of that part make it for themselves, and one of them writes it to the cache, where nobody reads it in this
// dispatch. Where tokens may be of one sequence, one dispatch stores the keys of all, and another one reads them: see
// `shared/parts.wgsl`. A streaming softmax walks the keys in tiles of WG and rescales what it has when a larger score appears.
// Of heads wider than 256 a workgroup has 256 columns of the values. Dispatch (T * Hkv * ceil(D / 256) * ceil(H / Hkv / ROWS)
// folded over x and y, splits). Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135; Dao et al.
// 2023, "Flash-Decoding for long-context inference".
#import reduce t0=reduce_four t2=reduce_four_subgroup
#import cache F32=cache_f32 F16=cache_f16 Q8_0=cache_q8_0
#import attention
#import parts
#import sinks
#import heads
#import turn
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> state: array<u32>;       // step state
@group(0) @binding(2) var<storage, read> table: array<vec2<f32>>; // [rows, rot_dims / 2] of (cos, sin); those of queries from `query_row` on
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // norms of queries and keys; any buffer without NORM
@group(0) @binding(4) var<storage, read> qkv: array<vec4<f32>>;   // [T, 4 query_start + (H + 2 Hkv) D], D a multiple of 4 up to 576
@group(0) @binding(5) var<storage, read> sinks: array<f32>;       // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> k: array<vec4<u32>>; // [Hkv, slots, row]
@group(0) @binding(7) var<storage, read_write> v: array<vec4<u32>>; // [Hkv, slots, row]; any buffer with VALUES_FROM
@group(0) @binding(8) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D], or parts [T, H, splits, D + 4]

const WG: u32 = 64u;
override ROWS: u32 = 4u; // 1 to 4, and up to 2 of more than 256 columns
override HEAD_DIM: u32 = 64u; // D: a compiler that knows how long a head is reads all of it ahead
const COLUMNS: u32 = 64u; // quads of the values

var<workgroup> quads_of_rows: array<vec4<f32>, 256>; // queries side by side, then sums of slices
var<workgroup> weights: array<vec4<f32>, WG>;

// Quad `i` of the value whose row begins at unit `at`.
fn cached_value(at: u32, i: u32) -> vec4<f32> {
    if (VALUES_FROM > 0u) {
        return key_quad(at, i + VALUES_FROM);
    }
    return value_quad(at, i);
}

@compute @workgroup_size(WG)
fn attention_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let kv_head = group_index(group, grid) % params.n_kv_heads;
    let quads = HEAD_DIM / 4u;
    let of_value = quads - VALUES_FROM;
    let n_columns = (of_value + COLUMNS - 1u) / COLUMNS;
    let part = group_index(group, grid) / params.n_kv_heads % n_columns * COLUMNS; // its first quad
    let fours = (params.n_heads / params.n_kv_heads + ROWS - 1u) / ROWS;
    let first_row = group_index(group, grid) / params.n_kv_heads / n_columns % fours * ROWS;
    let token = group_index(group, grid) / params.n_kv_heads / n_columns / fours;
    if (token >= params.n_tokens) {
        return;
    }
    if (STORE == STORES_ONLY && (first_row > 0u || part > 0u)) {
        return;
    }
    let own = rows_of(token);
    let pos = state[own.state + POS];
    let rope_offset = state[own.state + ROPE_OFFSET];
    let keys = part_range(group.z, pos);
    let is_first = group.z == 0u;
    if (keys.x >= keys.y && !is_first) {
        return;
    }
    let stride = 256u / ROWS;
    let query = queries_of(rows_from(first_row, own), kv_head); // query heads
    let row = 4u * (params.query_start + token * params.query_stride);

    var scale = vec4<f32>(1.0);
    if (NORM != 0u) {
        var squares = vec4<f32>();
        for (var r = 0u; r < ROWS; r++) {
            squares[r] = norm_squares(row, query[r], local, WG);
        }
        let all = workgroup_sum(local, squares);
        for (var r = 0u; r < ROWS; r++) {
            scale[r] = norm_scale(query[r], all[r]);
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        for (var i = local; i < quads; i += WG) {
            quads_of_rows[r * stride + i] = head_quad(head_at(row, query[r], scale[r], pos, rope_offset), i);
        }
    }
    workgroupBarrier();

    // For the scores an invocation takes one key of a tile. For the values it takes four columns, of every `slices`-th
    // key, so that small heads keep the whole workgroup busy; the slices are added up at the end.
    let columns = min(COLUMNS, of_value - part);
    let slices = WG / columns;
    let quad = part + local % columns;
    let slice = local / columns;
    var highest = first_scores(query, is_first);
    var sum = first_weights(is_first && local == 0u); // of this invocation's keys
    var acc = array<vec4<f32>, 4>();
    if (is_first && has_own()) {
        let of_key = params.n_heads + kv_head;
        let value_head = of_key + params.n_kv_heads;
        var own_scale = vec2<f32>(1.0); // of the key and of the value
        if (NORM != 0u && STORE != HAS_STORED) {
            var squares = vec4<f32>(norm_squares(row, of_key, local, WG), 0.0, 0.0, 0.0);
            if (NORM == NORM_VALUES) {
                squares.y = norm_squares(row, value_head, local, WG);
            }
            let all = workgroup_sum(local, squares);
            own_scale = vec2<f32>(norm_scale(of_key, all.x), norm_scale(value_head, all.y));
        }
        let key = head_at(row, of_key, own_scale.x, pos, rope_offset);
        let value = head_at(row, value_head, own_scale.y, pos, rope_offset);
        let at = slot_at(own, kv_head, pos);
        if (STORE != HAS_STORED && first_row == 0u && part == 0u && pos < params.capacity) {
            for (var u = local; u < row_units(); u += WG) {
                k[at + u] = row_unit(key, u);
                if (VALUES_FROM == 0u) {
                    v[at + u] = row_unit(value, u);
                }
            }
        }
        if (STORE == STORES_ONLY) {
            return;
        }
        var products = vec4<f32>();
        for (var i = local; i < quads; i += WG) {
            var own_quad = vec4<f32>();
            if (STORE == HAS_STORED) {
                own_quad = key_quad(at, i);
            } else {
                own_quad = cached_quad(key, i);
            }
            for (var r = 0u; r < ROWS; r++) {
                products[r] += dot(quads_of_rows[r * stride + i], own_quad);
            }
        }
        let score = scores(workgroup_sum(local, products));
        let next = max(highest, score);
        let weight = exp(score - next);
        sum = sum * exp(highest - next) + select(vec4<f32>(), weight, local == 0u);
        highest = next;
        if (slice == 0u) {
            var own_value = vec4<f32>();
            if (STORE == HAS_STORED) {
                own_value = cached_value(at, quad);
            } else if (VALUES_FROM > 0u) {
                own_value = cached_quad(key, quad + VALUES_FROM);
            } else {
                own_value = cached_quad(value, quad);
            }
            for (var r = 0u; r < ROWS; r++) {
                acc[r] = weight[r] * own_value;
            }
        }
    }
    for (var start = keys.x; start < keys.y; start += WG) {
        let s = start + local;
        let is_there = s < keys.y;
        var score = vec4<f32>(LOWEST);
        if (is_there) {
            let at = slot_at(own, kv_head, s);
            var products = vec4<f32>();
            for (var i = 0u; i < quads; i++) {
                let key = key_quad(at, i);
                for (var r = 0u; r < ROWS; r++) {
                    products[r] += dot(quads_of_rows[r * stride + i], key);
                }
            }
            score = scores(products);
        }
        let next = max(highest, workgroup_max(local, score)); // its barriers also allow to overwrite `weights`
        let weight = select(vec4<f32>(), exp(score - next), vec4<bool>(is_there));
        let rescale = exp(highest - next);
        highest = next;
        sum = sum * rescale + weight;
        weights[local] = weight;
        workgroupBarrier();
        // A tile is summed on its own first: adding keys one by one to a long sum would lose digits.
        var tile = array<vec4<f32>, 4>();
        if (slice < slices) {
            // Eight at a time, so that none waits for the one before; past the last key that one again, for nothing.
            let last = min(WG, keys.y - start) - 1u;
            for (var first = slice; first <= last; first += 8u * slices) {
                var values = array<vec4<f32>, 8>();
                for (var i = 0u; i < 8u; i++) {
                    values[i] = cached_value(slot_at(own, kv_head, start + min(first + i * slices, last)), quad);
                }
                for (var i = 0u; i < 8u && first + i * slices <= last; i++) {
                    let share = weights[first + i * slices];
                    for (var r = 0u; r < ROWS; r++) {
                        tile[r] += share[r] * values[i];
                    }
                }
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            acc[r] = acc[r] * rescale[r] + tile[r];
        }
    }
    let total = workgroup_sum(local, sum); // the queries have been read by now
    for (var r = 0u; r < ROWS; r++) {
        quads_of_rows[r * WG + local] = acc[r];
    }
    workgroupBarrier();
    if (local < columns) {
        for (var r = 0u; r < ROWS; r++) {
            var out = vec4<f32>();
            for (var i = 0u; i < slices; i++) {
                out += quads_of_rows[r * WG + i * columns + local];
            }
            let start = part_start(token * params.n_heads + query[r], group.z);
            if (params.splits == 1u) {
                y[start + part + local] = out / total[r];
            } else {
                y[start + part + local] = out;
                y[start + of_value] = vec4<f32>(highest[r], total[r], 0.0, 0.0);
            }
        }
    }
}
