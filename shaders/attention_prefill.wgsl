// Attention of the queries of several tokens with cached keys and values, with grouped queries, an optional window and a
// soft cap, tile by tile; or of packed sequences, which may have biases:
//
//     y[t, h] = sum over s of softmax over s of score(q[t, h], k[g, s]) * v[g, s],   s <= pos + t,  g = h * Hkv / H
//     score(q, k) = scale * q . k, or cap * tanh(scale * q . k / cap)
//
// A workgroup takes 16 rows of a key/value head and walks the keys that any of them sees in tiles of 32, both in parts of
// 64 columns. An invocation has four rows and, of each tile, two keys for the scores and four columns of each part for
// the values, so that four numbers that it loads serve sixteen products. Tiles that no row sees are never touched.
// Of heads wider than 256 a workgroup has 256 columns of the values. Dispatch (Hkv * ceil(D / 256) * tiles folded over x
// and y), with tiles of 16 rows. Dao et al. 2022, arXiv:2205.14135.
#import keys F32=keys_f32 F16=keys_f16 Q8_0=keys_q8_0
#import attention
#import sinks
#import fold

@group(0) @binding(0) var<uniform> params: AttentionParams;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> q: array<vec4<f32>>;  // [T, H, D], D a multiple of 4 up to 576
@group(0) @binding(3) var<storage, read> k: array<vec4<u32>>;  // [Hkv, slots, row]
@group(0) @binding(4) var<storage, read> v: array<vec4<u32>>;  // [Hkv, slots, row]; any buffer with VALUES_FROM
@group(0) @binding(5) var<storage, read> sinks: array<f32>;    // see `sinks`; any buffer without them
@group(0) @binding(6) var<storage, read_write> y: array<vec4<f32>>; // [T, H, D]

const WG: u32 = 64u;
const TILE_ROWS: u32 = 16u;
const TILE_KEYS: u32 = 32u;
const PART: u32 = 16u;                 // quads of a row that are staged at a time
const STRIDE: u32 = PART + 1u;         // rows of keys start in different banks
override PARTS: u32 = 4u;              // ceil(D / 64)
const MOST: u32 = 4u;                  // parts of the values that it has

var<workgroup> queries: array<vec4<f32>, TILE_ROWS * PART>;
var<workgroup> staged: array<vec4<f32>, TILE_KEYS * STRIDE>; // keys, then values
var<workgroup> weights: array<vec4<f32>, TILE_KEYS * 4u>;    // scores first; four rows of a key in each

// Quad `i` of the value whose row begins at unit `at`.
fn cached_value(at: u32, i: u32) -> vec4<f32> {
    if (VALUES_FROM > 0u) {
        return key_quad(at, i + VALUES_FROM);
    }
    return value_quad(at, i);
}

@compute @workgroup_size(WG)
fn attention_prefill(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let quads = params.head_dim / 4u;
    let index = params.first_group + group_index(group, grid);
    let kv_head = index % params.n_kv_heads;
    let n_columns = (value_quads() + PART * MOST - 1u) / (PART * MOST);
    let first_part = index / params.n_kv_heads % n_columns * MOST;
    let tile_index = index / params.n_kv_heads / n_columns;
    if (tile_index >= params.n_tiles) {
        return;
    }
    let tile = tile_at(tile_index, TILE_ROWS);
    if (tile.first >= tile.end) {
        return;
    }
    let keys = visible_to(tile, TILE_KEYS);
    let lane = local % 16u;
    let four = local / 16u;
    let row = tile.first + four * 4u;
    let rows = rows_from(row, tile);
    let query = queries_of(rows, kv_head);
    let token = tokens_of(rows);
    let seen = array<vec2<u32>, 4>(
        visible(position_of(token.x, tile), tile.keys),
        visible(position_of(token.y, tile), tile.keys),
        visible(position_of(token.z, tile), tile.keys),
        visible(position_of(token.w, tile), tile.keys),
    );
    let first = vec4<u32>(seen[0].x, seen[1].x, seen[2].x, seen[3].x);
    let end = vec4<u32>(seen[0].y, seen[1].y, seen[2].y, seen[3].y);

    var highest = first_scores(query, true);
    var sum = first_weights(true);
    var acc = array<mat4x4<f32>, MOST>(); // by part; a column for each row
    for (var s = keys.x; s < keys.y; s += TILE_KEYS) {
        var near = vec4<f32>(); // products with key s + lane
        var far = vec4<f32>();  // and with key s + 16 + lane
        for (var part = 0u; part < PARTS; part++) {
            let n = min(PART, quads - part * PART);
            if (lane < n) {
                for (var i = four; i < TILE_ROWS; i += 4u) {
                    let at = queries_from(rows_from(tile.first + i, tile), kv_head).x;
                    queries[i * PART + lane] = q[at + part * PART + lane];
                }
                for (var i = four; i < TILE_KEYS; i += 4u) {
                    let at = params.key_start + slot_at(tile, kv_head, min(s + i, keys.y - 1u));
                    staged[i * STRIDE + lane] = key_quad(at, part * PART + lane);
                }
            }
            workgroupBarrier();
            for (var i = 0u; i < n; i++) {
                let q0 = queries[four * 4u * PART + i];
                let q1 = queries[(four * 4u + 1u) * PART + i];
                let q2 = queries[(four * 4u + 2u) * PART + i];
                let q3 = queries[(four * 4u + 3u) * PART + i];
                let k0 = staged[lane * STRIDE + i];
                let k1 = staged[(lane + 16u) * STRIDE + i];
                near += vec4<f32>(dot(q0, k0), dot(q1, k0), dot(q2, k0), dot(q3, k0));
                far += vec4<f32>(dot(q0, k1), dot(q1, k1), dot(q2, k1), dot(q3, k1));
            }
            workgroupBarrier(); // what is staged is overwritten
        }
        let sees_near = sees(s + lane, first, end);
        let sees_far = sees(s + lane + 16u, first, end);
        near = select(vec4<f32>(LOWEST), scores_of(near, query, s + lane), sees_near);
        far = select(vec4<f32>(LOWEST), scores_of(far, query, s + lane + 16u), sees_far);
        weights[four * TILE_KEYS + lane] = near;
        weights[four * TILE_KEYS + lane + 16u] = far;
        workgroupBarrier();
        var next = highest;
        for (var j = 0u; j < TILE_KEYS; j++) {
            next = max(next, weights[four * TILE_KEYS + j]);
        }
        let rescale = exp(highest - next);
        highest = next;
        workgroupBarrier(); // all scores have been read
        weights[four * TILE_KEYS + lane] = select(vec4<f32>(), exp(near - next), sees_near);
        weights[four * TILE_KEYS + lane + 16u] = select(vec4<f32>(), exp(far - next), sees_far);
        var tile_sum = vec4<f32>();
        for (var part = 0u; part < min(PARTS, MOST); part++) {
            let start = (first_part + part) * PART;
            let n = min(PART, value_quads() - min(start, value_quads()));
            if (lane < n) {
                for (var i = four; i < TILE_KEYS; i += 4u) {
                    let at = params.value_start + slot_at(tile, kv_head, min(s + i, keys.y - 1u));
                    staged[i * STRIDE + lane] = cached_value(at, start + lane);
                }
            }
            workgroupBarrier();
            var near_sums = mat4x4<f32>();
            tile_sum = vec4<f32>();
            for (var j = 0u; j < TILE_KEYS; j++) {
                let weight = weights[four * TILE_KEYS + j];
                let value = staged[j * STRIDE + lane];
                tile_sum += weight;
                near_sums += mat4x4<f32>(weight.x * value, weight.y * value, weight.z * value, weight.w * value);
            }
            acc[part] = mat4x4<f32>(
                acc[part][0] * rescale.x + near_sums[0],
                acc[part][1] * rescale.y + near_sums[1],
                acc[part][2] * rescale.z + near_sums[2],
                acc[part][3] * rescale.w + near_sums[3],
            );
            workgroupBarrier(); // what is staged is overwritten
        }
        sum = sum * rescale + tile_sum;
    }
    for (var part = 0u; part < min(PARTS, MOST); part++) {
        let quad = (first_part + part) * PART + lane;
        for (var r = 0u; r < 4u; r++) {
            if (quad < value_quads() && row + r < tile.end) {
                y[query[r] * value_quads() + quad] = acc[part][r] / sum[r];
            }
        }
    }
}
