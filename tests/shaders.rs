//! The list of linked shaders. `tests/web/shaders.test.mjs` compiles all of them with Tint, the browsers' compiler,
//! which refuses some shaders that naga accepts.

use tilewright::{Tier, shaders};

/// Half-precision kernels; `matmul` and `attention_prefill` replace them on other devices.
const HALF: [&str; 3] = ["attention_half", "half_rows", "matmul_half"];

#[test]
fn every_kernel_and_weight_type_has_a_baseline_variant() {
    for kernel in shaders::ALL.iter().filter(|kernel| !HALF.contains(&kernel.name)) {
        for variant in kernel.variants {
            let baseline = kernel.variant(variant.weight, Tier::Baseline);
            assert!(baseline.is_some_and(|b| b.tier == Tier::Baseline), "{}", variant.label);
        }
    }
}
