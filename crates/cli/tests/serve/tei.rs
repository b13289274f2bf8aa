//! TEI's API, and what `/v1/embeddings` has beyond OpenAI's defaults.

use serde_json::{Value as Json, json};
use tilewright::load::ModelFile;
use tilewright::{Device, RerankOptions, Reranker};
use tilewright_serve::{Loaded, ModelSpec, ServerOptions};

use super::client::{done, get, post};
use super::common::block_on;
use super::server::{embedder, encoder_path, reranker, shared, start};

const TEXTS: [&str; 3] = ["A dragon.", "The sun shines in Rome.", "Two knights rode out."];

fn floats(list: &Json) -> Vec<f32> {
    list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// The vectors of an answer of `/v1/embeddings`.
fn embedded(more: Json) -> Vec<Vec<f32>> {
    let mut asked = json!({"model": "nomic"});
    asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let answer = done(shared(), "/v1/embeddings", asked).json();
    answer["data"].as_array().unwrap().iter().map(|one| floats(&one["embedding"])).collect()
}

/// The beginning of a vector, with length 1.
fn shortened(vector: &[f32], n: usize) -> Vec<f32> {
    let length = vector[..n].iter().map(|x| x * x).sum::<f32>().sqrt();
    vector[..n].iter().map(|x| x / length).collect()
}

fn assert_near(got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len());
    assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?} {want:?}");
}

#[test]
fn embeddings_are_shortened_truncated_and_made_of_tokens() {
    let encoder = embedder().unwrap();
    let whole = embedded(json!({"input": TEXTS}));
    for (got, want) in embedded(json!({"input": TEXTS, "dimensions": 8})).iter().zip(&whole) {
        assert_near(got, &shortened(want, 8));
    }
    assert_eq!(embedded(json!({"input": TEXTS, "dimensions": encoder.dims()})), whole);
    let ids: Vec<Vec<u32>> = TEXTS.iter().map(|text| encoder.encode(text).unwrap().ids).collect();
    assert_eq!(embedded(json!({"input": ids})), whole);
    assert_eq!(embedded(json!({"input": ids[0]})), whole[..1]);

    // A text that is too long, and what is left of it.
    let most = encoder.max_tokens() as usize;
    let long = "a word ".repeat(most);
    let n_long = encoder.encode_truncated(&long, Default::default()).unwrap().1;
    let refused = post(shared(), "/v1/embeddings", &json!({"model": "nomic", "input": ["short", long]}));
    let error = refused.json()["error"].clone();
    assert_eq!(
        (refused.status, &error["code"], &error["param"]),
        (400, &json!("context_length_exceeded"), &json!("input[1]"))
    );
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with(&format!("input[1] has {n_long} tokens, but the model reads at most {most};")),
        "{message}"
    );
    let [start, end] = ["Begin ", " end."].map(str::to_owned);
    let text = start + &long + &end;
    let right = embedded(json!({"input": text, "truncate": true}));
    assert_eq!(right, embedded(json!({"input": text, "truncate_prompt_tokens": -1})));
    assert_eq!(right[0], block_on(encoder.embed(&[&text])).unwrap());
    let left = embedded(json!({"input": text, "truncate": "START"}));
    assert_eq!(left, embedded(json!({"input": text, "truncate_prompt_tokens": most, "truncation_side": "left"})));
    assert_ne!(left, right);
    let five = encoder.encode(TEXTS[1]).unwrap().ids;
    let five = [&five[..4], &five[five.len() - 1..]].concat();
    assert_eq!(embedded(json!({"input": TEXTS[1], "truncate_prompt_tokens": 5})), embedded(json!({"input": five})));

    let vocab_size = encoder.config().vocab_size;
    for (more, says) in [
        (
            json!({"dimensions": encoder.dims() + 1}),
            format!("dimensions is {}, expected 1 to {}", encoder.dims() + 1, encoder.dims()),
        ),
        (json!({"dimensions": 0}), "dimensions is 0".into()),
        (json!({"input": [[1, vocab_size]]}), format!("input[0][1] is {vocab_size}, expected a token id of the model")),
        (json!({"input": [["a"]]}), "input is [[\"a\"]]".into()),
        (json!({"input": []}), "input is []".into()),
        (json!({"truncate": "MIDDLE"}), "truncate is \"MIDDLE\"".into()),
        (
            json!({"truncate_prompt_tokens": most + 1}),
            format!("truncate_prompt_tokens is {}, expected at most {most}", most + 1),
        ),
        (json!({"truncate_prompt_tokens": 0}), "truncate_prompt_tokens is 0".into()),
        (json!({"truncate_prompt_tokens": 1}), "truncate_prompt_tokens is 1, expected 2 to".into()),
    ] {
        let mut asked = json!({"model": "nomic", "input": TEXTS});
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let refused = post(shared(), "/v1/embeddings", &asked);
        assert_eq!(refused.status, 400, "{asked}");
        assert!(refused.json()["error"]["message"].as_str().unwrap().starts_with(&says), "{says}: {}", refused.text());
    }
    // Rerankers truncate, and say so.
    let asked = json!({"model": "bert", "query": "sun", "documents": ["short", long]});
    let ranked = done(shared(), "/v1/rerank", asked);
    let notice = ranked.header("x-tilewright-notice").unwrap();
    assert!(notice.starts_with("1 of 2 documents are longer"), "{notice}");
}

#[test]
fn tei_endpoints_match_the_encoders() {
    let encoder = embedder().unwrap();
    // The only embedding model of several models.
    let vectors = done(shared(), "/embed", json!({"inputs": TEXTS})).json();
    let got: Vec<Vec<f32>> = vectors.as_array().unwrap().iter().map(floats).collect();
    let want = block_on(encoder.embed(&TEXTS)).unwrap();
    for (got, want) in got.iter().zip(want.chunks(encoder.dims() as usize)) {
        assert_near(got, &shortened(want, want.len()));
    }
    let one = done(shared(), "/embed", json!({"inputs": TEXTS[0], "dimensions": 8})).json();
    assert_near(&floats(&one[0]), &shortened(&got[0], 8));
    let long = "a word ".repeat(encoder.max_tokens() as usize);
    let refused = post(shared(), "/embed", &json!({"inputs": long}));
    assert_eq!((refused.status, &refused.json()["error_type"]), (413, &json!("Validation")), "{}", refused.text());
    for direction in ["Left", "right"] {
        done(shared(), "/embed", json!({"inputs": long, "truncate": true, "truncation_direction": direction}));
    }

    let query = "Where does the sun shine?";
    let own = reranker().unwrap();
    let (want, logits) = (block_on(own.rank(query, &TEXTS)).unwrap(), block_on(own.logits(query, &TEXTS)).unwrap());
    assert!(!own.has_sigmoid());
    let asked = json!({"query": query, "texts": TEXTS, "return_text": true});
    let ranks = done(shared(), "/rerank", asked.clone()).json();
    let mut raw = asked;
    raw["raw_scores"] = true.into();
    let raw = done(shared(), "/rerank", raw).json();
    for ((rank, raw), want) in ranks.as_array().unwrap().iter().zip(raw.as_array().unwrap()).zip(&want) {
        let logit = logits[want.index];
        let [score, raw_score] = [rank, raw].map(|rank| rank["score"].as_f64().unwrap() as f32);
        assert_eq!(
            (&rank["index"], &raw["index"], &rank["text"]),
            (&json!(want.index), &json!(want.index), &json!(TEXTS[want.index]))
        );
        assert!(raw_score == logit && (score - 1.0 / (1.0 + (-logit).exp())).abs() < 1e-6, "{rank} {logit}");
    }
    let best = done(shared(), "/rerank", json!({"query": query, "texts": TEXTS, "top_n": 1})).json();
    assert_eq!((best.as_array().unwrap().len(), &best[0]["index"]), (1, &json!(want[0].index)));
    let cohere = done(shared(), "/rerank", json!({"query": query, "documents": TEXTS})).json();
    assert_eq!(cohere["results"][0]["index"], json!(want[0].index));

    let tokens = done(shared(), "/tokenize", json!({"model": "nomic", "inputs": TEXTS[0]})).json();
    let ids: Vec<u64> = tokens[0].as_array().unwrap().iter().map(|token| token["id"].as_u64().unwrap()).collect();
    let prompted = encoder.with_prompt(None).unwrap().encode(TEXTS[0]).unwrap().ids;
    assert_eq!(json!(ids), json!(prompted));
    assert_eq!((&tokens[0][0]["special"], &tokens[0][1]["special"]), (&json!(true), &json!(false)), "{tokens}");
    let info = get(shared(), "/info?model=nomic").json();
    assert_eq!(info["model_type"], json!({"embedding": {"pooling": encoder.pooling().name()}}));
    assert_eq!((&info["model_id"], &info["max_input_length"]), (&json!("nomic"), &json!(encoder.max_tokens())));
    assert!(get(shared(), "/info?model=bert").json()["model_type"]["reranker"].is_object());

    // The cosines of the vectors, and the texts of the tokens.
    let vectors = embedded(json!({"input": TEXTS}));
    let asked = json!({"model": "nomic", "inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1..]}});
    let similar = floats(&done(shared(), "/similarity", asked).json());
    let cosine = |other: &Vec<f32>| other.iter().zip(&vectors[0]).map(|(a, b)| a * b).sum::<f32>();
    assert_near(&similar, &vectors[1..].iter().map(cosine).collect::<Vec<_>>());
    let decoded = done(shared(), "/decode", json!({"model": "nomic", "ids": [ids, ids]})).json();
    let file = ModelFile::open(encoder_path("nomic")).unwrap();
    let want = file.header.tokenizer.unwrap().decode(&prompted, true).unwrap();
    assert_eq!(decoded, json!([want, want]));
    assert_eq!(done(shared(), "/decode", json!({"model": "nomic", "ids": ids})).json(), json!([want]));
    // llama.cpp's.
    let one = done(shared(), "/embedding", json!({"model": "nomic", "content": TEXTS[0]})).json();
    assert_near(&floats(&one[0]["embedding"][0]), &vectors[0]);

    for (path, body, status, kind, says) in [
        ("/similarity", json!({"inputs": {"source_sentence": "a"}}), 422, "Validation", "inputs.sentences is missing"),
        ("/decode", json!({"ids": "a", "model": "nomic"}), 422, "Validation", "ids is \"a\""),
        ("/embed", json!({"inputs": []}), 422, "Validation", "inputs is []"),
        ("/embed", json!({"inputs": "a", "model": "bert"}), 424, "Backend", "bert is a reranker"),
        ("/embed", json!({"inputs": "a", "prompt_name": "x"}), 422, "Validation", "prompt_name is x, expected"),
        ("/embed", json!({"inputs": "a", "normalize": false}), 422, "Validation", "normalize is false"),
        (
            "/rerank",
            json!({"query": "a", "texts": ["a ".repeat(900)]}),
            413,
            "Validation",
            "texts[0] with the query has",
        ),
        ("/embed_all", json!({"inputs": "a"}), 424, "Backend", "/embed_all is not supported"),
        ("/predict", json!({"inputs": "a"}), 424, "Backend", "/predict is not supported"),
    ] {
        let refused = post(shared(), path, &body);
        let error = refused.json();
        assert_eq!((refused.status, &error["error_type"]), (status, &json!(kind)), "{path} {body}: {error}");
        assert!(error["error"].as_str().unwrap().contains(says), "{error}");
    }
    // vLLM's scores, in the order of the texts.
    let ranked = done(shared(), "/v1/rerank", json!({"query": TEXTS[0], "documents": TEXTS})).json();
    let scored = |body: Json| -> Vec<f32> {
        let scored = done(shared(), "/score", body).json();
        scored["data"].as_array().unwrap().iter().map(|one| one["score"].as_f64().unwrap() as f32).collect()
    };
    let scores = scored(json!({"text_1": TEXTS[0], "text_2": TEXTS}));
    for one in ranked["results"].as_array().unwrap() {
        let score = scores[one["index"].as_u64().unwrap() as usize];
        assert!((f64::from(score) - one["relevance_score"].as_f64().unwrap()).abs() < 1e-6, "{one} {score}");
    }
    let pairs = scored(json!({"text_1": [TEXTS[1], TEXTS[0]], "text_2": [TEXTS[0], TEXTS[1]]}));
    assert_near(&pairs[1..], &scores[1..2]);
    let uneven = post(shared(), "/score", &json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]})).json();
    let message = uneven["error"]["message"].as_str().unwrap();
    assert!(message.contains("text_1 is 2, expected one text, or 3 as in text_2"), "{message}");
    assert_eq!(get(shared(), "/version").json()["version"], json!(env!("CARGO_PKG_VERSION")));

    let neither = post(shared(), "/rerank", &json!({"query": "a"})).json();
    assert!(neither["error"]["message"].as_str().unwrap().starts_with("texts or documents is missing"), "{neither}");
}

#[test]
fn instruction_reaches_a_language_model_as_reranker() {
    let load = || Reranker::load(&Device::cpu(), encoder_path("qwen3-reranker"), RerankOptions::default());
    let own = load().unwrap();
    let model = ModelSpec::new("qwen", 1 << 20, move || load().map(Loaded::Reranker));
    let server = start(vec![model], ServerOptions::default());
    let (query, given) = ("Where does the sun shine?", "find what rhymes");
    let mut found = Vec::new();
    for instruction in [None, Some(given)] {
        let want = block_on(own.with_instruction(instruction).unwrap().rank(query, &TEXTS)).unwrap();
        for (path, key, list) in [("/v1/rerank", "documents", "results"), ("/rerank", "texts", "")] {
            let asked = json!({"query": query, key: TEXTS, "instruction": instruction});
            let answer = done(server.address, path, asked).json();
            let ranked = if list.is_empty() { &answer } else { &answer[list] };
            let score = if list.is_empty() { "score" } else { "relevance_score" };
            for (got, want) in ranked.as_array().unwrap().iter().zip(&want) {
                let near = (got[score].as_f64().unwrap() - f64::from(want.score)).abs() < 1e-6;
                assert!(got["index"] == json!(want.index) && near, "{path} {instruction:?}: {got}, expected {want:?}");
            }
        }
        found.push(want);
    }
    assert_ne!(found[0], found[1]);
    let asked = json!({"model": "bert", "query": query, "documents": TEXTS, "instruction": given});
    let refused = post(shared(), "/v1/rerank", &asked);
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(refused.text().contains("the model takes no instruction"), "{}", refused.text());
}
