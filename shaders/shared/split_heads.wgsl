// Where the projected heads of a token go: queries and keys are rotated, keys and values written to the cache.
#import rotate
#import state

// Pair i of a head, of queries first, then keys, then values. What is rotated is multiplied by `factor` after it.
fn put_pair(token: u32, head: u32, i: u32, value: vec2<f32>, factor: vec2<f32>) {
    let pos = state[POS] + token;
    let row = state[ANGLES] + pos;
    let offset = pair(i);
    if (head < params.n_heads) {
        let to = (token * params.n_heads + head) * params.head_dim + offset;
        let turned = rotate(value, row + params.query_row, i) * factor;
        q[to.x] = turned.x;
        q[to.y] = turned.y;
    } else if (pos < params.capacity) { // padding of the last chunk may lie past the cache
        let g = (head - params.n_heads) % params.n_kv_heads;
        let to = (g * params.capacity + pos) * params.head_dim + offset;
        if (head < params.n_heads + params.n_kv_heads) {
            let turned = rotate(value, row, i) * factor;
            k[to.x] = turned.x;
            k[to.y] = turned.y;
        } else {
            v[to.x] = value.x;
            v[to.y] = value.y;
        }
    }
}
