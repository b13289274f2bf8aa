// Tiles are staged in workgroup memory as f32.
alias Staged = f32;
