enable f16;
// Tiles are staged in workgroup memory as f16; products are still summed in f32.
#import tile
#import rows_scaled
alias Staged = vec4<f16>;
