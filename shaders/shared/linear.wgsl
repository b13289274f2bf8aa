// What the variants of `matmul` and `matvec` share: y = x w^T (+ bias) (+ y).

const BIAS: u32 = 1u;       // add the bias, which is in `vector`
const ACCUMULATE: u32 = 2u; // add to what y holds

// Where the product's rows begin in y; elsewhere than at 0 for a split of K alone.
var<private> first_row: u32 = 0u;

fn put(m: u32, n: u32, sum: f32) {
    if (m >= params.n_tokens || n >= params.n_out) {
        return;
    }
    var value = sum;
    if ((params.flags & BIAS) != 0u) {
        let at = params.y_start + n;
        value += vector[at / 4u][at % 4u];
    }
    let at = (first_row + m) * params.y_stride + params.y_start + n;
    if ((params.flags & ACCUMULATE) != 0u) {
        value += y[at];
    }
    y[at] = value;
}
