//! The list of linked shaders. That Tint, which browsers use and which refuses some of what naga accepts, takes all of them is
//! tested in Chromium and in Node, by `tests/web/shaders.test.mjs`.

use tilewright::{Tier, shaders};

#[test]
fn every_kernel_has_a_baseline_variant_for_each_weight_type_it_knows() {
    for kernel in shaders::ALL {
        for variant in kernel.variants {
            let baseline = kernel.variant(variant.weight, Tier::Baseline);
            assert!(baseline.is_some_and(|b| b.tier == Tier::Baseline), "{}", variant.label);
        }
    }
}
