//! Operands with invalid shapes: each error names the kernel and the operand.

use tilewright::kernels::microbench::{
    FmaRounds, ReadOrder, matmul_naive, mol_gate, probe_copy, probe_fma, probe_matrix, probe_read, probe_reduce,
    weighted_sum,
};
use tilewright::kernels::{
    self, AttentionConfig, CachedKeys, Combination, Decay, DeltaRule, Embedding, Gate, Gelu, Heads, KvType, LayerNorm,
    Linear, MolActivation, MolForm, MolGate, MolGateWeights, MolOperands, MolScores, N_STATES, Norm, Pairing, Pooling,
    QkNorm, RopeConfig, RopeStyle, StepState, TopStrip,
};
use tilewright::{DType, Device, Error, Matrix, Recorder, Role, Tensor, Tier, WeightType, Workspace};

use crate::common::shared;

/// Name, a valid shape, an invalid one, and the operand named by the error: some kernels accept any shape of the first
/// operand and check the others against it.
type Operand = (&'static str, &'static [u32], &'static [u32], &'static str);

/// Element type of an operand, by its name.
fn element_type(name: &str) -> DType {
    const WORDS: [&str; 12] = [
        "ids",
        "tokens",
        "sampling",
        "biases",
        "spans",
        "query_spans",
        "document_spans",
        "allowed",
        "lists",
        "best",
        "k",
        "v",
    ];
    if WORDS.contains(&name) { DType::U32 } else { DType::F32 }
}

/// Two tensors as a layer's F32 cache.
fn cached(k: &Tensor, v: &Tensor) -> CachedKeys {
    CachedKeys { k: k.clone(), v: Some(v.clone()), kind: KvType::F32, capacity: 9 }
}

fn check(
    kernel: &str,
    operands: &[Operand],
    record: impl Fn(&mut Recorder, &StepState, &[Tensor]) -> Result<(), Error>,
) {
    let device = Device::cpu();
    let run = |bad: Option<usize>, other_type: Option<usize>| {
        let declare = |(i, operand): (usize, &Operand)| {
            let shape = if bad == Some(i) { operand.2 } else { operand.1 };
            let dtype = match (element_type(operand.0), other_type == Some(i)) {
                (DType::F32, false) | (DType::U32, true) => DType::F32,
                (DType::U32, false) | (DType::F32 | DType::F16, true) => DType::U32,
                (DType::F16, false) => DType::F16,
            };
            Tensor::declare(operand.0, Role::Activations, shape, dtype).expect("the shape is valid")
        };
        let tensors: Vec<Tensor> = operands.iter().enumerate().map(declare).collect();
        let state = StepState::declare().expect("the state is declared");
        record(&mut device.recorder(), &state, &tensors)
    };
    run(None, None).unwrap_or_else(|e| panic!("{kernel}: the fitting shapes are refused: {e}"));
    for (i, &(name, good, bad, named)) in operands.iter().enumerate() {
        match run(None, Some(i)) {
            Err(Error::Operand { operand, .. }) => assert_eq!(operand, name, "{kernel}: element type of `{name}`"),
            other => panic!("{kernel}: `{name}` of the other element type gives {other:?}"),
        }
        if good == bad {
            continue; // any shape is valid
        }
        let (found_kernel, found) = match run(Some(i), None) {
            Err(Error::Shape { kernel, operand, .. } | Error::Operand { kernel, operand, .. }) => (kernel, operand),
            other => panic!("{kernel}: `{name}` of shape {bad:?} gives {other:?}"),
        };
        assert_eq!((found_kernel, found), (kernel, named), "`{name}` of shape {bad:?}");
    }
}

#[test]
fn probe_read_refuses_wrong_shapes() {
    let device = Device::cpu();
    let words = |n: u32| Tensor::declare("words", Role::Activations, &[n], DType::U32).expect("the shape is valid");
    let record = |n_in, n_out, order| {
        probe_read(&mut device.recorder(), &words(n_in), &words(n_out), order).map_err(|e| match e {
            Error::Shape { operand, .. } | Error::Operand { operand, .. } => operand,
            other => panic!("{other}"),
        })
    };
    assert_eq!(record(64, 4, ReadOrder::Strided(64)), Ok(()));
    assert_eq!(record(64, 8, ReadOrder::Scattered), Err("x"));
    assert_eq!(record(48, 3, ReadOrder::Scattered), Err("y"));
    for stride in [0, 3, 128] {
        assert_eq!(record(64, 4, ReadOrder::Strided(stride)), Err("order"), "{stride}");
    }
}

#[test]
fn probe_kernels_refuse_wrong_shapes() {
    let reduce: [Operand; 2] = [("x", &[3, 8], &[3, 6], "x"), ("y", &[3], &[4], "y")];
    check("probe_reduce", &reduce, |rec, _, t| probe_reduce(rec, &t[0], &t[1]));
    let fma: [Operand; 1] = [("y", &[3], &[1, 3], "y")];
    let rounds = |rounds| FmaRounds { rounds, factor: 1.0, step: 1.0 };
    check("probe_fma", &fma, |rec, _, t| probe_fma(rec, rounds(4), &t[0]));
    let matrix: [Operand; 2] = [("x", &[6, 8, 8], &[6, 4, 16], "x"), ("y", &[4, 2, 4, 8, 8], &[3, 2, 4, 8, 8], "y")];
    check("probe_matrix", &matrix, |rec, _, t| probe_matrix(rec, &t[0], &t[1], 1));

    let device = Device::cpu();
    let declare = |shape: &[u32], dtype| Tensor::declare("t", Role::Activations, shape, dtype).expect("a valid tensor");
    let copy = |x: &[u32], y: &[u32]| {
        let [x, y] = [x, y].map(|shape| declare(shape, DType::U32));
        probe_copy(&mut device.recorder(), &x, &y).map_err(|e| match e {
            Error::Shape { operand, .. } | Error::Operand { operand, .. } => operand,
            other => panic!("{other}"),
        })
    };
    assert_eq!(copy(&[8], &[8]), Ok(()));
    assert_eq!(copy(&[2, 4], &[2, 4]), Err("x"));
    assert_eq!(copy(&[6], &[6]), Err("x"));
    assert_eq!(copy(&[8], &[12]), Err("y"));
    let y = declare(&[3], DType::F32);
    for bad in [3, (1 << 16) + 4] {
        let refused = probe_fma(&mut device.recorder(), rounds(bad), &y);
        assert!(matches!(refused, Err(Error::Operand { operand: "rounds", .. })), "{bad}: {refused:?}");
    }
}

#[test]
fn elementwise_kernels_refuse_wrong_shapes() {
    let swiglu: [Operand; 2] = [("gate_up", &[2, 6], &[2, 5], "gate_up"), ("y", &[2, 3], &[6], "y")];
    check("swiglu", &swiglu, |rec, _, t| kernels::swiglu(rec, &t[0], &t[1]));
    check("geglu", &swiglu, |rec, _, t| kernels::geglu(rec, &t[0], &t[1], Gelu::Exact));
    let both: [Operand; 2] = [("x", &[2, 3], &[2, 4], "y"), ("y", &[2, 3], &[3, 2], "y")];
    check("gelu", &both, |rec, _, t| kernels::gelu(rec, &t[0], &t[1], Gelu::Tanh));
    check("silu", &both, |rec, _, t| kernels::silu(rec, &t[0], &t[1]));
    check("add", &both, |rec, _, t| kernels::add(rec, &t[0], &t[1]));
    check("scale", &both, |rec, _, t| kernels::scale(rec, &t[0], &t[1], 2.0));
    check("scale", &both, |rec, _, t| kernels::soft_cap(rec, &t[0], &t[1], 2.0, 30.0));
}

#[test]
fn row_kernels_refuse_wrong_shapes() {
    let rms_norm: [Operand; 3] =
        [("x", &[2, 5], &[10], "x"), ("weight", &[5], &[6], "weight"), ("y", &[2, 5], &[2, 6], "y")];
    check("rms_norm", &rms_norm, |rec, _, t| kernels::rms_norm(rec, &t[0], &t[1], &t[2], 1e-5));
    let layer_norm: [Operand; 4] = [
        ("x", &[2, 5], &[10], "x"),
        ("weight", &[5], &[1, 5], "weight"),
        ("bias", &[5], &[4], "bias"),
        ("y", &[2, 5], &[3, 5], "y"),
    ];
    check("layer_norm", &layer_norm, |rec, _, t| {
        kernels::layer_norm(rec, &t[0], &LayerNorm { weight: &t[1], bias: Some(&t[2]), eps: 1e-5 }, &t[3])
    });
    let w = Matrix::declare(&Device::cpu().target(), "w", WeightType::F32, 5, 4).expect("the matrix is valid");
    let linear_norm: [Operand; 5] = [
        ("bias", &[5], &[6], "bias"),
        ("x", &[2, 4], &[2, 5], "x"),
        ("weight", &[5], &[4], "weight"),
        ("shift", &[5], &[1, 5], "shift"),
        ("y", &[2, 5], &[2, 6], "bias"),
    ];
    check("linear_norm", &linear_norm, |rec, _, t| {
        let linear = Linear { bias: Some(&t[0]), accumulate: true, ..Linear::new(&w) };
        kernels::linear_norm(rec, &linear, &LayerNorm { weight: &t[2], bias: Some(&t[3]), eps: 1e-5 }, &t[1], &t[4])
    });
    let softmax: [Operand; 2] = [("x", &[2, 5], &[2, 5, 1], "x"), ("y", &[2, 5], &[5, 2], "y")];
    check("softmax", &softmax, |rec, _, t| kernels::softmax(rec, &t[0], &t[1]));
    let argmax: [Operand; 2] = [("x", &[2, 5], &[10], "x"), ("ids", &[2], &[3], "ids")];
    check("argmax", &argmax, |rec, _, t| kernels::argmax(rec, &t[0], &t[1]));
    let by_head: [Operand; 2] = [("x", &[5, 6], &[5, 8], "x"), ("y", &[2, 5, 3], &[5, 6], "y")];
    check("by_head", &by_head, |rec, _, t| kernels::by_head(rec, &t[0], &t[1]));
    let pool: [Operand; 3] =
        [("spans", &[2, 2], &[2, 3], "spans"), ("x", &[9, 5], &[9, 6], "y"), ("y", &[2, 5], &[10], "y")];
    check("pool", &pool, |rec, _, t| kernels::pool(rec, Pooling::Mean, true, &t[0], &t[1], &t[2]));
    let max_sim: [Operand; 4] = [
        ("query_spans", &[2, 2], &[3, 2], "query_spans"),
        ("document_spans", &[4, 2], &[4, 3], "document_spans"),
        ("x", &[9, 5], &[45], "x"),
        ("scores", &[2, 5], &[2, 4], "first"),
    ];
    check("max_sim", &max_sim, |rec, _, t| kernels::max_sim(rec, &t[0], &t[1], &t[2], 1, &t[3]));
    let last_row: [Operand; 2] = [("x", &[3, 5], &[15], "x"), ("y", &[1, 5], &[5], "y")];
    check("last_row", &last_row, |rec, state, t| kernels::last_row(rec, state, &t[0], &t[1]));
}

#[test]
fn top_k_kernels_refuse_wrong_shapes() {
    // Ids 40 to 69 need three words.
    let select_top: [Operand; 3] = [
        ("scores", &[2, 30], &[60], "scores"),
        ("allowed", &[3], &[2], "allowed"),
        ("lists", &[2, 4, 5, 2], &[3, 4, 5, 2], "lists"),
    ];
    fn strip(allowed: Option<&Tensor>, first_id: u32) -> TopStrip<'_> {
        TopStrip { first_id, begins: true, allowed }
    }
    check("select_top", &select_top, |rec, _, t| kernels::select_top(rec, &t[0], &strip(Some(&t[1]), 40), &t[2]));
    let merge_top: [Operand; 2] =
        [("lists", &[2, 4, 5, 2], &[2, 4, 5], "lists"), ("best", &[2, 5, 2], &[2, 4, 2], "best")];
    check("merge_top", &merge_top, |rec, _, t| kernels::merge_top(rec, &t[0], &t[1]));
    let declare = |shape: &[u32], dtype| Tensor::declare("t", Role::Activations, shape, dtype).expect("valid");
    for (n_cols, lists, first_id, named) in [
        (30, [1, 1, 1025, 2], 0, "lists"),
        (30, [1, 129, 1, 2], 0, "lists"),
        (30, [1, 1, 5, 3], 0, "lists"),
        ((2 << 16) + 1, [1, 2, 5, 2], 0, "scores"),
        (30, [1, 1, 5, 2], u32::MAX - 29, "first_id"),
    ] {
        let (scores, lists) = (declare(&[1, n_cols], DType::F32), declare(&lists, DType::U32));
        let error = kernels::select_top(&mut Device::cpu().recorder(), &scores, &strip(None, first_id), &lists)
            .expect_err("out of range");
        assert!(matches!(error, Error::Operand { kernel: "select_top", operand, .. } if operand == named), "{error}");
    }
    for (n_rows, n_cols) in [(1, 1), (1, 1 << 20), (32, 1 << 16), (1, 1 << 23), (200, 1 << 23)] {
        let n_splits = kernels::top_splits(n_rows, n_cols);
        let (scores, lists) = (declare(&[n_rows, n_cols], DType::F32), declare(&[n_rows, n_splits, 3, 2], DType::U32));
        kernels::select_top(&mut Device::cpu().recorder(), &scores, &strip(None, 0), &lists).expect("the shape fits");
    }
}

#[test]
fn linear_kernels_refuse_wrong_shapes() {
    let device = Device::cpu();
    for weight in WeightType::ALL {
        let w = Matrix::declare(&device.target(), "w", weight, 6, 64).expect("the matrix is valid");
        let operands: [Operand; 3] =
            [("bias", &[6], &[7], "bias"), ("x", &[2, 64], &[2, 68], "x"), ("y", &[2, 6], &[2, 5], "y")];
        let linear = |t: &[Tensor],
                      record: fn(&mut Recorder, &Linear, &Tensor, &Tensor) -> Result<(), Error>,
                      rec: &mut Recorder| {
            record(rec, &Linear { bias: Some(&t[0]), ..Linear::new(&w) }, &t[1], &t[2])
        };
        check("matvec", &operands, |rec, _, t| linear(t, kernels::matvec, rec));
        check("matmul", &operands, |rec, _, t| linear(t, kernels::matmul, rec));
        check("matmul_naive", &operands, |rec, _, t| linear(t, matmul_naive, rec));
        let ragged: [Operand; 3] =
            [("bias", &[6], &[6], ""), ("x", &[2, 64], &[2, 63], "x"), ("y", &[2, 6], &[12], "y")];
        check("matvec", &ragged, |rec, _, t| linear(t, kernels::matvec, rec));
        let embed: [Operand; 3] = [
            ("tokens", &[4], &[4], ""),
            ("positions", &[9, 64], &[9, 63], "positions"),
            ("y", &[2, 64], &[2, 65], "y"),
        ];
        let embed_sum: [Operand; 4] = [
            ("tokens", &[2, 3], &[2, 2], "tokens"),
            ("positions", &[9, 64], &[9, 63], "positions"),
            ("types", &[2, 64], &[128], "types"),
            ("y", &[2, 64], &[2, 65], "y"),
        ];
        check("embed_sum", &embed_sum, |rec, _, t| kernels::embed_sum(rec, &t[0], &w, Some(&t[1]), Some(&t[2]), &t[3]));
        check("embed", &embed, |rec, state, t| {
            kernels::embed(rec, state, &t[0], &Embedding { w: &w, factor: 1.0, positions: Some(&t[1]) }, &t[2])
        });
    }
    let plain: [Operand; 3] = [("x", &[2, 3], &[6], "x"), ("b", &[3, 4], &[4, 4], "b"), ("y", &[2, 4], &[4, 2], "y")];
    check("matmul_plain", &plain, |rec, _, t| kernels::matmul_plain(rec, &t[0], &t[1], &t[2]));
    let splits: [Operand; 3] =
        [("parts", &[6, 3], &[5, 3], "parts"), ("bias", &[5], &[3], "bias"), ("y", &[2, 5], &[2, 4], "y")];
    check("split_sum", &splits, |rec, _, t| kernels::split_sum(rec, &t[0], Some(&t[1]), None, 2, false, &t[2]));
}

#[test]
fn matrix_refuses_wrong_shapes_and_parts() {
    let device = Device::cpu();
    for [rows, cols] in [[0, 4], [4, 0]] {
        let error = Matrix::declare(&device.target(), "w", WeightType::Q4_0, rows, cols).expect_err("nothing to hold");
        assert!(matches!(error, Error::Operand { kernel: "matrix", operand: "shape", .. }), "{error}");
    }
    let matrix = Matrix::declare(&device.target(), "w", WeightType::F16, 3, 5).expect("the matrix is valid");
    for parts in [&[&[0u8; 20][..]][..], &[&[0; 30], &[0; 10]], &[&[0; 29]], &[]] {
        let error = matrix.upload(&device, parts).expect_err("not three rows");
        assert!(matches!(error, Error::Operand { kernel: "matrix", operand: "parts", .. }), "{error}");
    }
    matrix.upload(&device, &[&[0; 20], &[0; 10]]).expect("two parts of whole rows");
}

#[test]
fn attention_kernels_refuse_wrong_shapes() {
    let config = AttentionConfig {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 8,
        window: None,
        scale: 1.0,
        soft_cap: None,
        values_from: None,
        causal: true,
        whole_pass: false,
    };
    let operands: [Operand; 4] = [
        ("q", &[3, 32], &[3, 24], "q"),
        ("k", &[2, 9, 8], &[1, 9, 8], "k"),
        ("v", &[2, 9, 8], &[2, 8, 8], "v"),
        ("y", &[3, 32], &[2, 32], "y"),
    ];
    let run = |config: AttentionConfig| {
        move |rec: &mut Recorder, state: &StepState, t: &[Tensor]| {
            kernels::attention(rec, state, &config, None, &t[0], &cached(&t[1], &t[2]), &t[3])
        }
    };
    check("attention", &operands, run(config));
    let flat: [Operand; 4] = [
        ("q", &[3, 32], &[96], "q"),
        ("k", &[2, 9, 8], &[18, 8], "k"),
        ("v", &[2, 9, 8], &[144], "v"),
        ("y", &[3, 32], &[96], "y"),
    ];
    check("attention", &flat, run(config));
    for (broken, named) in [
        (AttentionConfig { head_dim: 6, ..config }, "head_dim"),
        (AttentionConfig { head_dim: 0, ..config }, "head_dim"),
        (AttentionConfig { head_dim: 580, ..config }, "head_dim"),
        (AttentionConfig { n_kv_heads: 3, ..config }, "n_kv_heads"),
        (AttentionConfig { n_kv_heads: 0, ..config }, "n_kv_heads"),
        (AttentionConfig { soft_cap: Some(0.0), ..config }, "soft_cap"),
        (AttentionConfig { soft_cap: Some(f32::NAN), ..config }, "soft_cap"),
    ] {
        let device = Device::cpu();
        let shapes: Vec<Tensor> = operands
            .iter()
            .map(|o| Tensor::declare(o.0, Role::Activations, o.1, element_type(o.0)).expect("valid"))
            .collect();
        let state = StepState::declare().expect("the state is declared");
        let error = run(broken)(&mut device.recorder(), &state, &shapes).expect_err("out of range");
        assert!(matches!(error, Error::Operand { kernel: "attention", operand, .. } if operand == named), "{error}");
    }
}

#[test]
fn attention_from_projection_refuses_wrong_shapes() {
    let config = AttentionConfig {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 8,
        window: None,
        scale: 1.0,
        soft_cap: None,
        values_from: None,
        causal: true,
        whole_pass: false,
    };
    let rope = RopeConfig::new(6, 1e4, RopeStyle::Halves);
    let operands: [Operand; 7] = [
        ("table", &[9, 3, 2], &[9, 4, 2], "table"),
        ("weight", &[16], &[12], "weight"),
        ("qkv", &[1, 64], &[2, 64], "qkv"),
        ("sinks", &[4], &[2], "sinks"),
        ("k", &[2, 9, 8], &[2, 9, 4], "k"),
        ("v", &[2, 9, 8], &[2, 8, 8], "v"),
        ("y", &[1, 32], &[2, 32], "y"),
    ];
    let heads = Heads {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 8,
        keys_hold_values: false,
        first_column: 0,
        rope: None,
        norm: None,
    };
    let run = |heads: Heads<'_>, rec: &mut Recorder, state: &StepState, t: &[Tensor]| {
        let (rope, norm) = (Some((&rope, &t[0])), Some((QkNorm::Heads, &t[1], 1e-5)));
        let heads = Heads { rope, norm, ..heads };
        kernels::attention_next(rec, state, &config, &heads, Some(&t[3]), &t[2], &cached(&t[4], &t[5]), &t[6])
    };
    check("attention", &operands, |rec, state, t| run(heads, rec, state, t));
    for broken in [Heads { n_heads: 2, ..heads }, Heads { first_column: 2, ..heads }] {
        let declare = |o: &Operand| Tensor::declare(o.0, Role::Activations, o.1, element_type(o.0)).expect("valid");
        let tensors: Vec<Tensor> = operands.iter().map(declare).collect();
        let state = StepState::declare().expect("the state is declared");
        let error = run(broken, &mut Device::cpu().recorder(), &state, &tensors).expect_err("other heads");
        assert!(matches!(error, Error::Operand { kernel: "attention", operand: "heads", .. }), "{error}");
    }
}

#[test]
fn rope_kernels_refuse_wrong_shapes() {
    let config = |rot_dims| RopeConfig::new(rot_dims, 1e4, RopeStyle::Halves);
    let rope: [Operand; 3] = [
        ("table", &[9, 3, 2], &[9, 4, 2], "table"),
        ("x", &[2, 4, 8], &[2, 32], "x"),
        ("y", &[2, 4, 8], &[2, 8, 4], "y"),
    ];
    check("rope", &rope, |rec, state, t| kernels::rope(rec, state, &config(6), &t[0], &t[1], &t[2]));
    let rope_kv: [Operand; 5] = [
        ("table", &[9, 3, 2], &[9, 3], "table"),
        ("qkv", &[2, 64], &[2, 56], "qkv"),
        ("q", &[2, 32], &[2, 30], "q"),
        ("k", &[2, 9, 8], &[2, 72], "k"),
        ("v", &[2, 9, 8], &[2, 8, 9], "v"),
    ];
    let heads = Heads {
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 8,
        keys_hold_values: false,
        first_column: 0,
        rope: None,
        norm: None,
    };
    check("rope_kv", &rope_kv, |rec, state, t| {
        let rope = config(6);
        kernels::rope_kv(
            rec,
            state,
            &Heads { rope: Some((&rope, &t[0])), ..heads },
            &t[1],
            &t[2],
            &cached(&t[3], &t[4]),
        )
    });
    let whole: [Operand; 5] = [
        ("weight", &[48], &[16], "weight"),
        ("qkv", &[2, 64], &[2, 56], "qkv"),
        ("q", &[2, 32], &[2, 30], "q"),
        ("k", &[2, 9, 8], &[2, 72], "k"),
        ("v", &[2, 9, 8], &[2, 8, 9], "v"),
    ];
    check("rope_kv", &whole, |rec, state, t| {
        let norm = Some((QkNorm::Whole, &t[0], 1e-5));
        kernels::rope_kv(rec, state, &Heads { norm, ..heads }, &t[1], &t[2], &cached(&t[3], &t[4]))
    });
    let packed: [Operand; 3] = [
        ("weight", &[16], &[12], "weight"),
        ("tokens", &[2, 3], &[2, 2], "tokens"),
        ("qkv", &[2, 64], &[2, 56], "qkv"),
    ];
    for norm in [QkNorm::Heads, QkNorm::RotatedHeads, QkNorm::HeadsAndValues] {
        check("rope_packed", &packed, |rec, _, t| {
            kernels::rope_packed(rec, &Heads { norm: Some((norm, &t[0], 1e-5)), ..heads }, &t[1], &t[2])
        });
    }
    for rot_dims in [0, 3, 10] {
        let tensors: Vec<Tensor> =
            rope.iter().map(|o| Tensor::declare(o.0, Role::Activations, o.1, DType::F32).expect("valid")).collect();
        let state = StepState::declare().expect("the state is declared");
        let mut rec = Device::cpu().recorder();
        let error = kernels::rope(&mut rec, &state, &config(rot_dims), &tensors[0], &tensors[1], &tensors[2])
            .expect_err("out of range");
        assert!(matches!(error, Error::Operand { kernel: "rope", operand: "rot_dims", .. }), "{error}");
    }
}

/// llvmpipe would leave the loop over such rows early and return a partial result.
#[test]
fn rows_too_long_for_an_invocation_are_refused() {
    let Some(device) = shared::gpu(Some(Tier::Scalar)) else { return };
    let long = 1 << 18;
    let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32).expect("valid");
    let (x, b, y) = (declare(&[8, long]), declare(&[long, 2]), declare(&[8, 2]));
    let w = Matrix::declare(&device.target(), "w", WeightType::Q4_0, 2, long).expect("the matrix is valid");
    let mut rec = device.recorder();
    for error in [kernels::matmul(&mut rec, &Linear::new(&w), &x, &y), kernels::matmul_plain(&mut rec, &x, &b, &y)] {
        let error = error.expect_err("too long");
        assert!(matches!(error, Error::Operand { operand: "x", .. }), "{error}");
    }
}

/// Operating systems and browsers treat a dispatch of over 100 ms as a hanging GPU.
#[test]
fn long_matmul_is_split_into_several_dispatches() {
    let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32).expect("valid");
    for device in shared::executors() {
        let (x, y) = (declare(&[128, 1024]), declare(&[128, 2816]));
        let w = Matrix::declare(&device.target(), "w", WeightType::Q4_0, 2816, 1024).expect("the matrix is valid");
        let mut rec = device.recorder();
        kernels::matmul(&mut rec, &Linear::new(&w), &x, &y).expect("recording succeeds");
        let recorded = rec.finish(&mut Workspace::default()).n_dispatches();
        let operations = 2 * 128 * 1024 * 2816_u64;
        let fewest = operations.div_ceil(device.target().max_dispatch_operations());
        // In 44 whole columns of workgroups.
        assert_eq!(recorded as u64, 44_u64.div_ceil(44 / fewest), "{}", device.info().name);
    }
}

#[test]
fn matmul_is_split_along_k_as_requested() {
    let Some(device) = shared::gpu(Some(Tier::Baseline)) else { return };
    let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32).expect("valid");
    let x = declare(&[8, 4096]);
    let w = Matrix::declare(&device.target(), "w", WeightType::Q4_0, 64, 4096).expect("the matrix is valid");
    let record = |splits, y: &Tensor| {
        let mut rec = device.recorder();
        kernels::matmul(&mut rec, &Linear { splits, ..Linear::new(&w) }, &x, y)?;
        Ok::<_, Error>(rec.finish(&mut Workspace::default()).n_dispatches())
    };
    // A single tile, so a device that splits automatically does so here.
    let usual = if device.limits().max_splits > 1 { 2 } else { 1 };
    for (splits, n_dispatches) in [(None, usual), (Some(0), 1), (Some(1), 1), (Some(2), 2), (Some(u32::MAX), 2)] {
        let recorded = record(splits, &declare(&[8, 64])).expect("recording succeeds");
        assert_eq!(recorded, n_dispatches, "{splits:?}");
    }
    let error = record(Some(2), &declare(&[16, 64])).expect_err("`y` has twice the rows");
    assert!(matches!(error, Error::Shape { kernel: "matmul", operand: "y", .. }), "{error}");
}

#[test]
fn fused_kernels_refuse_wrong_shapes() {
    let device = Device::cpu();
    let w = Matrix::declare(&device.target(), "w", WeightType::Q8_0, 6, 64).expect("the matrix is valid");
    let gate_up: [Operand; 3] =
        [("norm", &[64], &[6], "norm"), ("x", &[2, 64], &[2, 68], "x"), ("y", &[2, 3], &[2, 6], "y")];
    check("gate_up", &gate_up, |rec, _, t| {
        kernels::gate_up(rec, &w, Some(Norm { weight: &t[0], eps: 1e-5 }), Gate::Silu, &t[1], &t[2])
    });
    // A norm combined with a bias.
    let w = Matrix::declare(&device.target(), "w", WeightType::F16, 64, 32).expect("the matrix is valid");
    let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32).expect("valid");
    let (norm, x) = (declare(&[32]), declare(&[2, 32]));
    let y = declare(&[2, 64]);
    let norm = Some(Norm { weight: &norm, eps: 1e-5 });
    let bias = declare(&[64]);
    let both = Linear { bias: Some(&bias), norm, ..Linear::new(&w) };
    let error = kernels::matvec(&mut device.recorder(), &both, &x, &y).expect_err("both");
    assert!(matches!(error, Error::Operand { kernel: "matvec", operand: "bias", .. }), "{error}");
    let error = kernels::matmul(&mut device.recorder(), &Linear { bias: None, ..both }, &x, &y);
    let error = error.expect_err("`matmul` folds no norm");
    assert!(matches!(error, Error::Operand { kernel: "matmul", operand: "norm", .. }), "{error}");
}

#[cfg(feature = "lora")]
#[test]
fn lora_addends_refuse_wrong_shapes() {
    use tilewright::kernels::{Activation, LowRank};
    let device = Device::cpu();
    let w = Matrix::declare(&device.target(), "w", WeightType::Q8_0, 6, 64).expect("the matrix is valid");
    fn low<'a>(inner: &'a Tensor, b: &'a Tensor) -> LowRank<'a> {
        LowRank { inner, b, starts: &[0, 3] }
    }
    let matvec: [Operand; 4] = [
        ("x", &[2, 64], &[2, 68], "x"),
        ("inner", &[2, 16], &[2, 8], "inner"),
        ("b", &[6, 8], &[5, 8], "b"),
        ("y", &[2, 6], &[2, 5], "y"),
    ];
    check("matvec_lora", &matvec, |rec, _, t| {
        kernels::matvec_lora(rec, &Linear::new(&w), &low(&t[1], &t[2]), &t[0], &t[3])
    });
    let gate_up: [Operand; 5] = [
        ("norm", &[64], &[6], "norm"),
        ("x", &[2, 64], &[2, 68], "x"),
        ("inner", &[2, 16], &[1, 16], "inner"),
        ("b", &[6, 8], &[3, 8], "b"),
        ("y", &[2, 3], &[2, 6], "y"),
    ];
    check("gate_up_lora", &gate_up, |rec, _, t| {
        let norm = Some(Norm { weight: &t[0], eps: 1e-5 });
        kernels::gate_up_lora(rec, &w, norm, Gate::Silu, &low(&t[2], &t[3]), &t[1], &t[4])
    });
    let add: [Operand; 3] =
        [("inner", &[2, 16], &[2, 12], "inner"), ("b", &[6, 8], &[7, 8], "y"), ("y", &[2, 6], &[2, 5], "y")];
    check("add_lora", &add, |rec, _, t| kernels::add_lora(rec, &low(&t[0], &t[1]), &t[2]));
    // Unordered members, too many of them, a rank that is not a multiple of 4, an activation.
    let declare = |shape: &[u32]| Tensor::declare("t", Role::Activations, shape, DType::F32).expect("valid");
    let (x, y, b, odd) = (declare(&[1, 64]), declare(&[1, 6]), declare(&[6, 8]), declare(&[6, 6]));
    for (starts, columns, b) in
        [(&[][..], 8, &b), (&[1, 3], 16, &b), (&[0, 3, 3], 24, &b), (&[0, 1, 2, 3, 4], 40, &b), (&[0], 6, &odd)]
    {
        let inner = declare(&[1, columns]);
        let low = LowRank { inner: &inner, b, starts };
        let error = kernels::matvec_lora(&mut device.recorder(), &Linear::new(&w), &low, &x, &y).expect_err("starts");
        assert!(matches!(error, Error::Operand { kernel: "matvec_lora", operand: "b", .. }), "{error}");
    }
    let inner = declare(&[1, 8]);
    let activated = Linear { activation: Some(Activation::Tanh), ..Linear::new(&w) };
    let low = LowRank { inner: &inner, b: &b, starts: &[0] };
    let error = kernels::matvec_lora(&mut device.recorder(), &activated, &low, &x, &y).expect_err("an activation");
    assert!(matches!(error, Error::Operand { kernel: "matvec_lora", operand: "activation", .. }), "{error}");
}

#[test]
fn mol_gate_kernel_refuses_wrong_shapes() {
    let of_gate: [Operand; 4] = [
        ("a", &[2, 3], &[2, 4], "b"),
        ("b", &[5, 3], &[5, 4], "b"),
        ("c", &[5, 2, 3], &[5, 6], "c"),
        ("y", &[5, 2, 3], &[10, 3], "y"),
    ];
    let record =
        |rec: &mut Recorder, combination, t: &[Tensor]| mol_gate(rec, combination, [&t[0], &t[1], &t[2]], &t[3]);
    check("mol_gate", &of_gate, |rec, _, t| record(rec, Combination::Sum, t));
    let tensors = of_gate.map(|(name, shape, ..)| {
        Tensor::declare(name, Role::Activations, shape, DType::F32).expect("the shape is valid")
    });
    let error = record(&mut Device::cpu().recorder(), Combination::GluSiluLn, &tensors).expect_err("no pair alone");
    assert!(matches!(error, Error::Operand { kernel: "mol_gate", operand: "combination", .. }), "{error}");
    let of_sum: [Operand; 3] =
        [("weight", &[2, 3], &[3, 2], "weight"), ("x", &[2, 3], &[6], "x"), ("y", &[2], &[3], "y")];
    check("weighted_sum", &of_sum, |rec, _, t| weighted_sum(rec, &t[0], &t[1], &t[2]));
}

#[test]
fn mol_kernels_refuse_wrong_shapes() {
    let device = Device::cpu();
    let form = |query_components, item_components| MolForm {
        query_components,
        item_components,
        hidden: 2,
        pairing: Pairing::Cross,
        combination: Combination::GluSilu,
        activation: MolActivation::Silu,
    };
    let weights = MolGateWeights { w1: &[0.0; 30], b1: &[0.0; 2], w2: &[0.0; 30], b2: &[0.0; 15] };
    let gate = MolGate::new(&device, form(3, 5), &weights).expect("the form is valid");
    let w = Matrix::declare(&device.target(), "w", WeightType::F16, 5 * 7, 8).expect("the matrix is valid");
    let operands: [Operand; 5] = [
        ("item_gates", &[7, 32], &[7, 15], "item_gates"),
        ("queries", &[2, 24], &[2, 23], "queries"),
        ("query_gates", &[2, 32], &[3, 32], "query_gates"),
        ("ids", &[2, 4], &[2, 5], "ids"),
        ("scores", &[2, 4], &[8], "scores"),
    ];
    let record = |rec: &mut Recorder, w: &Matrix, t: &[Tensor]| {
        let operands = MolOperands { items: w, item_gates: &t[0], queries: &t[1], query_gates: &t[2] };
        kernels::mol(rec, &gate, &operands, MolScores::Of(&t[3]), &t[4])
    };
    check("mol", &operands, |rec, _, t| record(rec, &w, t));
    let tensors = operands.map(|(name, shape, ..)| {
        Tensor::declare(name, Role::Activations, shape, element_type(name)).expect("the shape is valid")
    });
    // Rows not a multiple of the components, columns not a multiple of 4, a type without a variant.
    for (weight, rows, cols) in [(WeightType::F16, 36, 8), (WeightType::F16, 35, 6), (WeightType::Q4_0, 35, 8)] {
        let w = Matrix::declare(&device.target(), "w", weight, rows, cols).expect("the matrix is valid");
        match record(&mut device.recorder(), &w, &tensors) {
            Err(Error::Operand { operand: "w", .. }) => {}
            other => panic!("{rows} x {cols} of {weight} gives {other:?}"),
        }
    }
    let refused = |form, weights: &MolGateWeights| match MolGate::new(&device, form, weights) {
        Err(Error::Operand { operand, .. }) => operand,
        other => panic!("{other:?}"),
    };
    for (n, m) in [(0, 4), (4, 0), (9, 5), (65, 1)] {
        assert_eq!(refused(form(n, m), &weights), "form", "{n} x {m}");
    }
    assert_eq!(refused(MolForm { pairing: Pairing::Aligned, ..form(3, 5) }, &weights), "form");
    assert_eq!(refused(form(3, 5), &MolGateWeights { w1: &[0.0; 29], ..weights }), "w1");
    assert_eq!(refused(form(3, 5), &MolGateWeights { b1: &[], ..weights }), "b1");
    assert_eq!(refused(form(3, 5), &MolGateWeights { w2: &[0.0; 31], ..weights }), "w2");
    assert_eq!(refused(form(3, 5), &MolGateWeights { b2: &[0.0; 16], ..weights }), "b2");
}

#[test]
fn sampling_kernels_refuse_wrong_shapes() {
    let penalize: [Operand; 4] = [
        ("sampling", &[1, 12], &[1, 8], "sampling"),
        ("tokens", &[4], &[4], ""),
        ("biases", &[1, 4], &[2, 4], "biases"),
        ("logits", &[1, 5], &[1, 5], ""),
    ];
    check("penalize", &penalize, |rec, state, t| kernels::penalize(rec, &t[0], state, &t[1], &t[2], &t[3]));
    let mask_logits: [Operand; 2] = [("allowed", &[1, 2], &[1, 1], "allowed"), ("logits", &[1, 33], &[1, 33], "")];
    check("mask_logits", &mask_logits, |rec, _, t| kernels::mask_logits(rec, &t[0], &t[1]));
    let sample: [Operand; 3] =
        [("sampling", &[1, 12], &[2, 6], "sampling"), ("logits", &[1, 5], &[1, 5], ""), ("ids", &[1], &[2], "ids")];
    check("sample", &sample, |rec, state, t| kernels::sample(rec, &t[0], state, &t[1], &t[2]));
    let advance: [Operand; 2] = [("ids", &[1], &[1, 1], "ids"), ("tokens", &[4], &[4], "")];
    check("advance", &advance, |rec, state, t| kernels::advance(rec, state, &t[0], &t[1]));
}

#[test]
fn output_that_aliases_an_input_is_refused() {
    let device = Device::cpu();
    let x = Tensor::declare("x", Role::Activations, &[2, 5], DType::F32).expect("valid");
    let error = kernels::softmax(&mut device.recorder(), &x, &x).expect_err("x is its own output");
    assert!(matches!(error, Error::Operand { kernel: "softmax", operand: "y", .. }), "{error}");
}

#[test]
fn delta_rule_refuses_wrong_shapes_and_bounds() {
    let rule = |decay| {
        let (n_key_heads, n_heads, key_dim, value_dim) = (1, 2, 4, 3);
        DeltaRule { n_key_heads, n_heads, key_dim, value_dim, grouped: true, beta_scale: 1.0, decay }
    };
    let record = |decay, rec: &mut Recorder, state: &StepState, t: &[Tensor]| {
        rule(decay).record(rec, state, [&t[0], &t[1], &t[2]], 1e-5, &t[3], &t[4])
    };
    // Each with the sizes of the other form.
    let by_heads: [Operand; 5] = [
        ("qkv", &[2, 14], &[2, 15], "qkv"),
        ("x", &[2, 24], &[2, 30], "x"),
        ("heads", &[7], &[13], "heads"),
        ("matrices", &[N_STATES, 2, 4, 3], &[N_STATES, 2, 3, 4], "matrices"),
        ("y", &[2, 6], &[2, 7], "y"),
    ];
    check("delta_rule", &by_heads, |rec, state, t| record(Decay::Heads, rec, state, t));
    let mut by_channels = by_heads;
    (by_channels[1].1, by_channels[1].2) = (by_heads[1].2, by_heads[1].1);
    (by_channels[2].1, by_channels[2].2) = (by_heads[2].2, by_heads[2].1);
    check("delta_rule", &by_channels, |rec, state, t| record(Decay::Channels { bound: -5.0 }, rec, state, t));
    let (device, state) = (Device::cpu(), StepState::declare().expect("the state is declared"));
    let declare = |(name, shape, ..): &Operand| Tensor::declare(*name, Role::Activations, shape, DType::F32).unwrap();
    let tensors: Vec<Tensor> = by_channels.iter().map(declare).collect();
    for bound in [0.0, 5.0, f32::NAN, f32::NEG_INFINITY] {
        let refused = record(Decay::Channels { bound }, &mut device.recorder(), &state, &tensors);
        assert!(matches!(refused, Err(Error::Operand { operand: "bound", .. })), "{bound}: {refused:?}");
    }
}
