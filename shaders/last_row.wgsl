// The last token's row of a pass: y[0, c] = x[n_tokens - 1, c]. Dispatch (ceil(C / 256), 1, 1).
#import state

struct Params { dim: u32, _pad0: u32, _pad1: u32, _pad2: u32 } // C
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> state: array<u32>;    // step state
@group(0) @binding(2) var<storage, read> x: array<f32>;        // [T, C]
@group(0) @binding(3) var<storage, read_write> y: array<f32>;  // [1, C]

@compute @workgroup_size(256)
fn last_row(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = state[N_TOKENS] - 1u;
    if (id.x < params.dim && row < arrayLength(&x) / params.dim) {
        y[id.x] = x[row * params.dim + id.x];
    }
}
