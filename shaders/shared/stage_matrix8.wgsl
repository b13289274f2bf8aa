enable f16;
enable wgpu_cooperative_matrix;
// Tiles are staged in workgroup memory as f16 and multiplied as matrices of 8 x 8, which are summed in f32.
#import tile_matrix
#import rows_scaled
const SIZE: u32 = 8u;
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sum = coop_mat8x8<f32, C>;
