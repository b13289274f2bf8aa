// The gated linear unit, `act(gate) * up` (Shazeer 2020, arXiv:2002.05202).
#import silu
#import gelu

// What `act` is; SiLU where it is none of these.
override GELU: bool = false;
override GELU_TANH: bool = false;
override GELU_QUICK: bool = false;
override CLAMPED: bool = false; // SiLU of gpt-oss: both sides within limits, a steeper sigmoid, and one more `act(gate)`

const CLAMPED_LIMIT: f32 = 7.0;
const CLAMPED_SLOPE: f32 = 1.702;

fn gated(gate: f32, up: f32) -> f32 {
    if (CLAMPED) {
        let z = min(gate, CLAMPED_LIMIT);
        return silu_at(CLAMPED_SLOPE * z) / CLAMPED_SLOPE * (clamp(up, -CLAMPED_LIMIT, CLAMPED_LIMIT) + 1.0);
    }
    if (GELU) {
        return gelu_at(gate, select(select(0u, TANH_FORM, GELU_TANH), QUICK_FORM, GELU_QUICK)) * up;
    }
    return silu_at(gate) * up;
}
