// What the variants of `matmul` and `matvec` share: y = (y +) act(x w^T (+ bias)).
#import gelu
#import tanh

const BIAS: u32 = 1u;       // add the bias, which is in `vector`
const ACCUMULATE: u32 = 2u; // add to what y holds

// What `act` is. Overrides and no flags, because software adapters compute both sides of a branch.
override GELU: bool = false;
override GELU_TANH: bool = false;
override GELU_QUICK: bool = false;
override TANH: bool = false;

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
    if (GELU) {
        value = gelu_at(value, select(select(0u, TANH_FORM, GELU_TANH), QUICK_FORM, GELU_QUICK));
    }
    if (TANH) {
        value = tanh_at(value);
    }
    let at = (first_row + m) * params.y_stride + params.y_start + n;
    if ((params.flags & ACCUMULATE) != 0u) {
        value += y[at];
    }
    y[at] = value;
}
