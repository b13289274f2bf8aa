// Tiles are staged in workgroup memory as f32.
#import tile
#import rows_plain
alias Staged = vec4<f32>;
