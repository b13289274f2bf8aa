//! llama.cpp's API.

use std::sync::Arc;

use serde_json::{Value as Json, json};
use tilewright::engine::EngineOptions;
use tilewright::load::ModelFile;
use tilewright::tokenizer::EncodeOptions;
use tilewright::{Device, GenerateOptions, LoadOptions, Model};
use tilewright_serve::{Decoder, Loaded, ModelSpec, ServerOptions};

use super::client::{Answer, done, get, post};
use super::endpoints::{PROMPT, told};
use super::scripted::{self, Says};
use super::server::{own, shared, start};

/// The parts of a stream, which has no mark at its end.
fn parts_of(answer: &Answer) -> Vec<Json> {
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let text = answer.text();
    let data = text.split("\n\n").filter(|event| !event.is_empty()).map(|event| event.strip_prefix("data: ").unwrap());
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

#[test]
fn completion_matches_the_model_whole_and_streamed() {
    let (text, ids) = told(false, &GenerateOptions::greedy(12));
    let ask = |more: Json| {
        let mut asked = json!({"model": "plain", "prompt": PROMPT, "n_predict": 12, "temperature": 0});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        done(shared(), "/completion", asked)
    };
    let model = Model::builtin(&Device::cpu()).unwrap();
    let prompt = model.encode(PROMPT).unwrap();
    let whole = ask(json!({"return_tokens": true, "n_probs": 2})).json();
    for (field, value) in [
        ("content", json!(text)),
        ("tokens", json!(ids)),
        ("stop", json!(true)),
        ("stop_type", json!("limit")),
        ("stopping_word", json!("")),
        ("truncated", json!(false)),
        ("model", json!("plain")),
        ("prompt", json!(model.tokenizer().unwrap().decode(&prompt, false).unwrap())),
        ("tokens_predicted", json!(12)),
        ("tokens_evaluated", json!(prompt.len())),
    ] {
        assert_eq!(whole[field], value, "{field}");
    }
    assert_eq!(whole["generation_settings"]["n_predict"], json!(12));
    assert_eq!(whole["generation_settings"]["top_k"], json!(40));
    assert_eq!(whole["timings"]["predicted_n"], json!(12));
    let probabilities = whole["completion_probabilities"].as_array().unwrap();
    assert_eq!(json!(probabilities.iter().map(|token| &token["id"]).collect::<Vec<_>>()), json!(ids));
    for token in probabilities {
        // Greedy: the most likely token first.
        assert_eq!(
            (&token["top_logprobs"][0]["id"], token["top_logprobs"].as_array().unwrap().len()),
            (&token["id"], 2)
        );
    }

    let parts = parts_of(&ask(json!({"stream": true, "timings_per_token": true})));
    let (last, others) = parts.split_last().unwrap();
    assert!(others.iter().all(|part| part["stop"] == false && part["timings"].is_object()));
    assert_eq!(others.iter().map(|part| part["content"].as_str().unwrap()).collect::<String>(), text);
    let streamed: Vec<&Json> = others.iter().flat_map(|part| part["tokens"].as_array().unwrap()).collect();
    assert_eq!(json!(streamed), json!(ids));
    for field in ["stop", "stop_type", "model", "tokens_predicted", "tokens_evaluated", "prompt"] {
        assert_eq!(last[field], whole[field], "{field}");
    }

    let stop = &text[10..14];
    let stopped = ask(json!({"stop": ["zebra", stop]})).json();
    assert_eq!((&stopped["stop_type"], &stopped["stopping_word"]), (&json!("word"), &json!(stop)));
    assert_eq!(stopped["content"], json!(text[..text.find(stop).unwrap()]));
    let (begin, rest) = prompt.split_at(4);
    let rest = model.tokenizer().unwrap().decode(rest, false).unwrap();
    let mixed: Vec<Json> = begin.iter().map(|id| json!(id)).chain([json!(rest)]).collect();
    assert_eq!(ask(json!({"prompt": prompt})).json()["content"], json!(text));
    assert_eq!(
        ask(json!({"prompt": mixed})).json()["tokens_evaluated"].as_u64().unwrap().abs_diff(prompt.len() as u64),
        0
    );
    let several =
        ask(json!({"prompt": [PROMPT, prompt], "response_fields": ["content", "generation_settings/seed"]})).json();
    let [a, b] = several.as_array().unwrap().as_slice() else { panic!("{several}") };
    assert!(
        a == b
            && a["content"] == json!(text)
            && a["seed"].as_u64().unwrap() < u64::from(u32::MAX)
            && a.as_object().unwrap().len() == 2,
        "{a}"
    );
    let formed = ask(json!({"json_schema": {"enum": ["Rome"]}})).json();
    assert_eq!((&formed["content"], &formed["stop_type"]), (&json!("\"Rome\""), &json!("eos")));
    assert_eq!(ask(json!({"grammar": "root ::= \"Oslo\""})).json()["content"], json!("Oslo"));
    let banned = ask(json!({"logit_bias": [[ids[0], false]], "return_tokens": true})).json();
    assert_ne!(banned["tokens"][0], json!(ids[0]));
    assert_eq!(ask(json!({"cache_prompt": false})).json()["timings"]["cache_n"], json!(0));

    // llama.cpp's own default settings may come back.
    let defaults = get(shared(), "/props?model=plain").json()["default_generation_settings"]["params"].clone();
    let mut asked = defaults.as_object().unwrap().clone();
    asked.insert("stream".into(), false.into());
    asked.insert("n_predict".into(), 2.into());
    ask(Json::Object(asked));
    let usual = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];
    ask(json!({"samplers": usual, "penalize_nl": false, "image_data": [], "bad_words": [], "detokenize": true}));
    for (more, says) in [
        (json!({"samplers": ["penalties", "top_p", "top_k", "min_p", "temperature"]}), "samplers"),
        (json!({"samplers": ["temperature"]}), "samplers"),
        (json!({"bad_words": ["Rome"]}), "bad_words"),
        (json!({"mirostat": 2}), "mirostat"),
        (json!({"prompt": []}), "prompt is []"),
        (json!({"n_predcit": 1}), "did you mean `n_predict`?"),
    ] {
        let mut asked = json!({"model": "plain", "prompt": PROMPT});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = post(shared(), "/completion", &asked);
        let error = refused.json()["error"].clone();
        assert_eq!(
            (refused.status, &error["code"], &error["type"]),
            (400, &json!(400), &json!("invalid_request_error"))
        );
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
}

#[test]
fn tokens_templates_and_properties_are_the_models() {
    let server = own(|_, _| ());
    let model = Model::builtin(&Device::cpu()).unwrap();
    let text = "<s>Once é";
    for (add_special, parse_special) in [(false, true), (true, false)] {
        let options = EncodeOptions { add_special, parse_special };
        let ids = model.tokenizer().unwrap().encode_with(text, options).unwrap();
        let asked =
            json!({"content": text, "add_special": add_special, "parse_special": parse_special, "with_pieces": true});
        let told = done(server.address, "/tokenize", asked).json();
        let told = told["tokens"].as_array().unwrap();
        assert_eq!(json!(told.iter().map(|token| &token["id"]).collect::<Vec<_>>()), json!(ids));
        assert!(told.iter().all(|token| token["piece"].is_string() || token["piece"].is_array()));
    }
    let ids = done(server.address, "/tokenize", json!({"content": "A dragon."})).json()["tokens"].clone();
    let content = done(server.address, "/detokenize", json!({"tokens": ids})).json()["content"].clone();
    assert_eq!(content.as_str().unwrap().trim_start(), "A dragon.");
    // JSON does not tell 7.0 from 7.
    let decimal: Vec<f64> = ids.as_array().unwrap().iter().map(|id| id.as_f64().unwrap()).collect();
    assert_eq!(done(server.address, "/detokenize", json!({"tokens": decimal})).json()["content"], content);
    assert_eq!(post(server.address, "/detokenize", &json!({"tokens": [1 << 30]})).status, 400);

    // vLLM's, by which lm-eval tokenizes.
    let info = get(server.address, "/tokenizer_info").json();
    assert_eq!((&info["bos_token"], &info["eos_token"]), (&json!("<s>"), &json!("</s>")), "{info}");
    for add_special in [true, false] {
        let options = EncodeOptions { add_special, parse_special: true };
        let ids = model.tokenizer().unwrap().encode_with(text, options).unwrap();
        let asked = json!({"prompt": text, "add_special_tokens": add_special, "return_token_strs": true});
        let told = done(server.address, "/tokenize", asked).json();
        assert_eq!(
            (&told["tokens"], &told["count"], &told["max_model_len"]),
            (&json!(ids), &json!(ids.len()), &json!(512))
        );
        assert_eq!(told["token_strs"].as_array().unwrap().len(), ids.len());
        let decoded = done(server.address, "/detokenize", json!({"tokens": ids})).json();
        assert_eq!(decoded["prompt"], decoded["content"]);
    }

    let messages = json!([{"role": "user", "content": "hi"}]);
    let applied = done(server.address, "/apply-template", json!({"messages": messages})).json();
    assert_eq!(applied["prompt"], json!("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"));
    let props = get(server.address, "/props").json();
    assert_eq!((&props["total_slots"], &props["bos_token"]), (&json!(2), &json!("<s>")), "{props}");
    assert_eq!(props["default_generation_settings"]["n_ctx"], json!(512));
    let slots = get(server.address, "/slots").json();
    assert_eq!((slots.as_array().unwrap().len(), &slots[1]["is_processing"]), (2, &json!(false)));
    assert_eq!(get(server.address, "/slots?fail_on_no_slot=1").status, 200);
    let unknown = get(server.address, "/props?model=a%20b");
    assert_eq!((unknown.status, &unknown.json()["error"]["type"]), (404, &json!("not_found_error")));
    assert!(unknown.text().contains(r#"a b"#), "{}", unknown.text());
    // Several models that could be meant.
    let unnamed = post(shared(), "/completion", &json!({"prompt": "a"})).json();
    assert_eq!(unnamed["error"]["message"], json!("model is missing, expected one of `story`, `plain`"));
    let refused = post(server.address, "/infill", &json!({"input_prefix": "a", "input_suffix": "b"}));
    assert!(refused.status == 400 && refused.text().contains("story has no tokens to fill a gap"), "{refused:?}");
}

#[test]
fn infill_puts_the_gap_between_its_marks() {
    const MARKS: [&str; 6] =
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"];
    let prompt = "<|repo_name|>myproject\n<|file_sep|>a.rs\nA<|file_sep|>filename\n<|fim_prefix|>fn <|fim_suffix|>() {}<|fim_middle|>m";
    // Bytes are tokens.
    let n_marks = prompt.matches('<').count();
    let n =
        prompt.len() - MARKS[..5].iter().map(|mark| mark.len() * prompt.matches(mark).count()).sum::<usize>() + n_marks;
    let file = scripted::gguf("", &MARKS, &Says::Behind(n, "ain<|file_sep|>more"), 512);
    let model =
        Model::from_file(&Device::cpu(), ModelFile::from_gguf_bytes(file).unwrap(), LoadOptions::default()).unwrap();
    let spec = ModelSpec::new("x", 0, move || {
        Ok(Loaded::Decoder(Arc::new(Decoder::new(&model, &EngineOptions::default(), None)?)))
    });
    let server = start(vec![spec], ServerOptions::default());
    let asked = json!({"input_prefix": "fn ", "input_suffix": "() {}", "input_extra": [{"filename": "a.rs", "text": "A"}],
        "prompt": "m", "temperature": 0});
    let filled = done(server.address, "/infill", asked.clone()).json();
    assert_eq!((&filled["prompt"], &filled["content"]), (&json!(prompt), &json!("ain")), "{filled}");
    assert_eq!((&filled["tokens_evaluated"], &filled["stop_type"]), (&json!(n), &json!("eos")));
    let refused = post(server.address, "/infill", &json!({"input_prefix": "a"})).json();
    assert!(refused["error"]["message"].as_str().unwrap().starts_with("input_suffix is missing"), "{refused}");
}
