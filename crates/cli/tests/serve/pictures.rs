//! `/v1/embeddings` with pictures: the library's vectors, in the forms of Jina's and vLLM's requests.

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value as Json, json};
use tilewright::picture::{Picture, PictureLimits};
use tilewright::{Device, EmbedOptions, Embedder};
use tilewright_serve::{Loaded, ModelSpec, ServerOptions};

use super::client::{done, post};
use super::common::{self, block_on};
use super::server::{Running, embedder, start};

/// CLIP with a small vocabulary of words.
fn folder() -> PathBuf {
    let data = common::data(&["tiny-random-pictures", "encoders"]).expect("committed test data");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve_pictures");
    std::fs::create_dir_all(&folder).unwrap();
    for file in ["model.safetensors", "preprocessor_config.json"] {
        std::fs::copy(data.join("tiny-random-pictures/clip").join(file), folder.join(file)).unwrap();
    }
    std::fs::copy(data.join("encoders/nomic/tokenizer.json"), folder.join("tokenizer.json")).unwrap();
    let config = std::fs::read(data.join("tiny-random-pictures/clip/config.json")).unwrap();
    let mut config: Json = serde_json::from_slice(&config).unwrap();
    config["text_config"]["eos_token_id"] = 3.into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

fn file(name: &str) -> Vec<u8> {
    let data = common::data(&["pictures"]).expect("committed test data");
    std::fs::read(data.join("pictures").join(name)).unwrap()
}

fn base64(name: &str) -> String {
    BASE64_STANDARD.encode(file(name))
}

fn server() -> (Running, Embedder) {
    let clip = Embedder::load(&Device::cpu(), folder(), EmbedOptions::default()).unwrap();
    let served = clip.clone();
    let models = vec![
        ModelSpec::new("clip", 1 << 20, move || Ok(Loaded::Embedder(served.clone()))),
        ModelSpec::new("nomic", 1 << 20, || embedder().map(Loaded::Embedder)),
    ];
    (start(models, ServerOptions::default()), clip)
}

#[test]
fn pictures_and_texts_have_the_librarys_vectors() {
    let (server, clip) = server();
    let ask = |asked: Json| {
        let answer = done(server.address, "/v1/embeddings", asked).json();
        let vectors = answer["data"].as_array().unwrap().iter();
        let vectors: Vec<Vec<f32>> =
            vectors.map(|one| serde_json::from_value(one["embedding"].clone()).unwrap()).collect();
        (vectors, answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize)
    };
    let decoded = ["a.png", "turned.jpg"].map(|name| Picture::decode(&file(name), &PictureLimits::default()).unwrap());
    let rows = |all: Vec<f32>| all.chunks_exact(40).map(<[f32]>::to_vec).collect::<Vec<_>>();
    let pictures = rows(block_on(clip.embed_images(&decoded)).unwrap());
    let texts = rows(block_on(clip.embed(&["a quiet river", "the city"])).unwrap());
    let n_tokens = |text: &str| clip.encode(text).unwrap().ids.len();

    // Jina's, in the order given: 36 patches of each picture.
    let url = format!("data:image/jpeg;base64,{}", base64("turned.jpg"));
    let input = json!([{"image": base64("a.png")}, "a quiet river", {"image": url}, {"text": "the city"}]);
    let (found, n) = ask(json!({"model": "clip", "input": input}));
    assert_eq!(found, [&pictures[0], &texts[0], &pictures[1], &texts[1]].map(Clone::clone));
    assert_eq!(n, 2 * 36 + n_tokens("a quiet river") + n_tokens("the city"));
    let (short, _) = ask(json!({"model": "clip", "input": [{"image": base64("a.png")}], "dimensions": 8}));
    assert_eq!(short[0], tilewright::embed::shortened(&pictures[0], 40, 8, true));

    // vLLM's.
    let of = |content: Json| ask(json!({"model": "clip", "messages": [{"role": "user", "content": content}]})).0;
    assert_eq!(of(json!([{"type": "image_url", "image_url": {"url": url}}])), pictures[1..]);
    assert_eq!(of(json!([{"type": "text", "text": "a quiet river"}])), texts[..1]);
    assert_eq!(of(json!("the city")), texts[1..]);
}

#[test]
fn what_is_no_picture_is_refused_by_name() {
    let (server, _) = server();
    let picture = base64("a.png");
    let image = |value: &str| json!({"input": ["a", {"image": value}]});
    let message = |content: Json| json!({"messages": [{"role": "user", "content": content}]});
    let part = json!({"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{picture}")}});
    let sound = json!({"type": "input_audio", "input_audio": {"data": picture, "format": "wav"}});
    let address = json!([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]);
    for (asked, param, named) in [
        (image("https://example.org/a.png"), "input[1].image", "does not fetch"),
        (image("data:image/png,AAAA"), "input[1].image", "data URL"),
        (image("no base64!"), "input[1]", "base64"),
        (image(&BASE64_STANDARD.encode("<svg/>")), "input[1]", "expected"),
        (image(&picture[..picture.len() / 2 / 4 * 4]), "input[1]", "input[1]: "),
        (json!({"input": [{"image": picture, "text": "a"}]}), "input[0]", "expected"),
        (json!({"input": [{"image": picture, "text": 5}]}), "input[0]", "expected"),
        (json!({"input": [{"video": "a"}]}), "input[0]", "expected"),
        (json!({"input": {"image": picture}}), "input", "expected"),
        (json!({"input": vec![json!({"image": picture}); 33]}), "input", "33 pictures, over 32"),
        (message(address), "messages[0].content[0].image_url", "does not fetch"),
        (message(json!([part, part])), "messages[0].content", "2 parts"),
        (message(json!([sound])), "messages[0].content", "is a sound"),
        (message(json!(null)), "messages[0].content", "expected"),
        (json!({"messages": []}), "messages", "one message"),
        (json!({"messages": [{"role": "user", "content": "a"}], "input": "a"}), "messages", "either"),
        (json!({"encoding_format": "float"}), "input", "missing"),
    ] {
        let mut asked = asked;
        asked["model"] = json!("clip");
        let refused = post(server.address, "/v1/embeddings", &asked);
        let error = &refused.json()["error"];
        let message = error["message"].as_str().unwrap_or_default();
        assert_eq!((refused.status, &error["param"]), (400, &json!(param)), "{message}");
        assert!(message.contains(named), "{named}: {message}");
    }
    let asked = json!({"model": "nomic", "input": [{"image": picture}]});
    let refused = post(server.address, "/v1/embeddings", &asked).json();
    let message = refused["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("input[0]: ") && message.contains("embeds texts alone"), "{message}");
}
