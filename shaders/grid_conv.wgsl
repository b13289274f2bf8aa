// A convolution of each channel over the neighbours of a patch in its picture, gated on both sides (LFM3-VL):
//
//     u[t] = b[t] * v[t], where x[t] = b | g | v;   y[t] = g[t] * sum over i of weight[i] * u[neighbours[t, i]]
//
// Neighbours outside the picture are rows from T on and count as 0. Dispatch (elements folded over x and y).
#import fold

struct Params { n_patches: u32, channels: u32, taps: u32, _pad0: u32 } // T, C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> neighbours: array<u32>;  // [T, taps]
@group(0) @binding(2) var<storage, read> x: array<f32>;           // [T, 3 C]
@group(0) @binding(3) var<storage, read> weight: array<f32>;      // [C, taps]
@group(0) @binding(4) var<storage, read_write> y: array<f32>;     // [T, C]

const WG: u32 = 256u;

@compute @workgroup_size(WG)
fn grid_conv(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let id = group_index(group, grid) * WG + local;
    if (id >= params.n_patches * params.channels) {
        return;
    }
    let t = id / params.channels;
    let c = id % params.channels;
    var sum = 0.0;
    for (var i = 0u; i < params.taps; i++) {
        let row = neighbours[t * params.taps + i];
        if (row < params.n_patches) {
            let at = row * 3u * params.channels + c;
            sum += weight[c * params.taps + i] * (x[at] * x[at + 2u * params.channels]);
        }
    }
    y[id] = x[t * 3u * params.channels + params.channels + c] * sum;
}
