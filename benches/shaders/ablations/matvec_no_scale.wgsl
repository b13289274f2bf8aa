// `matvec` whose scales are all one and are not read.
#ablate matvec Q4_0
#replace unit_scale

fn unit_scale(unit: u32) -> f32 {
    return 1.0;
}
