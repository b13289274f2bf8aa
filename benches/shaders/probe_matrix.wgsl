// Multiplies cooperative matrices in registers, to measure the units that do so. Each subgroup adds up products of two
// matrices A with four matrices B of SIZE x SIZE, in half precision, again and again; sums are f32:
//
//     y[g, i, j] = rounds * A[i] B[j]
//
// SUBGROUP is the size of the largest subgroup that the adapter makes. Where it makes smaller ones, several compute the
// same matrices. The baseline stands in where there are no such units: by elements, one group of invocations for all.
// Dispatch (workgroups of four subgroups folded over x and y); y has whole workgroups.
#import unit t0=unit_plain matrix8=unit_matrix8 matrix16=unit_matrix16
#import fold

struct Params { n_groups: u32, rounds: u32, _pad0: u32, _pad1: u32 }
@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> x: array<f32>;        // [6, SIZE, SIZE]: two matrices A, four matrices B
@group(0) @binding(2) var<storage, read_write> y: array<f32>;  // [4 n_groups, 2, 4, SIZE, SIZE]

override SUBGROUP: u32 = 32u;
override WG: u32 = 4u * SUBGROUP;
const SQUARE: u32 = SIZE * SIZE;

@compute @workgroup_size(WG)
fn probe_matrix(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
) {
    let number = group_index(group, grid);
    if (number >= params.n_groups) {
        return;
    }
    multiply(local, (number * 4u + local / SUBGROUP) * 8u * SQUARE);
}
