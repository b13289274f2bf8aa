// The matrices side by side that an adapter adds to, at most four: `params.members` has the rows at which the second, the
// third and the fourth begin, and the quads of a row of inner, which has `params.rank` quads for each.

// Which of them each row belongs to.
fn member_of(rows: vec4<u32>) -> vec4<u32> {
    let starts = params.members;
    return vec4<u32>(rows >= vec4<u32>(starts.x)) + vec4<u32>(rows >= vec4<u32>(starts.y))
        + vec4<u32>(rows >= vec4<u32>(starts.z));
}
