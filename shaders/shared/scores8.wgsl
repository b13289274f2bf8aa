// Scores of `attention_half` by matrices of 8 x 8: one below the other a subgroup has two.
#import staged8
const HIGH: u32 = 2u;
alias Stored = f32;

fn score_quad(at: u32) -> vec4<f32> {
    let first = at * 4u;
    return vec4<f32>(exchange[first], exchange[first + 1u], exchange[first + 2u], exchange[first + 3u]);
}

fn put_score_quad(at: u32, quad: vec4<f32>) {
    let first = at * 4u;
    exchange[first] = quad.x;
    exchange[first + 1u] = quad.y;
    exchange[first + 2u] = quad.z;
    exchange[first + 3u] = quad.w;
}
