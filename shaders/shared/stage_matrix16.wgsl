enable f16;
enable wgpu_cooperative_matrix;
// Tiles are staged in workgroup memory as f16 and multiplied as matrices of 16 x 16, which are summed in f32.
#import tile_matrix
#import rows_scaled
const SIZE: u32 = 16u;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;
