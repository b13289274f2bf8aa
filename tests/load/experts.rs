//! Mixtures of experts in all forms of files: with several weight types, larger than a binding, in MXFP4, in pieces.

use serde_json::json;
use tilewright::kernels::KvType;
use tilewright::load::FileName;
use tilewright::{Device, LoadOptions, Model, Tier};

use super::checkpoint::{Checkpoint, Stored, check_references, checkpoint, model};
use super::common::{self, Rng, block_on, largest_difference, shared};
use super::{Folder, logits};

const MIXTURES: [&str; 6] = ["mixtral", "qwen3-moe", "qwen35-moe", "olmoe", "lfm2-moe", "gpt-oss"];

/// All modes of expert products: one expert at a time and by tiles, with and without subgroups, and on the CPU.
fn devices() -> Vec<Device> {
    let gpus = shared::gpus_beside_cpu([Tier::Baseline, Tier::Subgroups, Tier::Scalar]);
    std::iter::once(common::cpu()).chain(gpus).collect()
}

fn name(device: &Device) -> String {
    if device.is_gpu() { device.tier().name().to_owned() } else { "cpu".to_owned() }
}

fn decode_dispatches(model: &Model) -> usize {
    model.session().unwrap().decode_dispatches()
}

/// Gates and ups of different types cost one more dispatch, and so do shared experts of other types.
#[test]
fn each_further_expert_weight_type_adds_a_dispatch() {
    for (of, widened, more) in [
        ("mixtral", &["experts.0.w1", "experts.1.w1"][..], 0),
        ("qwen3-moe", &["up_proj"][..], 1),
        ("qwen3-moe", &["experts.2.down_proj", "experts.3.down_proj"], 2),
        ("qwen35-moe", &["shared_expert.up_proj", "shared_expert.gate_proj"], 1),
        ("qwen35-moe", &["shared_expert.down_proj"], 1),
        ("lfm2-moe", &["experts.1.w3"], 0),
    ] {
        let Some(plain) = checkpoint(of) else { return };
        let mut mixed = plain.clone();
        assert!(mixed.widen(widened) > 0, "{of} has no {widened:?}");
        let (plain, mixed) = (plain.write(), mixed.write());
        for device in devices() {
            let what = format!("{of} with {widened:?} on {}", name(&device));
            check_references(of, &device, &mixed.0, &what);
            // The CPU converts all to one type.
            if device.is_gpu() && more > 0 {
                let n_layers = model(&device, &plain).config().blocks.len();
                let [plain, mixed] = [&plain, &mixed].map(|folder| decode_dispatches(&model(&device, folder)));
                assert_eq!(mixed, plain + more * n_layers, "{what}");
            }
        }
    }
}

/// Bindings that hold only some experts: one dispatch per slab, and the same numbers.
#[test]
fn experts_beyond_one_binding_are_split_between_experts() {
    for of in MIXTURES {
        let Some(whole) = checkpoint(of) else { return };
        let whole = whole.write();
        for device in devices() {
            let plain = decode_dispatches(&model(&device, &whole));
            let config = model(&device, &whole).config().clone();
            let (block, of_all) = config
                .blocks
                .iter()
                .find_map(|block| Some((&block.feed_forward, block.feed_forward.experts?)))
                .unwrap();
            // In BF16; two experts, and all other weights.
            let of_expert = u64::from(2 * 2 * block.dim * config.dim);
            let (limit, limits) = ((2 * of_expert + 64).max(32 << 10), device.limits());
            let slabs = (u64::from(of_all.n) * of_expert).div_ceil(limit);
            let cut = device.with_limits(tilewright::TargetLimits { max_binding_bytes: limit, ..limits });
            let options = || LoadOptions {
                context_length: Some(64),
                kv_type: KvType::F32,
                max_pass: Some(8),
                ..LoadOptions::default()
            };
            let model = Model::load(&cut, &whole.0, options()).unwrap_or_else(|e| panic!("{of}: {e}"));
            let dispatches = decode_dispatches(&model);
            println!("{of} on {}: {dispatches} dispatches, {plain} without a limit", name(&device));
            assert!(slabs < 2 || dispatches > plain, "{of}: {dispatches} dispatches, {plain} without a limit");
            let want = block_on(self::model(&device, &whole).trace(&super::PROMPT)).unwrap().logits;
            let difference = largest_difference(&logits(&model), &want);
            assert!(difference <= 2e-5, "{of} on {}: {difference}", name(&device));
        }
    }
}

/// The values of 4-bit floats.
const FLOATS: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Random rows in gpt-oss's published format, and their values, `[E, rows, cols]`.
fn mxfp4(rng: &mut Rng, [n, rows, groups]: [usize; 3]) -> (Stored, Stored, Vec<f32>) {
    let blocks: Vec<u8> = (0..n * rows * groups * 16).map(|_| rng.below(256) as u8).collect();
    let scales: Vec<u8> = (0..n * rows * groups).map(|_| 120 + rng.below(6) as u8).collect();
    let value = |i: usize| {
        let float = FLOATS[usize::from(blocks[i / 2] >> (4 * (i % 2)) & 15)];
        float * 2f32.powi(i32::from(scales[i / 32]) - 127)
    };
    let values = (0..n * rows * groups * 32).map(value).collect();
    let stored = |shape: &[usize], data: &[u8]| Stored {
        dtype: "U8".into(),
        shape: shape.iter().map(|&n| n as u64).collect(),
        data: data.to_vec(),
    };
    (stored(&[n, rows, groups, 16], &blocks), stored(&[n, rows, groups], &scales), values)
}

/// gpt-oss with experts of 32 columns: as pairs of tensors, and as the matrices that transformers converts them to.
fn gpt_oss() -> Option<[Checkpoint; 2]> {
    let mut plain = checkpoint("gpt-oss")?;
    plain.config["intermediate_size"] = json!(32);
    let mut packed = plain.clone();
    packed.config["quantization_config"] =
        json!({ "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"] });
    let (mut rng, n) = (Rng::new(23), 4);
    for layer in 0..4 {
        for (matrix, rows, groups) in [("gate_up_proj", 64, 2), ("down_proj", 64, 1)] {
            let name = format!("model.layers.{layer}.mlp.experts.{matrix}");
            let (blocks, scales, values) = mxfp4(&mut rng, [n, rows, groups]);
            packed.tensors.remove(&name);
            packed.tensors.insert(format!("{name}_blocks"), blocks);
            packed.tensors.insert(format!("{name}_scales"), scales);
            let cols = 32 * groups;
            let transposed = (0..n * rows * cols).flat_map(|i| {
                let (expert, col, row) = (i / (rows * cols), i / rows % cols, i % rows);
                values[(expert * rows + row) * cols + col].to_le_bytes()
            });
            let shape = vec![n as u64, cols as u64, rows as u64];
            plain.tensors.insert(name, Stored { dtype: "F32".into(), shape, data: transposed.collect() });
        }
        let bias = format!("model.layers.{layer}.mlp.experts.gate_up_proj_bias");
        let data: Vec<u8> = (0..n * 64).flat_map(|_| (0.1 * rng.uniform() as f32).to_le_bytes()).collect();
        for checkpoint in [&mut plain, &mut packed] {
            let (dtype, shape) = ("F32".into(), vec![n as u64, 64]);
            checkpoint.tensors.insert(bias.clone(), Stored { dtype, shape, data: data.clone() });
        }
    }
    Some([plain, packed])
}

#[test]
fn mxfp4_block_and_scale_pairs_match_plain_experts() {
    let Some([plain, packed]) = gpt_oss() else { return };
    let (plain, packed) = (plain.write(), packed.write());
    for device in devices() {
        let [want, got] = [&plain, &packed].map(|folder| logits(&model(&device, folder)));
        let difference = largest_difference(&got, &want);
        let size = want.iter().fold(0f32, |size, logit| size.max(logit.abs()));
        println!("{}: logits up to {size} differ by {difference:.1e}", name(&device));
        assert!(difference <= 1e-5 * size.max(1.0), "{}: {difference}", name(&device));
    }
}

#[test]
fn mismatched_block_and_scale_tensors_are_refused() {
    let Some([_, packed]) = gpt_oss() else { return };
    let name = "model.layers.1.mlp.experts.down_proj";
    let refused = |what: &str, named: &[&str], change: &dyn Fn(&mut Checkpoint)| {
        let mut changed = packed.clone();
        change(&mut changed);
        let folder = changed.write();
        let error =
            tilewright::load::ModelFile::open(&folder.0).err().unwrap_or_else(|| panic!("{what} is not refused"));
        for name in named {
            assert!(error.to_string().contains(name), "{what}: `{error}` does not name `{name}`");
        }
    };
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    refused("no scales", &[&scales, "missing"], &|checkpoint| drop(checkpoint.tensors.remove(&scales)));
    refused("scales of another shape", &[&scales, "[4, 64, 1]"], &|checkpoint| {
        checkpoint.tensors.get_mut(&scales).unwrap().shape = vec![4, 1, 64];
    });
    refused("blocks of three dimensions", &[&blocks, "groups, 16]"], &|checkpoint| {
        checkpoint.tensors.get_mut(&blocks).unwrap().shape = vec![4, 64, 16];
    });
    refused("signed blocks", &[&blocks, "U8"], &|checkpoint| {
        checkpoint.tensors.get_mut(&blocks).unwrap().dtype = "I8".into();
    });
    refused("another quantisation", &["quantization_config.quant_method", "fp8"], &|checkpoint| {
        checkpoint.config["quantization_config"]["quant_method"] = json!("fp8");
    });
}

/// Loads a folder in pieces of up to `longest` bytes.
fn in_pieces(device: &Device, folder: &Folder, longest: usize) -> Model {
    let files = ["config.json", "model.safetensors"].map(|name| {
        let content = std::fs::read(folder.0.join(name)).unwrap();
        (FileName { name: name.into(), size: Some(content.len() as u64) }, content)
    });
    let names = files.iter().map(|(name, _)| name.clone()).collect();
    let mut loader =
        Model::loader(device, names, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() }).unwrap();
    let mut rng = Rng::new(longest as u64);
    while let Some((file, offset)) = loader.wanted() {
        let rest = &files[file].1[offset as usize..];
        let n = (1 + rng.below(longest)).min(rest.len());
        block_on(loader.push(&rest[..n])).unwrap_or_else(|e| panic!("{e}"));
    }
    block_on(loader.finish()).unwrap()
}

/// Expert rows that end within a piece, shared experts, pairs of tensors.
#[test]
fn experts_loaded_in_pieces_give_equal_logits() {
    let Some([_, packed]) = gpt_oss() else { return };
    let device = common::cpu();
    let folders = MIXTURES.into_iter().filter_map(checkpoint).chain([packed]).map(|checkpoint| checkpoint.write());
    for folder in folders {
        let want = logits(&model(&device, &folder));
        for longest in [61, 1009, 1 << 20] {
            assert_eq!(logits(&in_pieces(&device, &folder, longest)), want, "pieces of up to {longest} bytes");
        }
    }
}
