// In place of `lanes` where each invocation works alone.

const LANES: u32 = 1u;

fn lanes_barrier() {}

fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    return value;
}
