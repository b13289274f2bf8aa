// In place of `lanes` where each invocation works alone, for one token.

const LANES: u32 = 1u;
const COLUMNS: u32 = 1u;
const SHARES: u32 = 1u;

fn lanes_barrier() {}

fn lanes_column(local: u32) -> u32 {
    return 0u;
}

fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    return value;
}

fn lanes_deal(local: u32, sums: array<vec4<f32>, 8>) -> vec4<f32> {
    return sums[0];
}

fn lanes_deal_numbers(local: u32, numbers: array<f32, 8>) -> f32 {
    return numbers[0];
}

// Each has read all of x.
fn workgroup_sum(local: u32, value: f32) -> f32 {
    return value;
}
