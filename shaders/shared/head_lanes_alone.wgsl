// In place of `head_lanes` where an invocation has a head for itself.

const LANES: u32 = 1u;

fn head_sum(local: u32, value: f32) -> f32 {
    return value;
}
