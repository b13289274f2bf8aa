// Attention of few queries with cached keys and values, with grouped queries, an optional window and a soft cap:
//
//     y[t, h] = sum over s of softmax over s of score(q[t, h], k[g, s]) * v[g, s],   s <= pos + t,  g = h * Hkv / H
//     score(q, k) = scale * q . k, or cap * tanh(scale * q . k / cap)
//
// A workgroup takes ROWS rows of a key/value head and one part of the keys, so that a loaded key serves ROWS queries; with
// several parts, `attention_merge` puts them together. A streaming softmax walks the keys in tiles of WG and rescales
// what it has when a larger score appears. Of wider heads it has 256 columns of the values. Dispatch (Hkv * ceil(D / 256) *
// ceil(T * H / Hkv / ROWS) folded over x and y, splits). Milakov & Gimelshein 2018,
// arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135; Dao et al. 2023, "Flash-Decoding for long-context inference".
#import reduce t0=reduce_four t2=reduce_four_subgroup
#import attention
#import sinks
#import fold

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 512
@group(0) @binding(3) var<storage, read> k: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(4) var<storage, read> v: array<vec4<f32>>;  // [Hkv, capacity, D]
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // [H]; any buffer without SINKS
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D], or parts [T, H, splits, D + 4]

const WG: u32 = 64u;
override ROWS: u32 = 4u; // 1 to 4, and up to 2 of more than 256 columns
const COLUMNS: u32 = 64u; // quads of the values

var<workgroup> quads_of_rows: array<vec4<f32>, 256>; // queries side by side, then sums of slices
var<workgroup> weights: array<vec4<f32>, WG>;

@compute @workgroup_size(WG)
fn attention_decode(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let kv_head = group_index(group, grid) % params.n_kv_heads;
    let quads = params.head_dim / 4u;
    let n_parts = (quads + COLUMNS - 1u) / COLUMNS;
    let part = group_index(group, grid) / params.n_kv_heads % n_parts * COLUMNS; // its first quad
    let first_row = group_index(group, grid) / params.n_kv_heads / n_parts * ROWS;
    let keys = part_range(group.z);
    if (keys.x >= keys.y || first_row >= n_rows()) {
        return;
    }
    let stride = 256u / ROWS;
    let all = all_rows();
    let rows = rows_from(first_row, all);
    let query = queries_of(rows, kv_head);
    let query_from = queries_from(rows, kv_head);
    let keys_from = params.key_start + cached_from(kv_head);
    let values_from = params.value_start + cached_from(kv_head);
    let token = tokens_of(rows);
    var first = vec4<u32>();
    var end = vec4<u32>();
    for (var r = 0u; r < ROWS; r++) {
        let seen = visible(token[r], all.keys);
        first[r] = seen.x;
        end[r] = min(seen.y, keys.y);
        for (var i = local; i < quads; i += WG) {
            quads_of_rows[r * stride + i] = q[query_from[r] + i];
        }
    }
    workgroupBarrier();
    // For the scores an invocation takes one key of a tile. For the values it takes four columns, of every `slices`-th
    // key, so that small heads keep the whole workgroup busy; the slices are added up at the end.
    let columns = min(COLUMNS, quads - part);
    let slices = WG / columns;
    let quad = part + local % columns;
    let slice = local / columns;
    var highest = first_scores(query, group.z == 0u);
    var sum = first_weights(group.z == 0u && local == 0u); // of this invocation's keys
    var acc = array<vec4<f32>, 4>();
    for (var start = keys.x; start < keys.y; start += WG) {
        let s = start + local;
        let seen = sees(s, first, end);
        var score = vec4<f32>(LOWEST);
        if (s < keys.y) {
            var products = vec4<f32>();
            for (var i = 0u; i < quads; i++) {
                let key = k[keys_from + s * params.key_stride + i];
                for (var r = 0u; r < ROWS; r++) {
                    products[r] += dot(quads_of_rows[r * stride + i], key);
                }
            }
            score = select(score, scores(products), seen);
        }
        let next = max(highest, workgroup_max(local, score)); // its barriers also allow to overwrite `weights`
        let weight = select(vec4<f32>(), exp(score - next), seen);
        let rescale = exp(highest - next);
        highest = next;
        sum = sum * rescale + weight;
        weights[local] = weight;
        workgroupBarrier();
        // A tile is summed on its own first: adding keys one by one to a long sum would lose digits.
        var tile = array<vec4<f32>, 4>();
        if (slice < slices) {
            let n = min(WG, keys.y - start);
            for (var j = slice; j < n; j += slices) {
                let value = v[values_from + (start + j) * params.key_stride + quad];
                for (var r = 0u; r < ROWS; r++) {
                    tile[r] += weights[j][r] * value;
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
            let start = part_start(query[r], group.z);
            if (params.splits == 1u) {
                y[start + quad] = out / total[r];
            } else {
                y[start + quad] = out;
                if (part == 0u) {
                    y[start + quads] = vec4<f32>(highest[r], total[r], 0.0, 0.0);
                }
            }
        }
    }
}
