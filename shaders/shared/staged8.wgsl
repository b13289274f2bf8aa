enable f16;
enable wgpu_cooperative_matrix;
// Matrices of 8 x 8, which Metal has. It loads them from arrays of numbers alone.
const SIZE: u32 = 8u;
const PER: u32 = 1u; // numbers in what the staged array is made of
alias Staged = f16;
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sum = coop_mat8x8<f32, C>;

fn place(at: u32, quad: vec4<f16>) {
    staged[at * 4u] = quad.x;
    staged[at * 4u + 1u] = quad.y;
    staged[at * 4u + 2u] = quad.z;
    staged[at * 4u + 3u] = quad.w;
}
