// Tiles are staged in workgroup memory as f32.
#import tile
alias Staged = vec4<f32>;
