alias Numbers = vec4<f32>;
