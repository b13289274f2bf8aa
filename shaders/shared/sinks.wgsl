// Learned scores of each head, in the buffer `sinks`. With `attention`.
//
// Attention sinks (Xiao et al. 2023, arXiv:2309.17453; gpt-oss), `[H]`: a score that takes part in the softmax once
// and has no value. It is what the streaming softmax begins with.
//
// Biases by relative position (Raffel et al. 2019, arXiv:1910.10683; T5, MPNet), `[2 R + 1, H]`: added to the score of
// a key that is -R to R tokens behind the query; keys farther away have the bias of the nearest of these. R is
// `params.reach`.

override SINKS: bool = false;
override BIASES: bool = false;

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

// Scores of a key with queries at these places among all tokens and heads, from their products.
fn scores_of(products: vec4<f32>, query: vec4<u32>, key: u32) -> vec4<f32> {
    if (!BIASES) {
        return scores(products);
    }
    let distance = vec4<i32>(i32(key)) - vec4<i32>(query / params.n_heads);
    let reach = vec4<i32>(i32(params.reach));
    let at = vec4<u32>(clamp(distance, -reach, reach) + reach) * params.n_heads + query % params.n_heads;
    return scores(products) + vec4<f32>(sinks[at.x], sinks[at.y], sinks[at.z], sinks[at.w]);
}
