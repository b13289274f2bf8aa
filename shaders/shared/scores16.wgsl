// Scores of `attention_half` by matrices of 16 x 16: one below the other a subgroup has one.
#import staged16
const HIGH: u32 = 1u;
alias Stored = vec4<f32>;

fn score_quad(at: u32) -> vec4<f32> {
    return exchange[at];
}

fn put_score_quad(at: u32, quad: vec4<f32>) {
    exchange[at] = quad;
}
