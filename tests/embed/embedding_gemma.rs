//! EmbeddingGemma and EmbeddingGemma 2, tiny random models by transformers: attention both ways, dense layers after
//! pooling, a projection; each feature also turned off.

use serde_json::{Value, json};
use tilewright::embed::Tokens;
use tilewright::kernels::{Pooling, QkNorm};
use tilewright::load::{EncoderShape, ModelFile, ModelShape};
use tilewright::{Device, EmbedOptions, Embedder, Error};

use super::{fed, in_pieces, names, tokens};
use crate::common::shared::executors;
use crate::common::{self, References, block_on, largest_difference};

type Files = Vec<(String, Vec<u8>)>;

/// Files of both models, `config.json` first.
const FILES: [&str; 8] = [
    "config.json",
    "modules.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "3_Dense/config.json",
    "model.safetensors",
    "2_Dense/model.safetensors",
    "3_Dense/model.safetensors",
];

fn folder(name: &str) -> std::path::PathBuf {
    common::data(&["tiny-random"]).expect("committed test data").join("tiny-random").join(name)
}

fn files(name: &str) -> Files {
    let read = |file: &&str| Some((file.to_string(), std::fs::read(folder(name).join(file)).ok()?));
    FILES.iter().filter_map(read).collect()
}

/// The files with other JSON values: `(file, key, value)`.
fn changed(name: &str, changes: &[(&str, &str, Value)]) -> Files {
    let mut files = files(name);
    for (file, key, value) in changes {
        let bytes = &mut files.iter_mut().find(|(name, _)| name == file).unwrap().1;
        let mut json: Value = serde_json::from_slice(bytes).unwrap();
        let object = json.pointer_mut(if *file == "config.json" && name.ends_with('2') { "/text_config" } else { "" });
        object.unwrap()[*key] = value.clone();
        *bytes = json.to_string().into_bytes();
    }
    files
}

fn references(name: &str) -> (References, Vec<Tokens>) {
    let references = References::open(&folder(name).join("refs.safetensors"));
    let texts = (0..4).map(|i| tokens(&references, i)).collect();
    (references, texts)
}

/// Largest difference of the last `dims` numbers of these references.
fn difference(embedder: &Embedder, (references, texts): &(References, Vec<Tokens>), kind: &str) -> f32 {
    let dims = embedder.dims() as usize;
    let vectors = block_on(embedder.embed_tokens(texts)).unwrap();
    assert_eq!(vectors.len(), dims * texts.len());
    let rows = vectors.chunks_exact(dims).enumerate();
    let of_row = |(i, vector): (usize, &[f32])| {
        let want = references.floats(&format!("{i}.{kind}"));
        largest_difference(vector, &want[want.len() - dims..])
    };
    rows.map(of_row).fold(0.0, f32::max)
}

#[test]
fn embedding_gemmas_match_transformers() {
    for device in executors() {
        for (name, dims) in [("embeddinggemma", 64), ("embeddinggemma2", 72)] {
            let references = references(name);
            let model = Embedder::load(&device, folder(name), EmbedOptions::default()).unwrap();
            assert_eq!((model.dims(), model.pooling(), model.normalizes()), (dims, Pooling::Mean, true));
            assert_eq!((model.max_tokens(), model.prompts()["query"].as_str()), (256, "task: search result | query: "));
            let worst = difference(&model, &references, "embedding");
            println!("{name} on {}: {worst:.1e}", device.info().name);
            assert!(worst <= 1e-5, "{name}: {worst:.1e}");
            let vectors = block_on(model.embed_tokens(&references.1)).unwrap();
            assert_eq!(
                block_on(in_pieces(&device, &files(name), 777).unwrap().embed_tokens(&references.1)).unwrap(),
                vectors
            );
            // Alone, in the other order, and cut short.
            for (text, vector) in references.1.iter().zip(vectors.chunks_exact(dims as usize)) {
                assert_eq!(block_on(model.embed_tokens(std::slice::from_ref(text))).unwrap(), vector);
            }
            let short = model.with_dims(Some(8)).unwrap();
            let cut = block_on(short.embed_tokens(&references.1)).unwrap();
            assert_eq!((short.dims(), cut), (8, tilewright::embed::shortened(&vectors, dims as usize, 8, true)));
        }
        // Hidden states, without what follows.
        let references = references("embeddinggemma");
        let plain: Files = files("embeddinggemma").into_iter().filter(|(name, _)| !name.contains('/')).collect();
        let plain: Files = plain.into_iter().filter(|(name, _)| name != "modules.json").collect();
        for (pooling, normalize, kind) in [
            (Pooling::Last, false, "last_hidden"),
            (Pooling::Mean, true, "mean_normalized"),
            (Pooling::Cls, true, "cls_normalized"),
        ] {
            let options =
                EmbedOptions { pooling: Some(pooling), normalize: Some(normalize), ..EmbedOptions::default() };
            let loader = Embedder::loader(&device, names(&plain), options).unwrap();
            let model = block_on(fed(loader, &plain, 5000).unwrap().finish()).unwrap();
            let worst = difference(&model, &references, kind);
            assert!(worst <= if normalize { 1e-5 } else { 1e-4 }, "{kind}: {worst:.1e}");
        }
    }
}

/// The file has no list of layers: all are local, as in its first five layers of six.
#[test]
fn gguf_embedding_gemma_equals_a_folder_of_local_layers() {
    let (references, texts) = references("embeddinggemma");
    let local = json!(["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention"]);
    let files = changed("embeddinggemma", &[("config.json", "layer_types", local)]);
    for device in executors() {
        let of_file =
            Embedder::load(&device, folder("embeddinggemma").join("model-bf16.gguf"), EmbedOptions::default());
        let of_file = of_file.unwrap();
        assert_eq!((of_file.dims(), of_file.pooling(), of_file.normalizes()), (64, Pooling::Mean, true));
        let of_folder = in_pieces(&device, &files, 5000).unwrap();
        let [file, folder] = [&of_file, &of_folder].map(|model| block_on(model.embed_tokens(&texts)).unwrap());
        let worst = largest_difference(&file, &folder);
        assert!(worst <= 1e-6, "{worst:.1e}");
        // A single token sees only itself.
        assert!(largest_difference(&file[..64], &references.floats("0.embedding")) <= 1e-5);
    }
}

#[test]
fn turning_off_any_encoder_feature_changes_the_vectors() {
    type Off = fn(&mut EncoderShape);
    fn each(shape: &mut EncoderShape, change: impl Fn(&mut tilewright::model::Attention)) {
        shape.config.blocks.iter_mut().for_each(|block| change(&mut block.attention));
    }
    let common: [(&str, Off); 10] = [
        ("nothing", |_| ()),
        ("attention both ways", |shape| shape.config.causal = true),
        ("the window", |shape| each(shape, |attention| attention.window = None)),
        ("the window's size", |shape| each(shape, |a| a.window = a.window.map(|window| window + 1))),
        ("the window's size down", |shape| each(shape, |a| a.window = a.window.map(|window| window - 1))),
        ("the embedding's factor", |shape| shape.config.embd_scale = 1.0),
        ("the scale of scores", |shape| each(shape, |attention| attention.scale *= 0.7)),
        ("the windows' own angles", |shape| {
            let ropes = &mut shape.config.ropes;
            (ropes[0].theta, ropes[1].theta) = (ropes[1].theta, ropes[0].theta);
        }),
        ("a norm of heads before they turn", |shape| each(shape, |a| a.qk_norm = Some(QkNorm::RotatedHeads))),
        ("the norm of vectors", |shape| shape.normalize = false),
    ];
    let device = common::cpu();
    for name in ["embeddinggemma", "embeddinggemma2"] {
        let references = references(name);
        let own: &[(&str, Off)] = match name {
            "embeddinggemma" => &[("the second dense layer", |shape| shape.dense.truncate(1))],
            _ => &[("the norm of values", |shape| each(shape, |a| a.qk_norm = Some(QkNorm::Heads)))],
        };
        for (feature, off) in common.iter().chain(own) {
            let mut file = ModelFile::open(folder(name)).unwrap();
            let ModelShape::Encoder(shape) = &mut file.header.shape else { panic!("{name} is a decoder") };
            off(shape);
            if shape.dense.len() < 2 && name == "embeddinggemma" {
                // Its tensor is then a surplus one.
                let error = Embedder::from_file(&device, file, EmbedOptions::default()).err().unwrap();
                assert!(error.to_string().contains("linear.weight"), "{error}");
                continue;
            }
            let model = match Embedder::from_file(&device, file, EmbedOptions::default()) {
                Ok(model) => model,
                Err(error) => panic!("{name} without {feature}: {error}"),
            };
            let worst = difference(&model, &references, "embedding");
            println!("{name} without {feature}: {worst:.1e}");
            assert_eq!(worst > 1e-4, *feature != "nothing", "{name} without {feature}: {worst:.1e}");
        }
    }
}

#[test]
fn broken_embedding_gemmas_are_refused_by_key() {
    let device: Device = common::cpu();
    const FIRST: &str = "2_Dense/config.json";
    let module =
        |kind: &str, path: &str| json!({ "type": format!("sentence_transformers.models.{kind}"), "path": path });
    let modules = |listed: &[(&str, &str)]| {
        let mut files = files("embeddinggemma");
        files[1].1 = Value::from_iter(listed.iter().map(|(kind, path)| module(kind, path))).to_string().into_bytes();
        files
    };
    let one = |file: &str, key: &str, value: Value| changed("embeddinggemma", &[(file, key, value)]);
    let two = |key: &str, value: Value| changed("embeddinggemma2", &[("config.json", key, value)]);
    let without = |file: &str| {
        let mut files = files("embeddinggemma");
        files.retain(|(name, _)| name != file);
        files
    };
    let start = [("Transformer", ""), ("Pooling", "1_Pooling")];
    for (files, code, named) in [
        (one(FIRST, "in_features", json!(65)), "config", "in_features is 65, expected 64"),
        (one(FIRST, "out_features", json!(0)), "config", "out_features"),
        (one(FIRST, "out_features", json!(1 << 30)), "config", "out_features"),
        (one(FIRST, "out_features", json!(97)), "config", "in_features is 96, expected 97"),
        (one("3_Dense/config.json", "out_features", json!(63)), "config", "dense_3.weight"),
        (one(FIRST, "bias", json!(true)), "config", "dense_2.bias"),
        (one(FIRST, "bias", json!("no")), "config", "bias"),
        (one(FIRST, "activation_function", json!("torch.nn.modules.activation.ReLU")), "unsupported", "ReLU"),
        (one(FIRST, "module_input_name", json!("token_embeddings")), "unsupported", "module_input_name"),
        (without(FIRST), "config", FIRST),
        (without("2_Dense/model.safetensors"), "config", "2_Dense/model.safetensors"),
        (modules(&[start[0], start[1], ("Dense", "5_Dense")]), "unsupported", "5_Dense"),
        (modules(&[start[0], start[1], ("Normalize", ""), ("Dense", "2_Dense")]), "unsupported", "in this order"),
        (modules(&[start[0], ("WeightedLayerPooling", "")]), "unsupported", "WeightedLayerPooling"),
        // The layers' tensors are there, and nothing reads them.
        (modules(&start), "config", "linear.weight"),
        (one("config.json", "sliding_window", json!(0)), "config", "sliding_window"),
        (one("config.json", "use_bidirectional_attention", json!("all")), "config", "use_bidirectional_attention"),
        (two("sliding_window", json!(0)), "config", "sliding_window"),
        (two("sliding_window", json!(u32::MAX)), "config", "sliding_window"),
        (two("embedding_dim", json!(0)), "config", "embedding_dim"),
        (two("embedding_dim", json!(71)), "config", "embedding_projection.weight"),
        (two("hidden_size_per_layer_input", json!(0)), "config", "hidden_size_per_layer_input"),
        (two("hidden_size_per_layer_input", json!(23)), "config", "inp_gate.weight"),
        (two("num_kv_shared_layers", json!(4)), "config", "num_kv_shared_layers"),
    ] {
        let error = in_pieces(&device, &files, 5000).err().unwrap_or_else(|| panic!("{named} is not refused"));
        assert!(error.code() == code && error.to_string().contains(named), "{named}: {}: {error}", error.code());
    }
    let gguf = std::fs::read(folder("embeddinggemma").join("model-bf16.gguf")).unwrap();
    for (key, value, named) in [
        ("dense_2_feat_out", 0u32, "gemma-embedding.dense_2_feat_out"),
        ("dense_2_feat_out", 97, "gemma-embedding.dense_3_feat_in"),
        ("dense_3_feat_out", 63, "dense_3.weight"),
        ("dense_3_feat_in", 5, "gemma-embedding.dense_3_feat_in"),
        ("attention.sliding_window", 0, "gemma-embedding.attention.sliding_window"),
    ] {
        let mut file = gguf.clone();
        let key = format!("gemma-embedding.{key}");
        let at = file.windows(key.len()).position(|window| window == key.as_bytes()).unwrap() + key.len() + 4;
        file[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = in_pieces(&device, &[("x.gguf".into(), file)], 5000).err().unwrap();
        assert!(error.to_string().contains(named), "{key}: {error}");
    }
    for dims in [0, 65] {
        let model = in_pieces(&device, &files("embeddinggemma"), 5000).unwrap();
        let error = model.with_dims(Some(dims)).err().unwrap();
        assert!(matches!(error, Error::Option { option: "dimensions", .. }), "{error}");
    }
}
