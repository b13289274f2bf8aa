// Reads in a chosen order, to measure memory: each invocation i of N reads READS words, number n = j N + i for j below
// READS, and writes what they are together:
//
//     y[i] = x[at(0 N + i)] xor x[at(1 N + i)] xor ..
//
// In strides, `x` is read as a matrix down its columns: at(n) = (n mod rows) stride + n / rows. Scattered, at(n) is a hash
// of n (the finaliser of xxHash32). The length of `x`, READS N, is a power of two, and so are rows and stride.
// Dispatch (elements of y folded over x and y).

struct Params {
    len: u32,          // words of x
    n_out: u32,        // N
    rows_shift: u32,   // logarithm of rows
    stride_shift: u32, // logarithm of stride
    scattered: u32,    // 0 or 1
    grid_x: u32,
    _pad0: u32,
    _pad1: u32,
}
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<u32>;        // [READS N]
@group(0) @binding(2) var<storage, read_write> y: array<u32>;  // [N]

const WG: u32 = 256u;
const READS: u32 = 16u;

fn hash(n: u32) -> u32 {
    var h = n * 0x9e3779b1u;
    h = (h ^ (h >> 15u)) * 0x85ebca77u;
    h = (h ^ (h >> 13u)) * 0xc2b2ae3du;
    return h ^ (h >> 16u);
}

@compute @workgroup_size(WG)
fn probe_read(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let id = (group.y * params.grid_x + group.x) * WG + local;
    if (id < params.n_out) {
        var word = 0u;
        for (var j = 0u; j < READS; j++) {
            let n = j * params.n_out + id;
            let in_strides = ((n & ((1u << params.rows_shift) - 1u)) << params.stride_shift) + (n >> params.rows_shift);
            let at = select(in_strides, hash(n) & (params.len - 1u), params.scattered == 1u);
            word ^= x[at];
        }
        y[id] = word;
    }
}
