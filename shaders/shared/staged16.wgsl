enable f16;
enable wgpu_cooperative_matrix;
// Matrices of 16 x 16, which Vulkan has. Their operands are staged by quads, so that compilers know how they are aligned.
const SIZE: u32 = 16u;
const PER: u32 = 4u; // numbers in what the staged array is made of
alias Staged = vec4<f16>;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;

fn place(at: u32, quad: vec4<f16>) {
    staged[at] = quad;
}
