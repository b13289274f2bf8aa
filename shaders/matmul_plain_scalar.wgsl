// `matmul_plain` without workgroup memory or barriers: 4 x 4 outputs in the registers of one invocation, or four of a
// single row. See `matmul_scalar`.
//
// Dispatch (ceil(N / 32), ceil(M / 32), 1), 8 x 8 invocations.
#kernel matmul_plain scalar

struct Params { m: u32, n: u32, k: u32, _pad: u32 } // M, N, K
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [M, K]
@group(0) @binding(2) var<storage, read> b: array<f32>;        // [K, N]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [M, N]

// Steps of K that are added up on their own first: one long sum would lose digits.
const STEPS: u32 = 32u;

fn put(m: u32, n: u32, value: vec4<f32>) {
    for (var j = 0u; m < params.m && j < min(4u, params.n - min(n, params.n)); j++) {
        y[m * params.n + n + j] = value[j];
    }
}

@compute @workgroup_size(8, 8)
fn matmul_plain(@builtin(global_invocation_id) id: vec3<u32>) {
    let m = id.y * 4u;
    let n = id.x * 4u;
    // Rows and columns past the end repeat the last one; `put` does not write them.
    let cols = min(vec4<u32>(n, n + 1u, n + 2u, n + 3u), vec4<u32>(params.n - 1u));
    let rows = min(vec4<u32>(m, m + 1u, m + 2u, m + 3u), vec4<u32>(params.m - 1u)) * params.k;
    var total0 = vec4<f32>();
    var total1 = vec4<f32>();
    var total2 = vec4<f32>();
    var total3 = vec4<f32>();
    for (var start = 0u; start < params.k; start += STEPS) {
        let end = min(start + STEPS, params.k);
        var acc0 = vec4<f32>();
        if (params.m == 1u) {
            for (var k = start; k < end; k++) {
                let at = cols + k * params.n;
                acc0 += x[k] * vec4<f32>(b[at.x], b[at.y], b[at.z], b[at.w]);
            }
        } else {
            var acc1 = vec4<f32>();
            var acc2 = vec4<f32>();
            var acc3 = vec4<f32>();
            for (var k = start; k < end; k++) {
                let at = cols + k * params.n;
                let w = vec4<f32>(b[at.x], b[at.y], b[at.z], b[at.w]);
                acc0 += x[rows.x + k] * w;
                acc1 += x[rows.y + k] * w;
                acc2 += x[rows.z + k] * w;
                acc3 += x[rows.w + k] * w;
            }
            total1 += acc1;
            total2 += acc2;
            total3 += acc3;
        }
        total0 += acc0;
    }
    put(m, n, total0);
    put(m + 1u, n, total1);
    put(m + 2u, n, total2);
    put(m + 3u, n, total3);
}
