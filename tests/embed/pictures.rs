//! CLIP and SigLIP 2, tiny random models by transformers: texts and pictures in one space.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tilewright::embed::Tokens;
use tilewright::formats::safetensors::Safetensors;
use tilewright::kernels::Pooling;
use tilewright::load::FileName;
use tilewright::picture::{Patches, Picture};
use tilewright::{Device, EmbedOptions, Embedder, Error, ImageEmbedder, ImageOptions, Model, Tier};

use super::cosine_distance;
use crate::common::shared::{self, executors};
use crate::common::{self, References, block_on, largest_difference};

/// Patches on a side of a picture.
const GRID: usize = 6;
/// Pixels on a side of a patch.
const SIDE: usize = 8;

fn folder(name: &str) -> PathBuf {
    common::data(&["tiny-random-pictures"]).expect("committed test data").join("tiny-random-pictures").join(name)
}

fn load(device: &Device, path: &Path) -> Embedder {
    Embedder::load(device, path, EmbedOptions::default()).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The references, and their texts.
fn references(name: &str) -> (References, Vec<Tokens>) {
    let references = References::open(&folder(name).join("refs.safetensors"));
    let texts = (0..3).map(|i| Tokens::from(references.ids(&format!("text.{i}.ids")))).collect();
    (references, texts)
}

/// The patches of pixels, `[3, 48, 48]`, row by row.
fn patches_of(pixels: &[f32], is_channel_last: bool) -> Patches {
    let pixel = |place: usize, channel: usize, at: usize| {
        let (row, column) = (place / GRID * SIDE + at / SIDE, place % GRID * SIDE + at % SIDE);
        pixels[(channel * GRID * SIDE + row) * GRID * SIDE + column]
    };
    let (n, n_values) = (GRID * GRID, SIDE * SIDE);
    let value = |i: usize| match (i / (3 * n_values), i % (3 * n_values), is_channel_last) {
        (place, i, false) => pixel(place, i / n_values, i % n_values),
        (place, i, true) => pixel(place, i % 3, i / 3),
    };
    Patches {
        values: (0..n * 3 * n_values).map(value).collect(),
        patch_dim: 3 * n_values as u32,
        grid: [GRID as u32; 2],
        places: (0..n).map(|place| [(place / GRID) as u32, (place % GRID) as u32]).collect(),
    }
}

/// The first picture, from the pixels that the processor gave.
fn first_patches(references: &References) -> Patches {
    patches_of(&references.floats("image.0.pixel_values"), false)
}

fn embed_one(images: &ImageEmbedder, patches: &Patches) -> Vec<f32> {
    block_on(images.embed_patches(std::slice::from_ref(patches))).unwrap()
}

/// A copy of a model's folder, whose files these change.
fn copied(name: &str, to: &str, change: impl Fn(&str, Vec<u8>) -> Vec<u8>) -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("embed_pictures").join(to);
    std::fs::create_dir_all(&target).unwrap();
    for file in ["config.json", "preprocessor_config.json", "model.safetensors"] {
        let bytes = std::fs::read(folder(name).join(file)).unwrap();
        std::fs::write(target.join(file), change(file, bytes)).unwrap();
    }
    target
}

/// A JSON file with another value at `pointer`.
fn with_json(bytes: &[u8], pointer: &str, value: Value) -> Vec<u8> {
    let mut json: Value = serde_json::from_slice(bytes).unwrap();
    let (object, key) = pointer.rsplit_once('/').unwrap();
    json.pointer_mut(object).unwrap()[key] = value;
    json.to_string().into_bytes()
}

/// A copy with another value of `file`.
fn changed(name: &str, to: &str, (file, pointer, value): (&str, &str, Value)) -> PathBuf {
    copied(name, to, |found, bytes| if found == file { with_json(&bytes, pointer, value.clone()) } else { bytes })
}

#[test]
fn texts_and_pictures_match_transformers() {
    for (name, dims) in [("clip", 40), ("siglip2", 64)] {
        let (references, texts) = references(name);
        let [want_texts, want_images] = ["text_embeds", "image_embeds"].map(|key| references.floats(key));
        let patches = first_patches(&references);
        for device in executors().into_iter().chain(shared::gpus_beside_cpu([Tier::Baseline])) {
            let what = format!("{name} on {} ({})", device.info().name, device.tier().name());
            let model = load(&device, &folder(name));
            let images = model.images().unwrap();
            assert_eq!((model.dims(), images.dims(), model.pooling()), (dims as u32, dims as u32, Pooling::Last));
            for (i, text) in texts.iter().enumerate() {
                let want = references.floats(&format!("text.{i}.last_hidden"));
                let difference = largest_difference(&block_on(model.rows(text)).unwrap(), &want);
                assert!(difference <= 1e-4, "{what}: rows of text {i} differ by {difference:.1e}");
            }
            let want_rows = references.floats("image.0.last_hidden");
            let rows = largest_difference(&block_on(images.rows(&patches)).unwrap(), &want_rows);
            assert!(rows <= 1e-4, "{what}: rows of the picture differ by {rows:.1e}");
            let of_texts = block_on(model.embed_tokens(&texts)).unwrap();
            let of_image = embed_one(images, &patches);
            let differences = [(&of_texts, &want_texts[..]), (&of_image, &want_images[..dims])];
            let [text, image] = differences.map(|(found, want)| largest_difference(found, want));
            println!("{what}: picture's rows {rows:.1e}, vectors of texts {text:.1e}, of the picture {image:.1e}");
            assert!(text <= 1e-5 && image <= 1e-5, "{what}: texts {text:.1e}, picture {image:.1e}");
            let logits = logits(name, &of_image, &of_texts);
            let difference = largest_difference(&logits, &references.floats("logits_per_image")[..3]);
            assert!(difference <= 1e-3, "{what}: logits differ by {difference:.1e}");
            common::assert_tested(&device);
        }
    }
}

/// Similarities of a picture with texts by the files' scale and bias.
fn logits(name: &str, image: &[f32], texts: &[f32]) -> Vec<f32> {
    let weights = References::open(&folder(name).join("model.safetensors"));
    let scale = weights.floats("logit_scale")[0].exp();
    let bias = if weights.has("logit_bias") { weights.floats("logit_bias")[0] } else { 0.0 };
    let texts = texts.chunks_exact(image.len());
    texts.map(|text| scale * text.iter().zip(image).map(|(a, b)| a * b).sum::<f32>() + bias).collect()
}

/// Pictures from files: resizing differs from the processor's by a level here and there.
#[cfg(feature = "pictures")]
#[test]
fn pictures_from_files_are_near_their_references() {
    use tilewright::picture::PictureLimits;

    let pictures = ["a.png", "b.png", "c.png"].map(|name| {
        let path = common::data(&["pictures"]).expect("committed test data").join("pictures").join(name);
        Picture::decode(&std::fs::read(path).unwrap(), &PictureLimits::default()).unwrap()
    });
    for name in ["clip", "siglip2"] {
        let want = references(name).0.floats("image_embeds");
        let model = load(&Device::cpu(), &folder(name));
        let found = block_on(model.embed_images(&pictures)).unwrap();
        let dims = model.dims() as usize;
        for (i, (found, want)) in found.chunks_exact(dims).zip(want.chunks_exact(dims)).enumerate() {
            let distance = cosine_distance(found, want);
            println!("{name}: picture {i} by cosine {distance:.1e}");
            assert!(distance < 1e-5, "{name}: picture {i} by cosine {distance:.1e}");
        }
        let short = model.with_dims(Some(8)).unwrap();
        let cut = block_on(short.embed_images(&pictures[..1])).unwrap();
        assert!(cut.len() == 8 && (cut.iter().map(|x| x * x).sum::<f32>() - 1.0).abs() < 1e-5, "{cut:?}");
    }
}

/// Files that arrive in pieces, as in a browser, make the same encoders.
#[test]
fn files_in_pieces_make_the_same_encoders() {
    const FILES: [&str; 3] = ["model.safetensors", "config.json", "preprocessor_config.json"];
    for name in ["clip", "siglip2"] {
        let (references, texts) = references(name);
        let patches = first_patches(&references);
        let files = FILES.map(|file| (file.to_owned(), std::fs::read(folder(name).join(file)).unwrap()));
        for device in executors() {
            let whole = load(&device, &folder(name));
            let fed = |n: usize, options: EmbedOptions<'static>| {
                let names = FILES[..n].iter().map(|name| FileName { name: (*name).into(), size: None });
                let mut loader = Embedder::loader(&device, names.collect(), options).unwrap();
                common::push_all(&mut loader, &files[..n], &mut || 1000).unwrap();
                block_on(loader.finish()).unwrap()
            };
            let model = fed(3, EmbedOptions::default());
            let vectors = |model: &Embedder| {
                let of_texts = block_on(model.embed_tokens(&texts)).unwrap();
                (of_texts, block_on(model.embed_patches(std::slice::from_ref(&patches))).unwrap())
            };
            assert_eq!(vectors(&model), vectors(&whole), "{name} on {}", device.info().name);
            let plan = model.plan().unwrap();
            assert_eq!(plan, whole.plan().unwrap());
            // Both together exceed a limit that leaves room for texts.
            let alone = fed(3, EmbedOptions { texts_only: true, ..EmbedOptions::default() });
            let of_texts = alone.plan().unwrap();
            assert!(of_texts.weights_bytes < plan.weights_bytes);
            let limit = Some(plan.total_bytes() - 1);
            let limited = || EmbedOptions { memory_limit: limit, ..EmbedOptions::default() };
            let natively = Embedder::load(&device, folder(name), limited()).unwrap();
            let cases = [
                (alone, "embeds texts alone"),
                (fed(2, EmbedOptions::default()), "preprocessor_config.json"),
                (fed(3, limited()), "max_batch_tokens"),
                (natively, "max_batch_tokens"),
            ];
            for (model, reason) in cases {
                let message = model.images().err().unwrap().to_string();
                assert!(message.contains(reason), "{name}: {message}");
                assert_eq!(block_on(model.embed_tokens(&texts)).unwrap(), vectors(&whole).0);
                assert_eq!(model.plan().unwrap(), of_texts);
            }
        }
    }
}

#[test]
fn vectors_do_not_depend_on_the_batch() {
    for name in ["clip", "siglip2"] {
        let patches = first_patches(&references(name).0);
        let others = [1, 2, 3].map(|n| Patches {
            values: patches.values.iter().map(|value| value * n as f32 - 0.1).collect(),
            ..patches.clone()
        });
        let all: Vec<Patches> = [&others[0], &patches, &others[1], &others[2]].map(Patches::clone).to_vec();
        for device in executors() {
            let options = ImageOptions { max_batch_patches: Some(120), ..ImageOptions::default() };
            let images = ImageEmbedder::load(&device, folder(name), options).unwrap();
            assert_eq!(images.batch_len(), 3);
            let vectors = block_on(images.embed_patches(&all)).unwrap();
            let alone: Vec<f32> = all.iter().flat_map(|patches| embed_one(&images, patches)).collect();
            assert_eq!(vectors, alone, "{name} on {}", device.info().name);
            let plan = images.plan(3).unwrap();
            assert!(plan.total_bytes() > images.plan(1).unwrap().total_bytes());
            assert_eq!(images.n_dispatches(3).unwrap(), images.n_dispatches(1).unwrap());
        }
    }
}

/// CLIP's texts end with their first end token; SigLIP's are padded.
#[test]
fn what_follows_a_text_is_that_of_the_family() {
    let device = Device::cpu();
    let (_, texts) = references("clip");
    let model = load(&device, &folder("clip"));
    let with_tail = |text: &Tokens, tail: &[u32]| Tokens::from([&text.ids[..], tail].concat());
    let plain = block_on(model.embed_tokens(&texts)).unwrap();
    let tailed: Vec<Tokens> = texts.iter().map(|text| with_tail(text, &[7, 292, 1])).collect();
    assert_eq!(block_on(model.embed_tokens(&tailed)).unwrap(), plain);
    // OpenAI's files name another token, and mean the last one.
    let old = changed("clip", "old", ("config.json", "/text_config/eos_token_id", json!(2)));
    assert_eq!(block_on(load(&device, &old).embed_tokens(&tailed)).unwrap(), plain);
    let (_, texts) = references("siglip2");
    let model = load(&device, &folder("siglip2"));
    let unpadded: Vec<Tokens> = texts
        .iter()
        .map(|text| Tokens::from(text.ids.iter().copied().take_while(|&id| id != 0).collect::<Vec<u32>>()))
        .collect();
    assert!(unpadded.iter().all(|text| text.ids.len() < 24));
    assert_eq!(block_on(model.embed_tokens(&unpadded)).unwrap(), block_on(model.embed_tokens(&texts)).unwrap());
}

/// SigLIP 2 "naflex" is the same encoder over patches of any grid, whose values have another order.
#[test]
fn naflex_of_the_tables_grid_is_the_fixed_model() {
    let (references, _) = references("siglip2");
    let weight = "vision_model.embeddings.patch_embedding.weight";
    let turned = |bytes: Vec<u8>| {
        let index = Safetensors::parse(&bytes, bytes.len() as u64).unwrap();
        let tensor = index.tensor(weight).unwrap();
        let old = tensor.bytes(&bytes).unwrap();
        let n = SIDE * SIDE;
        // [C, 3, 8, 8] to [C, 8, 8, 3] of two bytes each.
        let at = |i: usize| {
            let (row, pixel, channel) = (i / (3 * n), i % (3 * n) / 3, i % 3);
            (row * 3 + channel) * n + pixel
        };
        let new: Vec<u8> = (0..old.len() / 2).flat_map(|i| old[2 * at(i)..][..2].to_vec()).collect();
        let (start, mut bytes) = (old.as_ptr() as usize - bytes.as_ptr() as usize, bytes.clone());
        bytes[start..][..new.len()].copy_from_slice(&new);
        bytes
    };
    let folder = copied("siglip2", "naflex", |file, bytes| match file {
        "model.safetensors" => turned(bytes),
        "config.json" => {
            let bytes = with_json(&bytes, "/vision_config/num_patches", json!(GRID * GRID));
            with_json(
                &with_json(&bytes, "/vision_config/model_type", json!("siglip2_vision_model")),
                "/model_type",
                json!("siglip2"),
            )
        }
        _ => json!({
            "image_processor_type": "Siglip2ImageProcessor", "patch_size": SIDE, "max_num_patches": 64,
            "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]
        })
        .to_string()
        .into_bytes(),
    });
    let patches = patches_of(&references.floats("image.0.pixel_values"), true);
    for device in executors() {
        let images = ImageEmbedder::load(&device, &folder, ImageOptions::default()).unwrap();
        let difference = largest_difference(&embed_one(&images, &patches), &references.floats("image_embeds")[..64]);
        assert!(difference <= 1e-5, "{difference:.1e}");
        // Grids of other sizes share a batch.
        let wide = |width, height| {
            let rgb = (0..3 * width * height).map(|i| (i * 7 % 251) as u8).collect();
            images.prepare(&Picture::new(width, height, rgb).unwrap()).unwrap()
        };
        let all = [wide(90, 20), patches.clone(), wide(31, 64)];
        assert!(all[0].grid != all[2].grid && all[0].grid != [6, 6]);
        let alone: Vec<f32> = all.iter().flat_map(|patches| embed_one(&images, patches)).collect();
        assert_eq!(block_on(images.embed_patches(&all)).unwrap(), alone);
    }
}

/// Each tensor and the activation matter: turned by one place, a tensor changes a vector.
#[test]
fn each_tensor_changes_a_vector() {
    let device = Device::cpu();
    for name in ["clip", "siglip2"] {
        let (references, texts) = references(name);
        let patches = first_patches(&references);
        let vectors = |path: &Path| {
            let model = load(&device, path);
            let mut all = block_on(model.embed_tokens(&texts)).unwrap();
            all.extend(embed_one(model.images().unwrap(), &patches));
            all
        };
        let want = vectors(&folder(name));
        let whole = std::fs::read(folder(name).join("model.safetensors")).unwrap();
        let index = Safetensors::parse(&whole, whole.len() as u64).unwrap();
        for tensor in &index.tensors {
            // Scale and bias of logits; a bias of keys adds the same to all scores.
            if tensor.name.starts_with("logit") || tensor.name.ends_with("k_proj.bias") {
                continue;
            }
            let path = copied(name, "rolled", |file, mut bytes| {
                if file == "model.safetensors" {
                    let start = tensor.bytes(&whole).unwrap().as_ptr() as usize - whole.as_ptr() as usize;
                    bytes[start..][..tensor.size_bytes as usize].rotate_left(2);
                }
                bytes
            });
            let difference = largest_difference(&vectors(&path), &want);
            assert!(difference > 1e-4, "{name}: {} changes {difference:.1e}", tensor.name);
        }
        for part in ["text_config", "vision_config"] {
            let path = changed(name, "gelu", ("config.json", &format!("/{part}/hidden_act"), json!("gelu")));
            let difference = largest_difference(&vectors(&path), &want);
            assert!(difference > 2e-5, "{name}: the activation of {part} changes {difference:.1e}");
        }
    }
}

#[test]
fn other_models_and_broken_encoders_are_refused() {
    let device = Device::cpu();
    let picture = [Picture::new(2, 2, vec![9; 12]).unwrap()];
    let refused = |model: &Embedder| block_on(model.embed_images(&picture)).err().unwrap().to_string();
    let texts_only = Embedder::load(
        &device,
        concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/encoders/nomic"),
        EmbedOptions::default(),
    );
    let message = refused(&texts_only.unwrap());
    assert!(message.contains("embeds texts alone") && message.contains("CLIP"), "{message}");
    // Texts do without an image encoder.
    let (_, texts) = references("clip");
    let config = "config.json";
    let no_file = changed("clip", "no_file", (config, "/projection_dim", json!(40)));
    std::fs::remove_file(no_file.join("preprocessor_config.json")).unwrap();
    for (path, named) in [
        (no_file, "preprocessor_config.json"),
        (changed("clip", "cropped", ("preprocessor_config.json", "/crop_size", json!(40))), "position_embedding"),
        (changed("siglip2", "headless", (config, "/vision_config/vision_use_head", json!(false))), "vision_use_head"),
        (changed("clip", "heads", (config, "/vision_config/num_attention_heads", json!(7))), "num_attention_heads"),
        (changed("clip", "act", (config, "/vision_config/hidden_act", json!("relu"))), "hidden_act"),
        (changed("clip", "unknown", (config, "/vision_config/gate", json!(3))), "gate"),
    ] {
        let model = load(&device, &path);
        let message = refused(&model);
        assert!(message.contains(named) && message.contains("cannot be loaded"), "{named}: {message}");
        assert!(block_on(model.embed_tokens(&texts[..1])).is_ok(), "{named}");
    }
    // A folder of the image encoder alone.
    let alone = changed("clip", "alone", (config, "/text_config/model_type", json!("clip_vision_model")));
    let error = Embedder::load(&device, &alone, EmbedOptions::default()).err().unwrap().to_string();
    assert!(error.contains("text encoder beside the image encoder"), "{error}");
    // No model for answers.
    let error = Model::load(&device, folder("clip"), tilewright::LoadOptions::default()).err().unwrap().to_string();
    assert!(error.contains("an encoder"), "{error}");
    // Patches of another model.
    let images = ImageEmbedder::load(&device, folder("clip"), ImageOptions::default()).unwrap();
    let patches = first_patches(&references("clip").0);
    for (broken, named) in [
        (Patches { patch_dim: 12, ..patches.clone() }, "patches"),
        (Patches { values: vec![0.0; 5], ..patches.clone() }, "values"),
        (Patches { grid: [5, 7], ..patches.clone() }, "patches"),
        (Patches { values: patches.values.iter().map(|_| f32::NAN).collect(), ..patches.clone() }, "vectors"),
    ] {
        let error = block_on(images.embed_patches(&[patches.clone(), broken])).err().unwrap();
        assert!(matches!(&error, Error::InRecord { record: 1, .. }) && error.to_string().contains(named), "{error}");
    }
    let none = ImageOptions { max_batch_patches: Some(0), ..ImageOptions::default() };
    let error = ImageEmbedder::load(&device, folder("clip"), none).err().unwrap().to_string();
    assert!(error.contains("max_batch_patches"), "{error}");
}
