//! Limits for the compiled shaders, so that a regression shows without a GPU.

use std::collections::HashSet;
use std::process::ExitCode;

use tilewright::{Tier, WeightType};

use crate::cases::{self, Case, Machine};
use crate::compiler::{Compiled, Compiler, Gpu};
use crate::listing::{Counts, Listing};
use crate::ptx::{self, Pipes, Tools};
use crate::{linux, report};

/// Runs as a test and prints the result line that `scripts/test` counts.
pub fn main(arguments: &[String]) -> ExitCode {
    // Ignores flags meant for other tests, such as `--show-output`; a name filters out all others.
    let flags_with_value = ["--skip", "--format", "--test-threads", "--color"];
    let named = arguments.iter().enumerate().filter(|&(at, argument)| {
        !argument.starts_with('-')
            && at.checked_sub(1).is_none_or(|at| !flags_with_value.contains(&arguments[at].as_str()))
    });
    let names: Vec<&String> = named.map(|(_, argument)| argument).collect();
    let tests: [Test; 5] =
        [("listing", listing), ("pipes", pipes), ("navi21", navi21), ("navi31", navi31), ("nvidia", nvidia)];
    let [mut passed, mut failed, mut skipped, mut left_out] = [0; 4];
    for (name, test) in tests {
        if !names.is_empty() && !names.iter().any(|part| name.contains(part.as_str())) {
            left_out += 1;
            continue;
        }
        match test() {
            Ok(Ran::Passed) => {
                println!("test {name} ... ok");
                passed += 1;
            }
            Ok(Ran::Skipped(reason)) => {
                println!("test {name} ... ignored\nskipped: {reason}");
                skipped += 1;
            }
            Err(message) => {
                println!("test {name} ... FAILED\n{message}");
                failed += 1;
            }
        }
    }
    let verdict = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {verdict}. {passed} passed; {failed} failed; {skipped} ignored; 0 measured; {left_out} filtered out\n"
    );
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

type Test = (&'static str, fn() -> Result<Ran, String>);

enum Ran {
    Passed,
    Skipped(String),
}

fn navi21() -> Result<Ran, String> {
    match Gpu::navi21() {
        Ok(gpu) => check(&gpu),
        Err(reason) if std::env::var_os("REQUIRE_ADAPTER").is_some() => {
            Err(format!("REQUIRE_ADAPTER is set: {reason}"))
        }
        Err(reason) => Ok(Ran::Skipped(reason)),
    }
}

fn navi31() -> Result<Ran, String> {
    match Gpu::navi31() {
        Ok(gpu) => check(&gpu),
        Err(reason) => Ok(Ran::Skipped(reason)),
    }
}

/// Loops of `matvec` on NVIDIA's GPUs, where a conversion takes as long as several sums.
fn nvidia() -> Result<Ran, String> {
    let tools = match Tools::open() {
        Ok(tools) => tools,
        Err(reason) => return Ok(Ran::Skipped(reason)),
    };
    let is_full = std::env::var_os("TILEWRIGHT_FULL").is_some();
    let mut cases = cases::variants(&ptx::MACHINE);
    cases.retain(|case| {
        let is_matvec = case.kernel == "matvec" && case.tier == Tier::Subgroups && case.constant("NORM").is_none();
        is_matvec && case.has_bytes() && (is_full || case.is_sampled() && case.columns() == 1)
    });
    if cases.len() < 4 {
        return Err(format!("only {} cases", cases.len()));
    }
    // With conversions one must fail.
    let mut converting = cases::variants(&Machine { converts_slowly: false, ..ptx::MACHINE });
    converting.retain(|case| case.label == "matvec.Q4_0.t2 LANES=64 WG=128");
    let [(case, Ok(compiled))] = &ptx::compile_all(&tools, converting, "sm_90")[..] else {
        return Err("matvec with conversions was not compiled".into());
    };
    if !faults_on_nvidia(case, compiled).iter().any(|fault| fault.contains(" conversions")) {
        return Err(format!("no conversions found in {}: {compiled:?}", case.label));
    }
    let architectures = if is_full { &ptx::ARCHITECTURES[..] } else { &["sm_90"] };
    let mut faults = Vec::new();
    for architecture in architectures {
        for (case, compiled) in ptx::compile_all(&tools, cases.clone(), architecture) {
            let found = compiled.map_or_else(|error| vec![error], |compiled| faults_on_nvidia(&case, &compiled));
            faults.extend(found.into_iter().map(|fault| format!("{architecture}: {}: {fault}", case.label)));
        }
    }
    if faults.is_empty() { Ok(Ran::Passed) } else { Err(faults.join("\n")) }
}

fn faults_on_nvidia(case: &Case, compiled: &ptx::Compiled) -> Vec<String> {
    let (Some(hot), Some(products)) = (compiled.listing.hot(), case.products_per_round()) else {
        return vec!["no loop of products".into()];
    };
    let Pipes { fma, wide_loads, .. } = hot.counts;
    let mut faults = Vec::new();
    // Else this is another loop, or the translation lost something.
    if fma < products || wide_loads == 0 {
        faults.push(format!(
            "{fma} sums and products and {wide_loads} loads of 16 bytes in the loop of {products} products"
        ));
    }
    let converts = case.weight.map_or(0, conversions) * if case.columns() == 1 { 1 } else { 2 };
    let levels = case.weight.is_some_and(|weight| conversions(weight) > 32);
    for (what, found, limit) in [
        ("conversions", hot.counts.conversions, converts),
        ("instructions of the slow pipe", hot.counts.special, if levels { converts } else { 0 }),
        ("bytes of spilled registers", compiled.spilled_bytes, 0),
        ("bytes of local memory", compiled.stack_bytes, 0),
        ("accesses of local memory", compiled.listing.total.local, 0),
    ] {
        if found > limit {
            faults.push(format!("{found} {what}, expected at most {limit}"));
        }
    }
    faults
}

/// Conversions for 128 weights of four rows: those of scales, which are a few for each block. `half_value` has one, for
/// subnormal scales.
fn conversions(weight: WeightType) -> u32 {
    match weight.layout() {
        WeightType::F32 | WeightType::F16 | WeightType::BF16 | WeightType::MXFP4 => 0,
        WeightType::Q4_1 | WeightType::Q5_1 | WeightType::NVFP4 => 8,
        WeightType::Q3_K => 12,
        WeightType::Q4_K | WeightType::Q5_K => 16,
        WeightType::Q2_K => 24,
        // These still convert each weight, from a table or with its sign.
        WeightType::IQ4_NL | WeightType::IQ4_XS | WeightType::IQ3_S | WeightType::IQ2_S => 140,
        _ => 4,
    }
}

fn check(gpu: &Gpu) -> Result<Ran, String> {
    let machine = Compiler::new(gpu.clone()).about()?.machine;
    let is_full = std::env::var_os("TILEWRIGHT_FULL").is_some();
    let mut cases = cases::passes(&machine).map_err(|e| e.to_string())?;
    let n_of_passes = cases.len();
    cases.extend(cases::variants(&machine).into_iter().filter(|case| is_full || case.is_sampled()));
    // Many pipelines occur in several passes.
    let mut known = HashSet::new();
    cases.retain(|case| known.insert(case.label.clone()));
    if n_of_passes < 60 || cases.len() < 200 {
        return Err(format!("only {n_of_passes} pipelines of passes, and {} in all", cases.len()));
    }
    let outcomes = linux::compile_all(gpu, cases);
    let faults: Vec<String> = outcomes
        .iter()
        .flat_map(|(case, compiled)| {
            let faults = compiled.as_ref().map_or_else(|error| vec![error.clone()], |compiled| faults(case, compiled));
            faults.into_iter().map(|fault| format!("{}: {}: {fault}", gpu.family, case.label)).collect::<Vec<_>>()
        })
        .collect();
    if faults.is_empty() { Ok(Ran::Passed) } else { Err(faults.join("\n")) }
}

/// Faults of a compiled shader.
fn faults(case: &Case, compiled: &Compiled) -> Vec<String> {
    let mut faults = Vec::new();
    if compiled.isa.is_empty() {
        faults.push("the driver's answer has no instructions".into());
    }
    let mut at_most = |what: &str, found: f64, limit: f64| {
        if found > limit {
            faults.push(format!("{found:.2} {what}, expected at most {limit}"));
        }
    };
    let total = &compiled.listing.total;
    at_most("spilled registers", compiled.spills() as f64, 0.0);
    at_most("bytes of scratch", compiled.get("Scratch size") as f64, 0.0);
    at_most("accesses of scratch", total.scratch.into(), 0.0);
    at_most("registers by index", total.indirect.into(), 0.0);
    if let (Some(per_product), Some(weight)) = (report::per_product(case, compiled), case.weight) {
        at_most("instructions per product", per_product, instructions_per_product(weight, case));
    }
    if let (true, Some(feeding)) = (case.weight.is_some() && is_product(case), compiled.listing.feeding()) {
        // Tails of units are loaded word by word.
        at_most("loads of less than 16 bytes", feeding.counts.narrow_loads.into(), narrow_loads(case));
        if feeding.counts.wide_loads == 0 {
            faults.push("no loads of 16 bytes in the loop along K".into());
        }
    }
    if let ("attention_half", Some(hot)) = (case.kernel, compiled.listing.hot()) {
        let head_dim = case.constants.iter().find(|(name, _)| name == "HEAD_DIM").map_or(0.0, |&(_, dim)| dim);
        // 16 rows and 32 keys, for scores and for values; limit the loop's other work, including rescaling, per
        // element.
        let matrices = 4.0 * head_dim / 16.0;
        if f64::from(hot.counts.matrix) != matrices {
            faults.push(format!("{} products of matrices, expected {matrices}", hot.counts.matrix));
        }
        let most = if head_dim > 64.0 { 8.2 } else { 12.3 };
        let each = f64::from(hot.counts.all) / head_dim;
        if each > most {
            faults.push(format!("{each:.2} instructions per element of a head, expected at most {most}"));
        }
    }
    if let (true, "matmul_half", Some(hot)) = (case.has_matrices(), case.kernel, compiled.listing.hot()) {
        // Matrices load in pieces where `staged` is not 16-byte aligned.
        let each = f64::from(hot.counts.lds_bytes) / f64::from(hot.counts.lds.max(1));
        if each < 13.0 {
            faults.push(format!("{each:.1} bytes per access to workgroup memory, expected at least 13"));
        }
    }
    if compiled.waves() < waves(case) {
        faults.push(format!("{} waves, expected at least {}", compiled.waves(), waves(case)));
    }
    faults
}

/// Whether the kernel multiplies packed matrices.
fn is_product(case: &Case) -> bool {
    matches!(
        case.kernel,
        "matvec"
            | "gate_up"
            | "matmul"
            | "matmul_half"
            | "expert_gate_up"
            | "expert_down"
            | "expert_matmul"
            | "linear_norm"
    )
}

/// Waves that a SIMD must have room for: those of the current kernels, to detect the loss of a step.
fn waves(case: &Case) -> u64 {
    match case.kernel {
        "mol" => 4,
        "attention_half" if case.label.contains("HEAD_DIM=64 ") => 8,
        "attention_half" | "attention_prefill" => 6,
        // Sums and the operands of the next step.
        "matmul_half" => 6,
        "matvec" | "gate_up" | "matvec_lora" | "gate_up_lora" | "expert_gate_up" | "expert_down" => 8,
        "matmul" | "matmul_plain" | "route" => 8,
        // This probe fills registers with sums on purpose.
        "probe_matrix" => 8,
        // At most 512 workgroups of one wave, which reads eight values ahead.
        "attention_decode" => 8,
        "expert_tiles" => 14,
        "expert_matmul" | "linear_norm" | "advance" => 16,
        _ => 20,
    }
}

/// Instructions per product in the loop of a product with vectors: the worst variant's number plus 5 to 15 %. Two and
/// four columns may have as many as one column whose blocks cross the row's end.
fn instructions_per_product(weight: WeightType, case: &Case) -> f64 {
    /// Cost of checking for the row's end.
    const RAGGED: f64 = 0.6;
    let [of_one, of_eight] = match weight.layout() {
        WeightType::F32 => [3.1, 1.9],
        WeightType::F16 => [3.1, 2.0],
        WeightType::BF16 => [4.1, 2.1],
        WeightType::Q8_0 => [5.5, 2.7],
        WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q2_0 | WeightType::Q1_0 => [6.2, 2.7],
        WeightType::Q4_K => [6.9, 3.0],
        WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q2_K => [7.3, 3.3],
        WeightType::Q3_K | WeightType::Q5_K | WeightType::Q6_K => [7.8, 3.4],
        WeightType::MXFP4 | WeightType::NVFP4 => [11.0, 3.7],
        WeightType::IQ3_S | WeightType::IQ2_S => [13.2, 4.0],
        _ => [16.4, 4.4],
    };
    // Rounds of a part of a block.
    if case.columns() == 1 && case.constant("PARTS").is_some() {
        return match weight.layout() {
            WeightType::F32 => 3.4,
            WeightType::F16 => 3.6,
            _ => 4.7,
        };
    }
    match (case.columns(), case.constant("RAGGED")) {
        (8, _) => of_eight,
        (1, None) => of_one - RAGGED,
        _ => of_one,
    }
}

/// Loads of less than 16 bytes in the loop along K.
fn narrow_loads(case: &Case) -> f64 {
    match case.kernel {
        "linear_norm" => 20.0,
        "matmul" | "expert_matmul" => 16.0,
        // In wide tiles an invocation unpacks two rounds of w.
        "matmul_half" => 24.0,
        // Neighbours share a block: w is loaded word by word, x in quads.
        _ if case.columns() > 1 => 24.0,
        _ => 8.0,
    }
}

/// Parses a listing short enough to count by hand.
fn listing() -> Result<Ran, String> {
    let text = "\
BB0:
	s_load_dwordx4 s[0:3], s[2:3], null                         ; f4080001 fa000000
	v_mov_b32_e32 v0, 0                                         ; 7e000280
BB1:
	s_cbranch_scc0 BB9                                          ; bf840335
BB2:
	buffer_load_dwordx4 v[4:7], v1, s[0:3], 0 offen             ; e0381000 80000401
	buffer_load_dword v8, v1, s[0:3], 0 offen                   ; e0301000 80000801
	s_waitcnt vmcnt(0)                                          ; bf8c3f70
BB3:
	ds_read2_b64 v[8:11], v2 offset1:1                          ; d9dc0100 08000002
	v_dual_fmac_f32 v0, v4, v8 :: v_dual_mov_b32 v3, v9         ; c8100104 00020303
	v_fmac_f32_e32 v0, v5, v9                                   ; 56001305
	s_cbranch_scc0 BB3                                          ; bf84fffb
BB4:
	s_barrier                                                   ; bf8a0000
	s_branch BB1                                                ; bf82fff4
BB9:
	s_endpgm                                                    ; bf810000
";
    let listing = Listing::<Counts>::parse(text);
    let (Some(hot), Some(feeding)) = (listing.hot(), listing.feeding()) else {
        return Err("no loop".into());
    };
    let found = [
        ("loops", listing.loops.len() as u32, 2),
        ("instructions", listing.total.all, 12),
        ("instructions of the inner loop", hot.counts.all, 4),
        ("products and sums", hot.counts.math, 2),
        ("bytes of workgroup memory", hot.counts.lds_bytes, 16),
        ("instructions of the outer loop", feeding.counts.all, 9),
        ("loads of 16 bytes", feeding.counts.wide_loads, 1),
        ("loads of fewer", feeding.counts.narrow_loads, 1),
        ("bytes loaded", feeding.counts.load_bytes, 20),
        ("barriers", feeding.counts.barriers, 1),
    ];
    let wrong: Vec<String> = found
        .iter()
        .filter(|(_, found, expected)| found != expected)
        .map(|(what, found, expected)| format!("{what}: {found}, expected {expected}"))
        .collect();
    if wrong.is_empty() { Ok(Ran::Passed) } else { Err(wrong.join("\n")) }
}

/// The same of NVIDIA's instructions.
fn pipes() -> Result<Ran, String> {
    let text = "\
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   I2F.U8 R9, R4.B1 ;
        /*0050*/                   I2FP.F32.U32 R10, R5 ;
        /*0060*/                   FFMA.FTZ R11, R9, R10, R11 ;
        /*0070*/                   HADD2.F32 R12, -RZ, R8.H0_H0 ;
        /*0080*/                   LOP3.LUT R13, R4, 0xff, RZ, 0xc0, !PT ;
        /*0090*/              @!P1 BRA `(.L_x_0) ;
.L_x_1:
        /*00a0*/                   STL [R1], R11 ;
        /*00b0*/                   EXIT ;
.L_x_2:
        /*00c0*/                   BRA `(.L_x_2);
        /*00d0*/                   NOP;
";
    let listing = Listing::<Pipes>::parse(text);
    let hot = listing.hot().ok_or("no loop")?.counts;
    let expected = Pipes {
        all: 8,
        conversions: 2,
        special: 1,
        integer: 2,
        fma: 1,
        half: 1,
        memory: 2,
        control: 1,
        wide_loads: 1,
        narrow_loads: 1,
        ..Pipes::default()
    };
    if (listing.loops.len(), listing.total.local, hot) != (1, 1, expected) {
        return Err(format!("{listing:?}, expected one loop of {expected:?}"));
    }
    Ok(Ran::Passed)
}
