//! Text encoders: token ids, vectors and hidden states against references; batch invariance; invalid input.

use crate::common;
#[path = "embed/bge_m3.rs"]
mod bge_m3;
#[path = "embed/embedding_gemma.rs"]
mod embedding_gemma;
#[path = "embed/late.rs"]
mod late;
#[path = "embed/llm_reranker.rs"]
mod llm_reranker;
#[path = "embed/pictures.rs"]
mod pictures;
#[path = "embed/tiny.rs"]
mod tiny;

use common::shared::{self, executors};
use common::{References, Rng, block_on, largest_difference};
use serde_json::Value;
use tilewright::embed::{Place, Tokens};
use tilewright::kernels::Pooling;
use tilewright::load::{FileName, Loader, ModelFile};
use tilewright::{Device, EmbedOptions, Embedder, Error, LoadOptions, Model, Tier};

fn load(device: &Device, name: &str, options: EmbedOptions<'_>) -> Option<Embedder> {
    let set = name.split('/').next().unwrap_or(name);
    let path = common::data(&[set])?.join(name);
    Some(Embedder::load(device, path, options).unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Random weights and a small vocabulary of whole words, for tests that do not depend on a model's size.
fn nomic(device: &Device, options: EmbedOptions<'_>) -> Embedder {
    load(device, "encoders/nomic", options).expect("committed test data")
}

/// 1 - cosine, in f64.
fn cosine_distance(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}

struct Case {
    text: String,
    max_tokens: u32,
    ids: Vec<u32>,
}

fn minilm_cases() -> Option<Vec<Case>> {
    let path = common::data(&["minilm-l6-v2"])?.join("minilm-l6-v2/cases.json");
    let cases: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let case = |case: &Value| Case {
        text: case["text"].as_str().unwrap().into(),
        max_tokens: case["max_tokens"].as_u64().unwrap() as u32,
        ids: case["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(),
    };
    Some(cases["cases"].as_array().unwrap().iter().map(case).collect())
}

#[test]
fn minilm_matches_its_references() {
    let Some(cases) = minilm_cases() else { return };
    let folder = common::data(&["minilm-l6-v2"]).unwrap().join("minilm-l6-v2");
    let references = References::open(&folder.join("embeddings.safetensors"));
    let (of_f16, of_f32) = (references.floats("f16"), references.floats("f32"));
    for device in executors() {
        // Most cases were truncated to the model's own limit, one was not.
        for max_tokens in [256, 512] {
            let options = EmbedOptions { max_tokens: Some(max_tokens), ..EmbedOptions::default() };
            let embedder = load(&device, "minilm-l6-v2", options).unwrap();
            assert_eq!((embedder.dims(), embedder.pooling(), embedder.normalizes()), (384, Pooling::Mean, true));
            // By default a GPU, slow if software, embeds a tenth of the truncated cases.
            let is_taken = |i: usize| !device.is_gpu() || common::is_full() || i.is_multiple_of(10) && max_tokens < 512;
            let own: Vec<usize> =
                (0..cases.len()).filter(|&i| cases[i].max_tokens == max_tokens && is_taken(i)).collect();
            if own.is_empty() {
                continue;
            }
            let texts: Vec<&str> = own.iter().map(|&i| cases[i].text.as_str()).collect();
            let vectors = block_on(embedder.embed(&texts)).unwrap();
            let mut worst = (0.0f64, 0.0f64, 0.0f32);
            for (&i, vector) in own.iter().zip(vectors.chunks_exact(384)) {
                assert_eq!(embedder.encode(&cases[i].text).unwrap().ids, cases[i].ids, "case {i}");
                let row = |rows: &'_ [f32]| rows[i * 384..][..384].to_vec();
                let (exact, rounded) = (cosine_distance(vector, &row(&of_f16)), cosine_distance(vector, &row(&of_f32)));
                let difference = largest_difference(vector, &row(&of_f16));
                assert!(
                    exact <= 1e-5 && rounded <= 1e-3 && difference <= 1e-5,
                    "case {i}: {exact:.1e} {rounded:.1e} {difference:.1e}"
                );
                worst = (worst.0.max(exact), worst.1.max(rounded), worst.2.max(difference));
            }
            println!(
                "MiniLM on {}, {} texts: ids equal; cosine distance {:.1e}, to the unrounded weights' {:.1e}; components {:.1e}",
                device.info().name,
                own.len(),
                worst.0,
                worst.1,
                worst.2
            );
        }
        let embedder = load(&device, "minilm-l6-v2", EmbedOptions::default()).unwrap();
        assert!(block_on(embedder.embed::<&str>(&[])).unwrap().is_empty());
    }
}

/// Compares last hidden states by pooling one token at a time: a sequence's first token is its CLS.
fn check_tiny(name: &str, tolerance: f32) {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let folder = data.join("tiny-random").join(name);
    let references = References::open(&folder.join("refs.safetensors"));
    let gguf = folder.join("model-f16.gguf");
    for device in executors() {
        for path in [Some(&folder), gguf.exists().then_some(&gguf)].into_iter().flatten() {
            let mut worst = 0.0f32;
            for (pooling, kind) in
                [(Pooling::Mean, "mean_normalized"), (Pooling::Cls, "cls_normalized"), (Pooling::Last, "last_hidden")]
            {
                let normalize = Some(pooling != Pooling::Last);
                let options = EmbedOptions { pooling: Some(pooling), normalize, ..EmbedOptions::default() };
                let embedder = Embedder::load(&device, path, options).unwrap_or_else(|e| panic!("{name}: {e}"));
                let texts: Vec<Tokens> = (0..4).map(|i| tokens(&references, i)).collect();
                let dims = embedder.dims() as usize;
                let vectors = block_on(embedder.embed_tokens(&texts)).unwrap();
                for (i, vector) in vectors.chunks_exact(dims).enumerate() {
                    let want = references.floats(&format!("{i}.{kind}"));
                    let difference = largest_difference(vector, &want[want.len() - dims..]);
                    assert!(
                        difference <= tolerance,
                        "{name} on {}, {kind} of {i}: {difference:.1e}",
                        device.info().name
                    );
                    worst = worst.max(difference);
                }
            }
            println!("{} on {}: worst {worst:.1e}", path.file_name().unwrap().to_string_lossy(), device.info().name);
        }
    }
}

fn tokens(references: &References, i: usize) -> Tokens {
    let ids = references.ids(&format!("{i}.ids"));
    let types = format!("{i}.token_type_ids");
    let first_len = match references.has(&types) {
        true => references.ids(&types).iter().filter(|&&kind| kind == 0).count(),
        false => ids.len(),
    };
    Tokens { first_len: first_len as u32, ..Tokens::from(ids) }
}

#[test]
fn tiny_bert_matches_its_references() {
    check_tiny("bert", 2e-4);
}

#[test]
fn tiny_roberta_positions_start_after_the_padding_id() {
    check_tiny("roberta", 2e-4);
}

#[test]
fn tiny_modernbert_matches_its_references() {
    check_tiny("modernbert", 2e-4);
}

#[test]
fn encoder_loaded_in_pieces_gives_equal_vectors() {
    let Some(data) = common::data(&["tiny-random"]) else { return };
    let file = |name: &str, path: &str| (name.to_string(), std::fs::read(data.join(path)).unwrap());
    let tiny = [
        file("config.json", "tiny-random/bert/config.json"),
        file("model.safetensors", "tiny-random/bert/model.safetensors"),
    ];
    let gguf = [file("model.gguf", "tiny-random/bert/model-f16.gguf")];
    let mut published = tiny.to_vec();
    published.push(("1_Pooling/config.json".into(), br#"{ "pooling_mode_cls_token": true }"#.to_vec()));
    let texts = [Tokens::from(vec![5, 17, 99, 3]), Tokens::from(vec![200])];
    for device in executors() {
        let whole = load(&device, "tiny-random/bert", EmbedOptions::default()).unwrap();
        let want = block_on(whole.embed_tokens(&texts)).unwrap();
        for (files, pooling) in [(&tiny[..], Pooling::Mean), (&published, Pooling::Cls), (&gguf, Pooling::Mean)] {
            for longest in [7, 5000, 1 << 30] {
                let embedder = in_pieces(&device, files, longest).unwrap();
                assert_eq!(embedder.pooling(), pooling);
                let vectors = block_on(embedder.embed_tokens(&texts)).unwrap();
                if pooling == Pooling::Mean && files.len() == 2 {
                    assert_eq!(vectors, want);
                }
            }
        }
    }
    // No file contains rotation tables.
    let rotary = ["config.json", "model.safetensors"].map(|name| file(name, &format!("tiny-random/modernbert/{name}")));
    let whole = load(&common::cpu(), "tiny-random/modernbert", EmbedOptions::default()).unwrap();
    let pieces = in_pieces(&common::cpu(), &rotary, 5000).unwrap();
    assert_eq!(block_on(pieces.embed_tokens(&texts)).unwrap(), block_on(whole.embed_tokens(&texts)).unwrap());
    for (modules, wanted) in [
        (r#"[{ "type": "sentence_transformers.models.Transformer" }]"#, Ok(false)),
        (r#"[{ "type": "sentence_transformers.models.Normalize" }]"#, Ok(true)),
        (r#"[{ "type": "sentence_transformers.models.CNN" }]"#, Err("models.CNN")),
        (r#"[{}]"#, Err("missing")),
        (r#"{}"#, Err("modules.json")),
    ] {
        let mut files = tiny.to_vec();
        files.push(("modules.json".into(), modules.into()));
        match (in_pieces(&common::cpu(), &files, 5000), wanted) {
            (Ok(embedder), Ok(normalizes)) => assert_eq!(embedder.normalizes(), normalizes),
            (Err(error), Err(named)) => assert!(error.to_string().contains(named), "{error}"),
            (loaded, _) => panic!("{modules}: {:?}", loaded.map(|_| ())),
        }
    }
    let decoder = [file("model.gguf", "tiny-random/llama-mha-bias/model-f16.gguf")];
    let error = in_pieces(&common::cpu(), &decoder, 5000).err().unwrap();
    assert_eq!(error.code(), "unsupported", "{error}");
    let mut short = tiny.to_vec();
    short[1].1.truncate(100_000);
    assert_eq!(in_pieces(&common::cpu(), &short, 5000).err().unwrap().code(), "truncated");
}

/// Loads files in pieces of this length.
fn in_pieces(device: &Device, files: &[(String, Vec<u8>)], len: usize) -> Result<Embedder, Error> {
    block_on(fed(Embedder::loader(device, names(files), EmbedOptions::default())?, files, len)?.finish())
}

fn names(files: &[(String, Vec<u8>)]) -> Vec<FileName> {
    files.iter().map(|(name, _)| FileName { name: name.clone(), size: None }).collect()
}

/// A loader fed with files in pieces of this length.
fn fed<T: Send>(mut loader: Loader<T>, files: &[(String, Vec<u8>)], len: usize) -> Result<Loader<T>, Error> {
    while let Some((file, offset)) = loader.wanted() {
        let rest = &files[file].1[(offset as usize).min(files[file].1.len())..];
        match rest.len() {
            0 => loader.end()?,
            left => block_on(loader.push(&rest[..len.min(left)]))?,
        }
    }
    let (done, total) = loader.progress();
    assert!(done == total && total > 0, "{done} of {total} bytes");
    Ok(loader)
}

/// Texts of random words, with very different lengths.
fn texts(n: usize, seed: u64) -> Vec<String> {
    const WORDS: [&str; 12] =
        ["the", "a", "river", "engine", "quietly", "42", "vectors", "naïve", "of", "matrix", "ran", "日本"];
    let mut rng = Rng::new(seed);
    let text = |_| (0..[1, 3, 9, 30, 75][rng.below(5)]).map(|_| WORDS[rng.below(12)]).collect::<Vec<_>>().join(" ");
    (0..n).map(text).collect()
}

/// Its first 30 words.
fn shortened(text: String) -> String {
    text.split(' ').take(30).collect::<Vec<_>>().join(" ")
}

#[test]
fn embedding_is_bit_equal_in_every_batch() {
    // By default a sixth of the texts, at most about 40 tokens long, in fewer batches.
    let (texts, sizes, n_rounds) = if common::is_full() {
        (texts(24, 7), &[16, 100, 1024][..], 3)
    } else {
        (texts(24, 7).into_iter().step_by(6).map(shortened).collect(), &[16, 1024][..], 2)
    };
    for device in executors() {
        let mut alone: Vec<Vec<f32>> = Vec::new();
        for &max_batch_tokens in sizes {
            let options = EmbedOptions { max_batch_tokens: Some(max_batch_tokens), ..EmbedOptions::default() };
            let Some(embedder) = load(&device, "minilm-l6-v2", options) else { return };
            if alone.is_empty() {
                alone = texts.iter().map(|text| block_on(embedder.embed(&[text])).unwrap()).collect();
            }
            let mut order: Vec<usize> = (0..texts.len()).collect();
            for round in 0..n_rounds {
                let some: Vec<&String> = order.iter().map(|&i| &texts[i]).collect();
                let vectors = block_on(embedder.embed(&some)).unwrap();
                for (&i, vector) in order.iter().zip(vectors.chunks_exact(384)) {
                    let differs = vector.iter().zip(&alone[i]).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
                    assert_eq!(
                        differs,
                        0,
                        "{}: text {i}, batches of {max_batch_tokens}, order {round}",
                        device.info().name
                    );
                }
                let mut rng = Rng::new(round);
                (1..order.len()).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
                order.truncate(texts.len() - texts.len() / 6);
            }
        }
    }
}

#[test]
fn threads_sharing_an_encoder_get_their_own_vectors() {
    for device in executors() {
        let embedder = nomic(&device, EmbedOptions::default());
        // Texts of equal length, so that all batches use the same pass.
        let texts = ["a quiet river", "the old engine", "of tax law", "a calm stream"];
        let alone = texts.map(|text| block_on(embedder.embed(&[text])).unwrap());
        std::thread::scope(|scope| {
            for (text, want) in texts.iter().zip(&alone) {
                let embedder = embedder.clone();
                scope.spawn(move || {
                    for _ in 0..20 {
                        assert!(&block_on(embedder.embed(&[text])).unwrap() == want, "{text}");
                    }
                });
            }
        });
    }
}

#[test]
fn steady_batches_create_nothing_and_read_once() {
    for device in common::executors() {
        let Some(embedder) = load(&device, "minilm-l6-v2", EmbedOptions::default()) else { return };
        // Below the size at which a software adapter splits long products.
        let texts = ["a quiet river", "matrix", "", "the engine ran", "of 42 vectors", "a", "naïve", "日本"];
        let n_tokens: usize = texts.iter().map(|text| embedder.encode(text).unwrap().ids.len()).sum();
        let n_dispatches = embedder.n_dispatches(n_tokens as u32, 8).unwrap();
        println!("{}: {n_dispatches} dispatches for {n_tokens} tokens of 8 texts", device.info().name);
        assert!(n_dispatches <= 42, "{n_dispatches}");
        block_on(embedder.embed(&texts)).unwrap();
        let before = device.counters();
        for _ in 0..4 {
            block_on(embedder.embed(&texts)).unwrap();
        }
        let after = device.counters();
        assert_eq!(after.dispatches - before.dispatches, 4 * n_dispatches as u64);
        assert_eq!(after.bytes_read - before.bytes_read, 4 * 8 * 384 * 4);
        let created = |c: &tilewright::Counters| (c.buffers_created, c.bind_groups_created, c.pipelines_created);
        assert_eq!(created(&after), created(&before));
        if device.is_gpu() {
            assert_eq!(after.submits - before.submits, 4);
        }
    }
}

#[test]
fn each_batch_runs_on_one_of_two_devices() {
    let (Some(gpu), cpu) = (common::gpu(None), common::cpu()) else { return };
    let on_cpu = nomic(&cpu, EmbedOptions::default());
    let options =
        || EmbedOptions { max_batch_tokens: Some(64), second: Some(on_cpu.clone()), ..EmbedOptions::default() };
    let embedder = nomic(&gpu, options());
    let alone = nomic(&gpu, EmbedOptions::default());
    let dims = embedder.dims() as usize;
    let texts = texts(24, 5);
    let dispatches = || [gpu.counters().dispatches, cpu.counters().dispatches];
    let vectors = block_on(embedder.embed(&texts)).unwrap();
    for (vector, other) in vectors.chunks_exact(dims).zip(block_on(alone.embed(&texts)).unwrap().chunks_exact(dims)) {
        assert!(cosine_distance(vector, other) < 1e-6);
    }
    let places = embedder.places();
    for place in &places {
        let [first, second] = place.seconds.expect("a measured time");
        assert_eq!(place.is_second, second < first, "{place:?}");
    }
    // Now each batch runs once, with the size chosen before.
    for text in &texts[..6] {
        let n_tokens = embedder.encode(text).unwrap().ids.len() as u32;
        block_on(embedder.embed(&[text])).unwrap();
        let places = embedder.places();
        let place = places.iter().find(|place| place.n_tokens >= n_tokens && place.n_texts == 1).unwrap();
        let before = dispatches();
        block_on(embedder.embed(&[text])).unwrap();
        let [of_gpu, of_cpu] = [dispatches()[0] - before[0], dispatches()[1] - before[1]];
        assert_eq!([of_gpu == 0, of_cpu == 0], [place.is_second, !place.is_second], "{place:?}");
    }
    // Sizes in the tuning file are not measured again.
    let folder = std::env::temp_dir().join(format!("tilewright-places-{}", std::process::id()));
    let open = || block_on(Device::open_in(&tilewright::DeviceChoice::Gpu, None, Some(&folder)));
    let embedder = nomic(&open().unwrap(), options());
    block_on(embedder.embed(&texts)).unwrap();
    embedder.save_places().unwrap();
    let again = nomic(&open().unwrap(), options());
    block_on(again.embed(&texts)).unwrap();
    let kept = |place: Place| (place.n_tokens, place.n_texts, place.is_second);
    assert_eq!(
        again.places().into_iter().map(kept).collect::<Vec<_>>(),
        embedder.places().into_iter().map(kept).collect::<Vec<_>>()
    );
    assert!(again.places().iter().all(|place| place.seconds.is_none()), "{:?}", again.places());
    let _ = std::fs::remove_dir_all(&folder);

    let other = EmbedOptions { pooling: Some(Pooling::Cls), second: Some(on_cpu), ..EmbedOptions::default() };
    let folder = common::data(&["encoders"]).expect("committed test data").join("encoders/nomic");
    let refused = Embedder::load(&gpu, folder, other).map(|_| ());
    assert!(matches!(refused, Err(Error::InFile { .. } | Error::Option { option: "second", .. })), "{refused:?}");
}

#[test]
fn every_tier_matches_embedding_references() {
    let Some(cases) = minilm_cases() else { return };
    let references =
        References::open(&common::data(&["minilm-l6-v2"]).unwrap().join("minilm-l6-v2/embeddings.safetensors"));
    let want = references.floats("f16");
    for device in shared::gpus([Tier::Baseline, Tier::Subgroups, Tier::Scalar, Tier::F16]) {
        let tier = device.tier();
        let embedder = load(&device, "minilm-l6-v2", EmbedOptions::default()).unwrap();
        let n_cases = if common::is_full() { 12 } else { 4 };
        let texts: Vec<&str> = cases[..n_cases].iter().map(|case| case.text.as_str()).collect();
        let vectors = block_on(embedder.embed(&texts)).unwrap();
        let distances = vectors.chunks_exact(384).zip(want.chunks_exact(384)).map(|(a, b)| cosine_distance(a, b));
        let worst = distances.fold(0.0, f64::max);
        println!(
            "{tier:?}: cosine distance {worst:.1e}, {} dispatches",
            embedder.n_dispatches(64, n_cases as u32).unwrap()
        );
        assert!(worst <= if tier == Tier::F16 { 1e-3 } else { 1e-5 }, "{tier:?}: {worst:.1e}");
    }
}

#[test]
fn invalid_token_sequences_are_refused_by_record() {
    for device in common::executors() {
        let Some(embedder) = load(&device, "minilm-l6-v2", EmbedOptions::default()) else { return };
        // Only [CLS] and [SEP] to embed; and far more tokens than fit.
        let long = "longer than anyone would read ".repeat(34_000);
        assert!(long.len() > 1_000_000);
        let vectors = block_on(embedder.embed(&["", &long])).unwrap();
        assert!(vectors.chunks_exact(384).all(|v| (v.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5));
        assert_eq!((embedder.encode("").unwrap().ids.len(), embedder.encode(&long).unwrap().ids.len()), (2, 256));

        let good = Tokens::from(vec![101, 102]);
        for (bad, what) in [(vec![], "0"), (vec![101; 257], "257"), (vec![101, 30_522], "30522")] {
            let error = block_on(embedder.embed_tokens(&[good.clone(), bad.into()])).unwrap_err();
            assert!(
                matches!(&error, Error::InRecord { record: 1, source } if matches!(**source, Error::Tokenizer { .. })),
                "{error}"
            );
            assert!(error.to_string().starts_with("record 1: ") && error.to_string().contains(what), "{error}");
        }
        let path = common::data(&["minilm-l6-v2"]).unwrap().join("minilm-l6-v2");
        for (options, named) in [
            (EmbedOptions { max_tokens: Some(513), ..EmbedOptions::default() }, "max_tokens"),
            (EmbedOptions { max_tokens: Some(1), ..EmbedOptions::default() }, "max_tokens"),
            (EmbedOptions { in_flight: Some(9), ..EmbedOptions::default() }, "in_flight"),
            (EmbedOptions { max_batch_tokens: Some(0), ..EmbedOptions::default() }, "max_batch_tokens"),
        ] {
            let error = Embedder::load(&device, &path, options).err().unwrap();
            assert!(matches!(&error, Error::Option { option, .. } if *option == named), "{error}");
        }
        let options = EmbedOptions { memory_limit: Some(1 << 20), ..EmbedOptions::default() };
        let before = device.counters();
        assert!(matches!(Embedder::load(&device, &path, options).err().unwrap(), Error::Memory { .. }));
        assert_eq!(device.counters(), before, "nothing is allocated");

        // The error names the model's kind.
        let error = Model::load(&device, &path, LoadOptions::default()).err().unwrap();
        assert!(error.to_string().contains("an encoder"), "{error}");
        #[cfg(feature = "builtin")]
        {
            let file = ModelFile::builtin().unwrap();
            let error = Embedder::from_file(&device, file, EmbedOptions::default()).err().unwrap();
            assert!(error.to_string().contains("a decoder"), "{error}");
        }
    }
}

#[test]
fn repeated_texts_come_from_the_vector_cache() {
    for device in common::executors() {
        let options = EmbedOptions { cached_vectors: 100, ..EmbedOptions::default() };
        let Some(embedder) = load(&device, "minilm-l6-v2", options) else { return };
        let texts = texts(6, 5);
        let first = block_on(embedder.embed(&texts)).unwrap();
        let before = device.counters();
        assert_eq!(block_on(embedder.embed(&texts)).unwrap(), first);
        assert_eq!(device.counters().dispatches, before.dispatches);
        let cache = embedder.cached_vectors().unwrap();
        assert_eq!((cache.hits(), cache.misses(), cache.hit_rate()), (6, 6, 0.5));
    }
}
