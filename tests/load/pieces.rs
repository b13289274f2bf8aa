//! Models loaded from streamed pieces, and GGUF files in several shards.

use std::fs;

use tilewright::kernels::KvType;
use tilewright::load::FileName;
use tilewright::{Device, Error, GenerateOptions, LoadOptions, Model};

use super::builder::{U32, text};
use super::common::{self, Rng, block_on, shared};
use super::{Folder, STRING, TinyGguf, VOCAB, config_json, encode, index, load, logits, published, sharded, weights};

/// A file's name and contents.
type Content = (String, Vec<u8>);

/// Loads files in pieces of lengths from `next_len`, with sizes known in advance or not.
fn in_pieces(
    device: &Device,
    files: &[Content],
    tell_sizes: bool,
    mut next_len: impl FnMut() -> usize,
) -> Result<Model, Error> {
    let size = |content: &[u8]| tell_sizes.then_some(content.len() as u64);
    let names = files.iter().map(|(name, content)| FileName { name: name.clone(), size: size(content) }).collect();
    let mut loader = Model::loader(device, names, LoadOptions { kv_type: KvType::F32, ..LoadOptions::default() })?;
    common::push_all(&mut loader, files, &mut next_len)?;
    block_on(loader.finish())
}

/// Every packed type, and rows with scales in words shared with the next row.
fn quantised() -> TinyGguf {
    let mut tiny = TinyGguf::new();
    for (i, weight) in weights().into_iter().enumerate().filter(|(_, weight)| weight.shape.len() == 2) {
        let type_number = [8, 8, 1, 30, 0][i % 5];
        tiny.put(&weight.gguf, weight.shape, type_number, encode(&weight.values, type_number));
    }
    tiny
}

fn content(folder: &Folder, names: &[&str]) -> Vec<Content> {
    names.iter().map(|name| (name.to_string(), fs::read(folder.0.join(name)).unwrap())).collect()
}

/// Random lengths up to `longest`.
fn lengths(longest: usize, seed: u64) -> impl FnMut() -> usize {
    let mut rng = Rng::new(seed);
    move || 1 + rng.below(longest)
}

#[test]
fn model_loaded_in_pieces_gives_equal_logits() {
    let devices = shared::executors();
    let (folder, shards) = (published(), sharded());
    let shard_names = ["config.json", super::INDEX, super::SHARDS[0], super::SHARDS[1]];
    for device in &devices {
        let gguf = |tiny: &TinyGguf| vec![("model.gguf".to_string(), tiny.bytes())];
        let models = [
            (gguf(&TinyGguf::new()), logits(&TinyGguf::new().model(device))),
            (gguf(&quantised()), logits(&quantised().model(device))),
            (content(&folder, &["config.json", "model.safetensors"]), logits(&load(device, &folder.0).unwrap())),
            (content(&shards, &shard_names), logits(&load(device, &shards.0).unwrap())),
        ];
        for (files, want) in &models {
            for (round, longest) in [7, 60, 500, 5000, 1 << 30].into_iter().enumerate() {
                let model = in_pieces(device, files, round % 2 == 0, lengths(longest, round as u64)).unwrap();
                assert_eq!(&logits(&model), want, "{} in pieces of up to {longest}", files[0].0);
            }
        }
    }
}

#[test]
fn rope_frequency_factors_may_lie_anywhere_in_the_file() {
    let device = common::cpu();
    let factors = encode(&[1.0, 2.0, 4.0, 8.0], 0);
    let mut last = TinyGguf::new();
    last.put("rope_freqs.weight", &[4], 0, factors.clone());
    let mut first = TinyGguf { data: Vec::new(), ..last.clone() };
    let tensors = std::mem::take(&mut first.file.tensors);
    for (tensor, data) in tensors.into_iter().zip(last.data.clone()).rev() {
        first.file.tensors.push(tensor);
        first.data.push(data);
    }
    let want = logits(&last.model(&device));
    assert_ne!(want, logits(&TinyGguf::new().model(&device)));
    for tiny in [first, last] {
        let files = [("model.gguf".to_string(), tiny.bytes())];
        assert_eq!(logits(&in_pieces(&device, &files, true, lengths(300, 3)).unwrap()), want);
    }
}

/// The tiny model split into three GGUF files, as by llama.cpp's splitter.
fn split() -> Vec<TinyGguf> {
    let whole = TinyGguf::new();
    let mut shards: Vec<TinyGguf> = (0..3u16)
        .map(|no| {
            let mut shard = if no == 0 { whole.clone() } else { TinyGguf::new() };
            if no > 0 {
                shard.file.entries.clear();
                shard.set("general.architecture", STRING, text("llama"));
            }
            (shard.file.tensors, shard.data) = Default::default();
            shard.set("split.no", U32, u32::from(no).to_le_bytes());
            shard.set("split.count", U32, 3u32.to_le_bytes());
            shard
        })
        .collect();
    for (i, (tensor, data)) in whole.file.tensors.into_iter().zip(whole.data).enumerate() {
        shards[i % 3].file.tensors.push(tensor);
        shards[i % 3].data.push(data);
    }
    shards
}

#[test]
fn split_gguf_loads_as_one_model() {
    let device = common::cpu();
    let want = logits(&TinyGguf::new().model(&device));
    let folder = Folder::new();
    let names: Vec<String> = (1..=3).map(|no| format!("tiny-{no:05}-of-00003.gguf")).collect();
    for (name, shard) in names.iter().zip(split()) {
        folder.write(name, shard.bytes());
    }
    assert_eq!(logits(&load(&device, &folder.0.join(&names[0])).unwrap()), want);
    let mut files = content(&folder, &names.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(logits(&in_pieces(&device, &files, true, lengths(900, 5)).unwrap()), want);

    let refused = |files: &[Content], named: &str| {
        let error = in_pieces(&device, files, true, || 1 << 30).err().unwrap().to_string();
        assert!(error.contains(named), "{error}");
    };
    refused(&files[..2], "split.count");
    files.swap(1, 2);
    refused(&files, "split.no");
    let odd = folder.write("odd.gguf", fs::read(folder.0.join(&names[1])).unwrap());
    let error = load(&device, &odd).err().unwrap().to_string();
    assert!(error.contains("split.count") && error.contains("-00001-of-00003"), "{error}");
    fs::remove_file(folder.0.join(&names[2])).unwrap();
    let error = load(&device, &folder.0.join(&names[0])).err().unwrap().to_string();
    assert!(error.contains(&names[2]), "{error}");
}

/// Any shard identifies all, however its name is written, and so does a link to one.
#[test]
fn any_shard_leads_to_all_others() {
    let device = common::cpu();
    let want = logits(&TinyGguf::new().model(&device));
    let found = |path: &std::path::Path| match load(&device, path) {
        Ok(model) => assert_eq!(logits(&model), want, "{}", path.display()),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    let named = |names: [&str; 3]| {
        let folder = Folder::new();
        let paths =
            names.iter().zip(split()).map(|(name, shard)| folder.write(name, shard.bytes())).collect::<Vec<_>>();
        (folder, paths)
    };
    for names in [
        ["t-00001-of-00003.gguf", "t-00002-of-00003.gguf", "t-00003-of-00003.gguf"],
        ["T-00001-OF-00003.GGUF", "T-00002-OF-00003.GGUF", "T-00003-OF-00003.GGUF"],
        ["t-00001-of-00003.GGUF", "t-00002-of-00003.gguf", "T-00003-of-00003.Gguf"],
    ] {
        let (_folder, paths) = named(names);
        paths.iter().for_each(|path| found(path));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        // As in a hub's cache: links have the file names, blobs have others.
        let (blobs, contents) = named(["0a", "1b", "2c"]);
        let links = Folder::new();
        for (no, content) in contents.iter().enumerate() {
            symlink(content, links.0.join(format!("t-{:05}-of-00003.gguf", no + 1))).unwrap();
        }
        found(&links.0.join("t-00001-of-00003.gguf"));
        found(&links.0.join("t-00003-of-00003.gguf"));
        // A relative link with an uninformative name to one of these links; and one to the wrong number.
        for (name, no) in [("latest", 1), ("latest.gguf", 2), ("x-00001-of-00003.gguf", 3)] {
            let link = blobs.0.join(name);
            let target = format!("../{}/t-{no:05}-of-00003.gguf", links.0.file_name().unwrap().to_str().unwrap());
            symlink(target, &link).unwrap();
            found(&link);
        }
        // The same for a folder.
        let folder = sharded();
        let link = links.0.join("model");
        symlink(folder.0.join("model-00001-of-00002.safetensors"), &link).unwrap();
        let model = load(&device, &link).unwrap();
        assert_eq!(logits(&model), logits(&load(&device, &folder.0).unwrap()));
    }
}

#[test]
fn truncated_files_are_refused_at_every_length() {
    let device = common::cpu();
    let whole = TinyGguf::new().bytes();
    for len in (0..whole.len()).step_by(997).chain([whole.len() - 1]) {
        for tell_sizes in [false, true] {
            let files = [("model.gguf".to_string(), whole[..len].to_vec())];
            let error = in_pieces(&device, &files, tell_sizes, || 4096).err().unwrap();
            assert!(matches!(error.code(), "truncated" | "format"), "{len} bytes: {error}");
            assert!(error.to_string().starts_with("model.gguf: "), "{error}");
        }
    }
    let folder = published();
    let mut files = content(&folder, &["config.json", "model.safetensors"]);
    files[1].1.pop();
    assert!(in_pieces(&device, &files, false, || 4096).is_err());
    files.remove(1);
    assert!(in_pieces(&device, &files, true, || 4096).err().unwrap().to_string().contains("model.safetensors"));
    assert!(Model::loader(&device, Vec::new(), LoadOptions::default()).is_err());
}

#[test]
fn failed_loader_frees_its_buffers() {
    let Some(device) = common::gpu(None) else { return };
    // Runs the rest of the self-test elsewhere: it allocates buffers too.
    let _ = common::gpu(None).map(|other| TinyGguf::new().model(&other));
    let mut bytes = TinyGguf::new().bytes();
    bytes.truncate(bytes.len() - 100);
    let files = [("model.gguf".to_string(), bytes)];
    assert!(in_pieces(&device, &files, false, || 1000).is_err());
    let before = device.counters();
    let model = TinyGguf::new().model(&device);
    let after = device.counters() - before;
    // The failed attempt returned its buffers to the pool.
    assert!(after.pool_hits > after.pool_misses, "{after:?}");
    assert_eq!(model.config().vocab_size, VOCAB as u32);
}

#[test]
fn folder_files_are_accepted_in_any_order() {
    let device = common::cpu();
    let folder = sharded();
    let files = [
        (super::SHARDS[1].to_string(), fs::read(folder.0.join(super::SHARDS[1])).unwrap()),
        ("README.md".to_string(), b"read me".to_vec()),
        (super::INDEX.to_string(), index().to_string().into_bytes()),
        (super::SHARDS[0].to_string(), fs::read(folder.0.join(super::SHARDS[0])).unwrap()),
        ("config.json".to_string(), config_json().to_string().into_bytes()),
    ];
    let model = in_pieces(&device, &files, true, lengths(700, 9)).unwrap();
    let mut session = model.session().unwrap();
    let mut generation = session.generate_ids(&super::PROMPT, &GenerateOptions::greedy(3)).unwrap();
    assert!(block_on(generation.next()).unwrap().is_ok());
    assert_eq!(logits(&model), logits(&load(&device, &folder.0).unwrap()));
}
