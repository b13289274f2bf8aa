//! Every linked shader against the second compiler: Tint, which browsers use, refuses some of what naga accepts.

use std::path::PathBuf;
use std::process::Command;

use tilewright::{Tier, shaders};

#[test]
fn tint_accepts_every_variant() {
    if Command::new("tint").arg("--help").output().is_err() {
        println!("skipped: no tint on the PATH");
        return;
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("tint");
    std::fs::create_dir_all(&folder).unwrap();
    let mut n_accepted = 0;
    let is_for_browsers = |variant: &&shaders::Variant| variant.tier.matrix_size().is_none();
    for variant in shaders::ALL.iter().flat_map(|kernel| kernel.variants).filter(is_for_browsers) {
        let path = folder.join(format!("{}.wgsl", variant.label));
        std::fs::write(&path, &*variant.browser_source()).unwrap();
        let output = Command::new("tint").args(["--format", "wgsl"]).arg(&path).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}:\n{}", variant.label, String::from_utf8_lossy(&output.stderr));
        n_accepted += 1;
    }
    println!("tint accepts {n_accepted} variants of {} kernels", shaders::ALL.len());
}

#[test]
fn every_kernel_has_a_baseline_variant_for_each_weight_type_it_knows() {
    for kernel in shaders::ALL {
        for variant in kernel.variants {
            let baseline = kernel.variant(variant.weight, Tier::Baseline);
            assert!(baseline.is_some_and(|b| b.tier == Tier::Baseline), "{}", variant.label);
        }
    }
}
