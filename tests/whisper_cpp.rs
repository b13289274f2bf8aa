//! Files of whisper.cpp, written here from Hugging Face folders: the same logits, tokens and texts.

use std::path::{Path, PathBuf};

use half::f16;
use serde_json::Value as Json;
use tilewright::formats::BlockType;
use tilewright::formats::safetensors::Safetensors;
use tilewright::kernels::KvType;
use tilewright::load::{FileName, SpeechFile};
use tilewright::sound::{Sound, SoundLimits, Spectrogram};
use tilewright::transcribe::SpeechModel;
use tilewright::{TranscribeOptions, Transcriber, TranscriberOptions};

use crate::common::{self, block_on, largest_difference};

/// Names in a folder, in the order in which they are replaced, and those of OpenAI's `whisper`.
const NAMES: [(&str, &str); 17] = [
    ("model.", ""),
    (".layers.", ".blocks."),
    ("self_attn_layer_norm", "attn_ln"),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    ("self_attn.", "attn."),
    ("encoder_attn.", "cross_attn."),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp.0"),
    ("fc2", "mlp.2"),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
];

fn json(path: PathBuf) -> Json {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A byte of GPT-2's spelling.
fn byte(c: char) -> u8 {
    let plain = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others: Vec<u8> = (0..=255).filter(|byte| !plain(byte)).collect();
    u8::try_from(u32::from(c)).unwrap_or_else(|_| others[c as usize - 256])
}

/// Values of half precision as Q8_0: blocks of 32 bytes with a scale.
fn q8_0(bytes: &[u8]) -> Vec<u8> {
    let values: Vec<f32> = bytes.chunks_exact(2).map(|half| f16::from_le_bytes([half[0], half[1]]).to_f32()).collect();
    let block = |values: &[f32]| {
        let scale = values.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0;
        let quants = values.iter().map(move |x| if scale > 0.0 { (x / scale).round() as i8 as u8 } else { 0 });
        f16::from_f32(scale).to_le_bytes().into_iter().chain(quants).collect::<Vec<u8>>()
    };
    values.chunks_exact(32).flat_map(block).collect()
}

/// The folder's model as a file of whisper.cpp, with its matrices in Q8_0 if `quantized`.
fn as_ggml(folder: &Path, quantized: bool) -> Vec<u8> {
    let (config, tokenizer) = (json(folder.join("config.json")), json(folder.join("tokenizer.json")));
    let number = |key: &str| config[key].as_u64().unwrap() as u32;
    let mut out: Vec<u8> = b"lmgg".to_vec();
    let mut put = |number: u32| out.extend(number.to_le_bytes());
    for key in ["vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers"] {
        put(number(key));
    }
    for key in ["max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins"] {
        put(number(key));
    }
    // Type of the file, filters of one band, which no one reads.
    [1, 1, 2, 0, 0].into_iter().for_each(&mut put);
    let added: Vec<&str> =
        tokenizer["added_tokens"].as_array().unwrap().iter().map(|token| token["content"].as_str().unwrap()).collect();
    let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
    let mut tokens: Vec<_> = vocab.iter().filter(|(text, _)| !added.contains(&text.as_str())).collect();
    tokens.sort_by_key(|(_, id)| id.as_u64());
    put(tokens.len() as u32);
    for (text, _) in tokens {
        let bytes: Vec<u8> = text.chars().map(byte).collect();
        out.extend((bytes.len() as u32).to_le_bytes());
        out.extend(bytes);
    }
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    for tensor in &Safetensors::parse(&file, file.len() as u64).unwrap().tensors {
        let name = NAMES.iter().fold(tensor.name.clone(), |name, (theirs, openai)| name.replace(theirs, openai));
        let bytes = tensor.bytes(&file).unwrap();
        let (kind, bytes) = match tensor.block_type {
            BlockType::F16 if quantized && tensor.shape.len() == 2 && name.ends_with("weight") => (8u32, q8_0(bytes)),
            BlockType::F16 => (1, bytes.to_vec()),
            // The high half of a float.
            BlockType::BF16 => (0, bytes.chunks_exact(2).flat_map(|half| [0, 0, half[0], half[1]]).collect()),
            other => panic!("{other}"),
        };
        let mut shape = tensor.shape.clone();
        if name.contains("conv") && name.ends_with("bias") {
            shape.push(1);
        }
        for number in [shape.len() as u32, name.len() as u32, kind] {
            out.extend(number.to_le_bytes());
        }
        shape.iter().rev().for_each(|&dim| out.extend((dim as u32).to_le_bytes()));
        out.extend(name.as_bytes());
        out.extend(bytes);
    }
    out
}

/// A file that is removed at the end.
struct Written(PathBuf);

impl Written {
    fn new(name: &str, bytes: &[u8]) -> Written {
        let path = std::env::temp_dir().join(format!("tilewright-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Written(path)
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn samples(path: PathBuf) -> Vec<f32> {
    Sound::decode(&std::fs::read(path).unwrap(), &SoundLimits::default()).unwrap().samples().to_vec()
}

#[test]
fn ggml_files_have_the_logits_of_their_folder() {
    let Some(data) = common::data(&["tiny-random-sound"]) else { return };
    let folder = data.join("tiny-random-sound");
    let bytes = as_ggml(&folder, false);
    let file = Written::new("ggml-tiny.bin", &bytes);
    assert!(SpeechFile::is_of_speech(&file.0));
    let sound = samples(folder.join("chirp.wav"));
    let frames = Spectrogram::new(&sound, 80, 300).unwrap().frames(0, 300);
    let logits = |path: &Path| {
        let options = TranscriberOptions { kv_type: KvType::F32, ..TranscriberOptions::default() };
        let mut session = SpeechModel::load(&common::cpu(), path, options).unwrap().session(1).unwrap();
        block_on(session.hear(0, &frames)).unwrap();
        block_on(session.logits(0, &[1, 3, 6, 142])).unwrap()
    };
    // The same numbers in other types are added in another order.
    let off = largest_difference(&logits(&file.0), &logits(&folder));
    assert!(off < 1e-5, "{off}");
    // The random model has other tokens than published ones.
    let error = SpeechFile::open(&file.0).unwrap().tokenizer.unwrap_err().to_string();
    assert!(error.contains("n_vocab is 293, expected 1509 to 1609 more than the "), "{error}");
    let refused = |name: &str, bytes: &[u8]| {
        let file = Written::new(name, bytes);
        let error = SpeechFile::open(&file.0).err().unwrap().to_string();
        assert!(error.contains(name), "{error}");
        error
    };
    let error = refused("ggml-cut.bin", &bytes[..bytes.len() - 1]);
    assert!(
        error.contains("ggml: tensor `") && error.contains("expected dimensions within the file's last "),
        "{error}"
    );
    let error = refused("ggml-head.bin", &bytes[..40]);
    assert!(error.contains("the file ends after 40 bytes, but its header needs at least 44"), "{error}");
    // The same as they arrive.
    let arriving = |bytes: &[u8], size, longest| {
        let files = [("ggml-tiny.bin".to_owned(), bytes.to_vec())];
        let names = vec![FileName { name: files[0].0.clone(), size }];
        let mut loader = Transcriber::loader(&common::cpu(), names, TranscriberOptions::default()).unwrap();
        common::push_all(&mut loader, &files, &mut || longest).unwrap_err().to_string()
    };
    let (all, cut) = (Some(bytes.len() as u64), Some(bytes.len() as u64 - 1));
    for longest in [11, 1000, usize::MAX] {
        let error = arriving(&bytes, all, longest);
        assert!(error.contains("ggml-tiny.bin") && error.contains("n_vocab is 293"), "{error}");
        assert!(arriving(&bytes, None, longest).contains("n_vocab is 293"));
        let error = arriving(&bytes[..bytes.len() - 1], cut, longest);
        assert!(error.contains("ggml: tensor `") && error.contains("within the file's last "), "{error}");
        let error = arriving(&bytes[..40], None, longest);
        assert!(error.contains("the file ends after 40 bytes"), "{error}");
        let error = arriving(b"GGUF and so on", None, longest);
        assert!(error.contains("a Hugging Face folder of a Whisper model"), "{error}");
    }
    let error = refused("no-ggml.bin", b"GGUF and so on");
    assert!(error.contains("supported: a Hugging Face folder of a Whisper model"), "{error}");
    // Hostile numbers at any place are errors, or read.
    for at in (4..bytes.len().min(9000)).step_by(61) {
        let mut wrong = bytes.clone();
        wrong[at] ^= 0xff;
        let file = Written::new("ggml-hostile.bin", &wrong);
        let _ = SpeechFile::open(&file.0).map(|file| file.size_bytes());
    }
}

#[test]
fn ggml_files_have_the_tokens_and_texts_of_their_folder() {
    let Some(data) = common::data(&["whisper-tiny.en", "speech"]) else { return };
    let folder = data.join("whisper-tiny.en");
    let path = Written::new("ggml-tiny.en.bin", &as_ggml(&folder, true));
    let (file, want) = (SpeechFile::open(&path.0).unwrap(), SpeechFile::open(&folder).unwrap());
    let [found, theirs] = [&file, &want].map(|file| file.tokenizer.as_ref().unwrap());
    for text in [
        "The quick brown fox's den, 1984!",
        "  caf\u{e9} \u{65e5}\u{672c}\u{8a9e} \u{1f600}\n",
        "antidisestablishmentarianism (x==y)",
    ] {
        let ids = found.encode(text, false).unwrap();
        assert_eq!(ids, theirs.encode(text, false).unwrap(), "{text:?}");
        assert_eq!(found.decode(&ids, true).unwrap(), text);
    }
    for name in ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|nospeech|>", "<|notimestamps|>"] {
        let ids = [found, theirs].map(|of| of.special_id(name));
        assert!(ids[0] == ids[1] || name == "<|nospeech|>", "{name}: {ids:?}");
    }
    let sorted = |file: &SpeechFile| {
        let mut ids = file.generation.suppressed.clone();
        ids.retain(|&id| id < file.generation.end_id.unwrap());
        ids.sort_unstable();
        ids
    };
    assert_eq!(sorted(&file), sorted(&want));
    let sound = samples(data.join("speech/bridge.wav"));
    let text = |path: &Path| {
        let mut transcriber = Transcriber::load(&common::cpu(), path, TranscriberOptions::default()).unwrap();
        block_on(transcriber.transcribe(&sound, &TranscribeOptions::default())).unwrap()
    };
    let (found, want) = (text(&path.0), text(&folder));
    assert_eq!(found.text, want.text);
    // The same as they arrive.
    let files = [("ggml-tiny.en.bin".to_owned(), std::fs::read(&path.0).unwrap())];
    let names = vec![FileName { name: files[0].0.clone(), size: None }];
    let mut loader = Transcriber::loader(&common::cpu(), names, TranscriberOptions::default()).unwrap();
    common::push_all(&mut loader, &files, &mut || 1 << 20).unwrap();
    let mut transcriber = block_on(loader.finish()).unwrap();
    assert_eq!(transcriber.name(), "ggml-tiny.en");
    assert_eq!(block_on(transcriber.transcribe(&sound, &TranscribeOptions::default())).unwrap(), found);
}
