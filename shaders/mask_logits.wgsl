// Forbids tokens, in place: the logit of each token whose bit is not set becomes the lowest float, which no choice takes
// while another is left. One that is NaN or infinite stays, so that a broken model is seen to be one.
//
// Dispatch (ceil(V / 256), rows, 1).
#import order

struct Params { n_vocab: u32, _pad0: u32, _pad1: u32, _pad2: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> allowed: array<u32>;      // [rows, ceil(V / 32)], the lowest bit first
@group(0) @binding(2) var<storage, read_write> logits: array<f32>; // [rows, V]

@compute @workgroup_size(256)
fn mask_logits(@builtin(global_invocation_id) invocation: vec3<u32>) {
    let id = invocation.x;
    let words = (params.n_vocab + 31u) / 32u;
    let at = invocation.y * params.n_vocab + id;
    if (id >= params.n_vocab || ((allowed[invocation.y * words + id / 32u] >> (id % 32u)) & 1u) == 1u || !is_finite(logits[at])) {
        return;
    }
    logits[at] = -3.4028234e38;
}
