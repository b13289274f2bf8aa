// In place of `lanes` where each invocation works alone, and goes on with all columns.

const LANES: u32 = 1u;
override COLUMNS: u32 = 1u; // 1, 2, 4 or 8
const SHARES: u32 = 1u;
override KEPT: u32 = COLUMNS;

fn lanes_barrier() {}

fn lanes_column(local: u32) -> u32 {
    return 0u;
}

fn lanes_sum(local: u32, value: vec4<f32>) -> vec4<f32> {
    return value;
}

fn lanes_deal(local: u32, sums: array<vec4<f32>, 8>) -> array<vec4<f32>, 8> {
    return sums;
}

fn lanes_deal_numbers(local: u32, numbers: array<f32, 8>) -> array<f32, 8> {
    return numbers;
}
