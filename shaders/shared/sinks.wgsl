// Attention sinks (Xiao et al. 2023, arXiv:2309.17453; gpt-oss): a score of each head that takes part in the softmax once
// and has no value. It is what the streaming softmax begins with. With `attention`.

override SINKS: bool = false;

// Scores to begin with, of queries at these places among all tokens and heads; `takes` where this part of the keys has them.
fn first_scores(query: vec4<u32>, takes: bool) -> vec4<f32> {
    if (!SINKS || !takes) {
        return vec4<f32>(LOWEST);
    }
    let head = query % params.n_heads;
    return vec4<f32>(sinks[head.x], sinks[head.y], sinks[head.z], sinks[head.w]);
}

// The weights that go with them.
fn first_weights(takes: bool) -> vec4<f32> {
    return vec4<f32>(select(0.0, 1.0, SINKS && takes));
}
