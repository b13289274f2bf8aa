// Tiles are staged in workgroup memory as f32.
alias Staged = vec4<f32>;
