// Attention of ROWS rows with a range of keys by one invocation alone; see `shared/attention.wgsl`. Keys are walked in
// tiles, so that a loaded query serves TILE keys and a loaded key ROWS queries. Sums stay in `y`: registers cannot be
// indexed by a loop over D. Rows past the end repeat the last one and write the same numbers, so all rows of a sum are
// read before one is written.
#import attention

override ROWS: u32 = 4u; // 1 to 4
const TILE: u32 = 8u;

fn attend(rows: vec4<u32>, kv_head: u32, keys: vec2<u32>, split: u32) {
    let quads = params.head_dim / 4u;
    let cached = kv_head * params.capacity;
    let query = queries_of(rows, kv_head);
    let token = tokens_of(rows);
    var out = vec4<u32>();
    var first = vec4<u32>();
    var end = vec4<u32>();
    for (var r = 0u; r < ROWS; r++) {
        let seen = visible(token[r]);
        first[r] = seen.x;
        end[r] = min(seen.y, keys.y);
        out[r] = part_start(query[r], split);
        for (var i = 0u; i < quads; i++) {
            y[out[r] + i] = vec4<f32>();
        }
    }
    var highest = vec4<f32>(LOWEST);
    var sum = vec4<f32>();
    for (var s = keys.x; s < keys.y; s += TILE) {
        // A tile's keys past the end repeat the last one, which weighs nothing there.
        var at = array<u32, TILE>();
        for (var j = 0u; j < TILE; j++) {
            at[j] = (cached + min(s + j, keys.y - 1u)) * quads;
        }
        var weights = array<vec4<f32>, TILE>();
        for (var i = 0u; i < quads; i++) {
            var part = array<vec4<f32>, 4>();
            for (var r = 0u; r < ROWS; r++) {
                part[r] = q[query[r] * quads + i];
            }
            for (var j = 0u; j < TILE; j++) {
                let key = k[at[j] + i];
                for (var r = 0u; r < ROWS; r++) {
                    weights[j][r] += dot(part[r], key);
                }
            }
        }
        var next = highest;
        for (var j = 0u; j < TILE; j++) {
            weights[j] = select(vec4<f32>(LOWEST), scores(weights[j]), sees(s + j, first, end));
            next = max(next, weights[j]);
        }
        let rescale = exp(highest - next);
        highest = next;
        var tile_sum = vec4<f32>();
        for (var j = 0u; j < TILE; j++) {
            weights[j] = select(vec4<f32>(), exp(weights[j] - next), sees(s + j, first, end));
            tile_sum += weights[j];
        }
        sum = sum * rescale + tile_sum;
        for (var i = 0u; i < quads; i++) {
            var tile = array<vec4<f32>, 4>();
            for (var j = 0u; j < TILE; j++) {
                let value = v[at[j] + i];
                for (var r = 0u; r < ROWS; r++) {
                    tile[r] += weights[j][r] * value;
                }
            }
            for (var r = 0u; r < ROWS; r++) {
                tile[r] += y[out[r] + i] * rescale[r];
            }
            for (var r = 0u; r < ROWS; r++) {
                y[out[r] + i] = tile[r];
            }
        }
    }
    if (params.splits > 1u) {
        for (var r = 0u; r < ROWS; r++) {
            y[out[r] + quads] = vec4<f32>(highest[r], sum[r], 0.0, 0.0);
        }
        return;
    }
    for (var i = 0u; i < quads; i++) {
        var result = array<vec4<f32>, 4>();
        for (var r = 0u; r < ROWS; r++) {
            result[r] = y[out[r] + i] / sum[r];
        }
        for (var r = 0u; r < ROWS; r++) {
            y[out[r] + i] = result[r];
        }
    }
}
