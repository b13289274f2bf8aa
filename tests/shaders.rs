//! The list of linked shaders. That Tint, which browsers use and which refuses some of what naga accepts, takes all of them is
//! tested in Chromium and in Node, by `tests/web/shaders.test.mjs`.

use tilewright::{Tier, shaders};

/// What is in half precision; where it cannot run, `matmul` and `attention_prefill` do.
const HALF: [&str; 3] = ["attention_half", "half_rows", "matmul_half"];

#[test]
fn every_kernel_has_a_baseline_variant_for_each_weight_type_it_knows() {
    for kernel in shaders::ALL.iter().filter(|kernel| !HALF.contains(&kernel.name)) {
        for variant in kernel.variants {
            let baseline = kernel.variant(variant.weight, Tier::Baseline);
            assert!(baseline.is_some_and(|b| b.tier == Tier::Baseline), "{}", variant.label);
        }
    }
}
