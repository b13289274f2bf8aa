//! Fields as clients of vLLM, SGLang and llama.cpp's server send them, against the library.

use std::sync::{Arc, Mutex};

use serde_json::{Value as Json, json};
use tilewright::chat::{ChatTemplate, Message};
use tilewright::{ChatModel, ChatRequest, Device, GenerateOptions, Model, Session};
use tilewright_serve::{LogSink, ServerOptions};

use super::client::{done, get, post, send};
use super::common::{block_on, collect};
use super::server::{own, shared, start, story};

const PROMPT: &str = "Once upon a time there was a dragon.";
const EOS: u32 = 2;

fn model() -> Model {
    Model::builtin(&Device::cpu()).unwrap()
}

fn with(base: &Json, more: Json) -> Json {
    let mut all = base.clone();
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    all
}

/// The answer of `/v1/completions` to a request with these fields.
fn complete(more: Json) -> Json {
    let asked = with(&json!({"model": "story", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}), more);
    done(shared(), "/v1/completions", asked).json()
}

fn text(more: Json) -> String {
    complete(more)["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// The library's text and tokens.
fn told(options: &GenerateOptions) -> (String, Vec<u32>) {
    let model = model();
    let ids = model.encode(PROMPT).unwrap();
    let (ids, text, _) = collect(&mut model.session().unwrap().generate_ids(&ids, options).unwrap());
    (text, ids)
}

/// Logarithms of the probabilities of all tokens after a prefix.
fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - highest).exp()).sum();
    logits.iter().map(|&logit| f64::from(logit - highest) - sum.ln()).collect()
}

/// By token: the log probability that the session gives it, and the highest one.
fn scored(session: &mut Session, ids: &[u32]) -> Vec<(f64, f64)> {
    let pair = |pair: &[u32]| {
        let logprobs = log_softmax(&block_on(session.logits(&pair[..1])).unwrap());
        (logprobs[pair[1] as usize], logprobs.iter().copied().fold(f64::MIN, f64::max))
    };
    ids.windows(2).map(pair).collect()
}

/// What lm-eval's `local-completions` reads. The prompt has several chunks of rows with logits.
#[test]
fn echoed_log_probabilities_match_logits_of_each_prefix() {
    let model = model();
    let long = [PROMPT, " The dragon had a red hat and a small boat."].concat().repeat(4);
    let ids = model.encode(&long).unwrap();
    assert!(ids.len() > 70, "{}", ids.len());
    let want = scored(&mut model.session().unwrap(), &ids);
    let near = |a: &Json, b: f64| (a.as_f64().unwrap() - b).abs() < 1e-3;
    let asked = json!({
        "prompt": [ids], "echo": true, "logprobs": 1, "max_tokens": 1, "prompt_logprobs": 0, "seed": 1234, "n": 2,
    });
    let whole = complete(asked.clone());
    for choice in whole["choices"].as_array().unwrap() {
        let logprobs = &choice["logprobs"];
        let list = |name: &str| logprobs[name].as_array().unwrap();
        assert_eq!(list("tokens").len(), ids.len() + 1);
        assert_eq!((&list("token_logprobs")[0], &list("top_logprobs")[0]), (&Json::Null, &Json::Null));
        for (at, (own, best)) in want.iter().enumerate() {
            assert!(
                near(&list("token_logprobs")[at + 1], *own),
                "token {at}: {own}, {}",
                list("token_logprobs")[at + 1]
            );
            let top = list("top_logprobs")[at + 1].as_object().unwrap().values();
            let highest = top.max_by(|a, b| a.as_f64().unwrap().total_cmp(&b.as_f64().unwrap())).unwrap();
            assert!(near(highest, *best), "token {at}: {best}");
        }
        // Offsets are those of the echoed text.
        let text = choice["text"].as_str().unwrap();
        let offsets: Vec<usize> = list("text_offset").iter().map(|n| n.as_u64().unwrap() as usize).collect();
        assert!(text.starts_with(&long) && offsets.is_sorted() && offsets[ids.len()] == long.len());
        let last = list("tokens")[ids.len() - 1].as_str().unwrap();
        assert_eq!(text[offsets[ids.len() - 1]..offsets[ids.len()]], *last);
        // vLLM's shape, by id.
        let by_id = choice["prompt_logprobs"].as_array().unwrap();
        assert!(by_id[0].is_null() && by_id.len() == ids.len());
        for (at, (own, best)) in want.iter().enumerate() {
            let token = &by_id[at + 1][ids[at + 1].to_string()];
            assert!(near(&token["logprob"], *own), "token {at}");
            assert_eq!(token["rank"] == json!(1), own == best, "token {at}: {token}");
        }
    }
    // Only the prompt, whole and as a stream, with the answer of a prompt that is cached by now.
    let prompt_only = with(&asked, json!({"max_tokens": 0, "n": 1, "prompt_logprobs": null}));
    let only = complete(prompt_only.clone());
    let logprobs = &only["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), ids.len());
    assert_eq!((&only["choices"][0]["text"], &only["usage"]["completion_tokens"]), (&json!(long), &json!(0)));
    assert_eq!(logprobs["token_logprobs"][7], whole["choices"][0]["logprobs"]["token_logprobs"][7]);
    let base = json!({"model": "story", "stream": true, "temperature": 0});
    let chunks = done(shared(), "/v1/completions", with(&base, prompt_only)).events();
    assert_eq!(chunks[0]["choices"][0]["logprobs"], *logprobs);
    // An answer that ends at once has its end token, which lm-eval drops.
    let ended = with(&asked, json!({"logit_bias": {EOS.to_string(): 100}}));
    let ended = complete(ended)["choices"][0].clone();
    assert_eq!((&ended["text"], &ended["finish_reason"]), (&json!(long), &json!("stop")));
    assert_eq!(ended["logprobs"]["tokens"][ids.len()], json!("</s>"));
    assert_eq!(ended["logprobs"]["token_logprobs"][7], logprobs["token_logprobs"][7]);
    // A prompt of one token has nothing to score.
    let single = complete(json!({"prompt": [EOS], "echo": true, "logprobs": 1, "max_tokens": 0}));
    assert_eq!(single["choices"][0]["logprobs"]["token_logprobs"], json!([null]));
}

#[test]
fn chat_reports_prompt_log_probabilities_and_token_ids() {
    let model = model();
    let chat = ChatModel::of(&model, ChatTemplate::known("chatml")).unwrap();
    let request = ChatRequest::new(vec![Message::new("user", PROMPT)]);
    let ids = chat.prepare(&request).unwrap().ids;
    let asked = json!({
        "model": "story", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6, "temperature": 0,
        "return_token_ids": true,
    });
    let whole = done(shared(), "/v1/chat/completions", with(&asked, json!({"prompt_logprobs": 2}))).json();
    assert_eq!(whole["prompt_token_ids"], json!(ids));
    let want = scored(&mut model.session().unwrap(), &ids);
    let last = &whole["prompt_logprobs"][ids.len() - 1][ids[ids.len() - 1].to_string()];
    assert!((last["logprob"].as_f64().unwrap() - want[ids.len() - 2].0).abs() < 1e-3, "{last}");
    let choice = &whole["choices"][0];
    let answer: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    let own = collect(&mut model.session().unwrap().generate_ids(&ids, &GenerateOptions::greedy(6)).unwrap());
    assert_eq!((&answer, &choice["message"]["content"]), (&own.0, &json!(own.1)));
    let chunks = done(shared(), "/v1/chat/completions", with(&asked, json!({"stream": true}))).events();
    assert_eq!(chunks[0]["prompt_token_ids"], json!(ids));
    let streamed: Vec<&Json> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["token_ids"].as_array()).flatten().collect();
    assert_eq!(json!(streamed), json!(answer));
}

/// End tokens and stop texts count only after `min_tokens`, as for vLLM.
#[test]
fn min_tokens_postpone_end_tokens_and_stop_texts() {
    // The end token is by far the most likely one, so the text ends as soon as it may.
    let ends = json!({"logit_bias": {EOS.to_string(): 100}, "return_token_ids": true});
    let banned = GenerateOptions { logit_bias: [(EOS, -1000.0)].into(), ..GenerateOptions::greedy(5) };
    let (own, _) = told(&banned);
    for min_tokens in [0, 5] {
        let told = complete(with(&ends, json!({"min_tokens": min_tokens})));
        let choice = &told["choices"][0];
        assert_eq!(choice["token_ids"].as_array().unwrap().len(), min_tokens + 1, "{told}");
        assert_eq!(
            (&choice["finish_reason"], choice["text"].as_str()),
            (&json!("stop"), Some(&own[..if min_tokens == 0 { 0 } else { own.len() }]))
        );
    }
    let likely =
        |min_tokens| GenerateOptions { logit_bias: [(EOS, 100.0)].into(), min_tokens, ..GenerateOptions::greedy(12) };
    assert_eq!(told(&likely(5)).0, own, "in a session");
    // Without a penalty, passes without a bitmask follow those with one.
    let (greedy, ids) = told(&GenerateOptions::greedy(12));
    assert_eq!(told(&GenerateOptions { min_tokens: 4, ..GenerateOptions::greedy(12) }), (greedy.clone(), ids.clone()));
    assert_eq!(text(json!({"min_tokens": 4})), greedy);

    let stop = json!({"stop_token_ids": [ids[3]]});
    assert_eq!(complete(with(&stop, json!({"return_token_ids": true})))["choices"][0]["token_ids"], json!(ids[..4]));
    // It cannot be chosen until then.
    let later = complete(with(&stop, json!({"return_token_ids": true, "min_tokens": 6})));
    let later = later["choices"][0]["token_ids"].as_array().unwrap().clone();
    assert!(later.len() > 6 && !later[..6].contains(&json!(ids[3])), "{later:?}");

    let letter = greedy.chars().find(|letter| letter.is_alphabetic()).unwrap().to_string();
    let n_chars = |min_tokens: usize| text(json!({"stop": letter, "min_tokens": min_tokens})).len();
    assert!(n_chars(0) < 3 && n_chars(8) > 8, "{greedy}");
}

#[test]
fn stop_conditions_keep_or_leave_out_their_texts() {
    let (greedy, ids) = told(&GenerateOptions::greedy(12));
    let stop = &greedy[10..14];
    let end = greedy.find(stop).unwrap();
    assert_eq!(text(json!({"stop": stop})), greedy[..end]);
    for name in ["include_stop_str_in_output", "no_stop_trim"] {
        assert_eq!(text(json!({"stop": stop, name: true})), greedy[..end + stop.len()], "{name}");
    }
    // The text of a stop token, which is an ordinary one, too.
    let before = text(json!({"stop_token_ids": [ids[3]]}));
    let kept = text(json!({"stop_token_ids": [ids[3]], "include_stop_str_in_output": true}));
    assert!(kept.len() > before.len() && greedy.starts_with(&kept), "{before:?}, {kept:?}");

    // The end token: continued past, or shown by its name.
    let ends = json!({"logit_bias": {EOS.to_string(): 100}, "max_tokens": 3});
    let n = |more: Json| complete(with(&ends, more))["usage"]["completion_tokens"].clone();
    assert_eq!((n(json!({})), n(json!({"ignore_eos": true}))), (json!(1), json!(3)));
    assert_eq!(n(json!({"ignore_eos": true, "stop_token_ids": [EOS]})), json!(1));
    let shown = with(&ends, json!({"ignore_eos": true, "skip_special_tokens": false}));
    assert_eq!(text(shown), "</s></s></s>");
    let chat = json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0});
    let chat = with(&with(&chat, ends), json!({"ignore_eos": true, "skip_special_tokens": false}));
    assert_eq!(
        done(shared(), "/v1/chat/completions", chat).json()["choices"][0]["message"]["content"],
        json!("</s></s></s>")
    );
}

#[test]
fn constraints_are_accepted_under_every_name() {
    let (digits, schema) = (
        "[0-9]{3}",
        json!({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}),
    );
    let choice = json!(["a+b (x)", "c|d"]);
    let grammar = "root ::= \"yes\" | \"no\"";
    let is_number: fn(&str) -> bool = |text| text.len() == 3 && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_choice: fn(&str) -> bool = |text| ["a+b (x)", "c|d"].contains(&text);
    let is_word: fn(&str) -> bool = |text| ["yes", "no"].contains(&text);
    let is_json: fn(&str) -> bool =
        |text| serde_json::from_str::<Json>(text).is_ok_and(|value| value["a"].is_boolean());
    let fields = [
        (json!({"structured_outputs": {"regex": digits}}), is_number),
        (json!({"structured_outputs": {"choice": choice}}), is_choice),
        (json!({"structured_outputs": {"grammar": grammar}}), is_word),
        (json!({"structured_outputs": {"json": schema}}), is_json),
        (json!({"guided_regex": digits}), is_number),
        (json!({"guided_choice": choice}), is_choice),
        (json!({"guided_grammar": grammar}), is_word),
        (json!({"guided_json": schema.to_string()}), is_json),
        (json!({"regex": digits}), is_number),
        (json!({"ebnf": grammar}), is_word),
        (json!({"grammar": grammar}), is_word),
        (json!({"json_schema": schema}), is_json),
        (json!({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}), is_json),
    ];
    for (more, holds) in fields {
        let more = with(&more, json!({"max_tokens": 40}));
        let plain = text(more.clone());
        assert!(holds(&plain), "{more}: {plain}");
        let chat = json!({"model": "story", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0});
        let answer = done(shared(), "/v1/chat/completions", with(&chat, more.clone())).json();
        assert!(holds(answer["choices"][0]["message"]["content"].as_str().unwrap()), "{more}: {answer}");
    }
    let both = json!({"model": "story", "prompt": "A", "grammar": grammar, "guided_regex": digits});
    let error = post(shared(), "/v1/completions", &both).json()["error"].clone();
    assert!(error["message"].as_str().unwrap().contains("guided_regex and grammar both constrain"), "{error}");
}

#[test]
fn synonyms_have_the_same_effect() {
    let drawn =
        json!({"temperature": 1, "seed": 5, "max_tokens": 24, "repeat_penalty": 1.4, "repeat_last_n": 4_000_000});
    let penalised = text(drawn.clone());
    assert_eq!(text(json!({"temperature": 1, "seed": 5, "max_tokens": 24, "repetition_penalty": 1.4})), penalised);
    assert_eq!(text(with(&drawn, json!({"repetition_penalty": 1.4, "repeat_last_n": -1}))), penalised);
    let differ = json!({"model": "story", "prompt": "A", "repeat_penalty": 1.1, "repetition_penalty": 1.2});
    let error = post(shared(), "/v1/completions", &differ).json()["error"].clone();
    assert_eq!(error["param"], json!("repetition_penalty"), "{error}");

    let greedy = told(&GenerateOptions::greedy(7)).0;
    assert_eq!(text(json!({"n_predict": 7, "max_tokens": null})), greedy);
    let biased = text(json!({"logit_bias": {"300": 5, "301": -1}}));
    assert_eq!(text(json!({"logit_bias": [[300, 5], [301, -1]]})), biased);
    let (_, ids) = told(&GenerateOptions::greedy(1));
    assert_ne!(text(json!({"logit_bias": [[ids[0], false]], "max_tokens": 1})), text(json!({"max_tokens": 1})));
    // Up to the context.
    let whole = complete(json!({"max_tokens": -1, "ignore_eos": true}));
    assert_eq!(
        (&whole["usage"]["total_tokens"], &whole["choices"][0]["finish_reason"]),
        (&json!(513), &json!("length"))
    );
}

#[test]
fn prompts_are_computed_again_without_the_cache() {
    let long = json!({"prompt": "A cat and a dog went out. ".repeat(20), "max_tokens": 1, "timings_per_token": true});
    complete(long.clone());
    let cached = |more: Json| {
        let told = complete(with(&long, more));
        let timings = &told["timings"];
        let n_cached = told["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
        assert_eq!((&timings["cache_n"], &timings["predicted_n"]), (&n_cached, &json!(1)));
        let n = n_cached.as_u64().unwrap();
        assert_eq!(timings["prompt_n"].as_u64().unwrap() + n, told["usage"]["prompt_tokens"].as_u64().unwrap());
        assert!(timings["prompt_ms"].is_number() && timings["predicted_per_second"].is_number(), "{timings}");
        n
    };
    assert!(cached(json!({})) > 0 && cached(json!({"cache_prompt": false})) == 0);
    let asked = json!({
        "model": "story", "prompt": "A", "max_tokens": 3, "stream": true, "timings_per_token": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true},
    });
    let chunks = done(shared(), "/v1/completions", asked).events();
    for chunk in &chunks {
        assert!(chunk["usage"]["completion_tokens"].is_u64() && chunk["timings"]["predicted_n"].is_u64(), "{chunk}");
    }
}

/// A template that shows its variables.
const SHOWN: &str = "{{ enable_thinking }} {{ city }} {% for message in messages %}[{{ message.content }}{% if not loop.last %}]{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}";

#[test]
fn template_variables_and_final_messages_reach_the_prompt() {
    let path = std::env::temp_dir().join(format!("tilewright-variables-{}.gguf", std::process::id()));
    std::fs::write(&path, super::endpoints::with_template(SHOWN)).unwrap();
    let file = path.clone();
    let load = move || super::endpoints::load_file(&file);
    let variables = json!({"enable_thinking": true, "city": "Rome"}).as_object().unwrap().clone();
    let options = ServerOptions { template_variables: variables, ..ServerOptions::default() };
    let server = start(vec![tilewright_serve::ModelSpec::new("shown", 1, load)], options);
    let model = model();
    let prompt = |more: Json| {
        let asked = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "return_token_ids": true});
        let told = done(server.address, "/v1/chat/completions", with(&asked, more)).json();
        let ids: Vec<u32> = serde_json::from_value(told["prompt_token_ids"].clone()).unwrap();
        model.tokenizer().unwrap().decode(&ids, true).unwrap()
    };
    assert_eq!(prompt(json!({})).trim(), "True Rome [a>");
    let own = json!({"chat_template_kwargs": {"enable_thinking": false, "city": "Bonn"}});
    assert_eq!(prompt(own).trim(), "False Bonn [a>");
    assert_eq!(prompt(json!({"reasoning_effort": "none"})).trim(), "False Rome [a>");
    assert_eq!(prompt(json!({"add_generation_prompt": false})).trim(), "True Rome [a");
    let begun = json!({
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I th"}],
        "continue_final_message": true, "add_generation_prompt": false,
    });
    assert_eq!(prompt(begun.clone()).trim(), "True Rome [a][I th");
    // The answer is what follows.
    let asked = with(&begun, json!({"max_tokens": 8, "temperature": 0, "return_token_ids": true}));
    let choice = done(server.address, "/v1/chat/completions", asked).json()["choices"][0].clone();
    let ids: Vec<u32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    let mut decoder = model.tokenizer().unwrap().decoder().continuing();
    let text: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
    assert_eq!(choice["message"]["content"], json!(text));
    std::fs::remove_file(path).unwrap();
}

#[test]
fn unknown_fields_name_the_nearest_one_or_are_ignored_by_a_lenient_server() {
    let base = json!({"prompt": "A", "max_tokens": 1});
    for (field, value, near) in [
        ("max_token", json!(5), "did you mean `max_tokens`?"),
        ("maxTokens", json!(5), "did you mean `max_tokens`?"),
        ("temprature", json!(5), "did you mean `temperature`?"),
        ("frequencyPenalty", json!(5), "did you mean `frequency_penalty`?"),
        ("quux", json!(5), "GET /openapi.json"),
    ] {
        let error =
            post(shared(), "/v1/completions", &with(&with(&base, json!({"model": "story"})), json!({field: value})));
        let error = error.json()["error"].clone();
        assert_eq!((&error["param"], &error["code"]), (&json!(field), &json!("unsupported_value")));
        assert!(error["message"].as_str().unwrap().contains(near), "{error}");
    }
    let notices: Arc<Mutex<Vec<String>>> = Arc::default();
    let kept = notices.clone();
    let notice: LogSink = Arc::new(move |line: &str| kept.lock().unwrap().push(line.into()));
    let server = own(|_, options| (options.lenient, options.events) = (true, Some(notice)));
    let odd = json!({"quux": 5, "typical_p": 0.5, "stream_options": {"a\nb": 1}, "temperature": 0});
    for _ in 0..2 {
        let answer = done(server.address, "/v1/completions", with(&base, odd.clone()));
        assert_eq!(answer.header("x-tilewright-ignored"), Some("quux, typical_p, stream_options.a?b"));
    }
    let told: Vec<String> =
        notices.lock().unwrap().iter().filter(|line| line.starts_with("notice: ")).cloned().collect();
    assert!(told.len() == 3 && told[0].contains("\"quux\"") && told[0].contains("/v1/completions"), "{told:?}");
    // A supported field out of range is still refused.
    assert_eq!(post(server.address, "/v1/completions", &with(&base, json!({"temperature": 5}))).status, 400);
    assert!(done(server.address, "/v1/completions", base).header("x-tilewright-ignored").is_none());
}

#[test]
fn responses_continue_stored_ones_of_the_same_key() {
    let keys = |options: &mut ServerOptions| options.api_keys = vec!["one-key-long".into(), "two-key-long".into()];
    let server = own(|_, options| keys(options));
    let ask = |key: &str, body: Json| {
        let headers = [("content-type", "application/json"), ("authorization", &*format!("Bearer {key}"))];
        let answer = send(server.address, "POST", "/v1/responses", &headers, body.to_string().as_bytes());
        (answer.status, answer.json())
    };
    let base = json!({"max_output_tokens": 8, "temperature": 0});
    let (_, first) = ask("one-key-long", with(&base, json!({"input": "A cat", "instructions": "Be brief."})));
    let text = first["output"][0]["content"][0]["text"].clone();
    let next = json!({"previous_response_id": first["id"], "input": [{"role": "user", "content": "And then?"}]});
    let (status, second) = ask("one-key-long", with(&base, next.clone()));
    assert_eq!((status, &second["previous_response_id"], &second["store"]), (200, &first["id"], &json!(true)));
    // The same as the whole conversation, without the earlier instructions.
    let whole = json!({"input": [
        {"role": "user", "content": "A cat"}, {"role": "assistant", "content": text},
        {"role": "user", "content": "And then?"},
    ], "store": false});
    let (_, told) = ask("one-key-long", with(&base, whole));
    assert_eq!(second["usage"]["input_tokens"], told["usage"]["input_tokens"]);
    assert_eq!(second["output"][0]["content"], told["output"][0]["content"]);
    let third = json!({"previous_response_id": second["id"], "input": "More", "stream": true});
    let headers = [("content-type", "application/json"), ("authorization", "Bearer one-key-long")];
    let streamed =
        send(server.address, "POST", "/v1/responses", &headers, with(&base, third).to_string().as_bytes()).text();
    let id = streamed.rsplit("\"id\":\"resp_").next().unwrap().split('"').next().unwrap().to_owned();
    let fourth = json!({"previous_response_id": format!("resp_{id}"), "input": "End"});
    assert_eq!(ask("one-key-long", with(&base, fourth)).0, 200);

    for (key, id) in [("two-key-long", &first["id"]), ("one-key-long", &told["id"]), ("one-key-long", &json!("resp_x"))]
    {
        let (status, error) = ask(key, with(&base, json!({"previous_response_id": id, "input": "x"})));
        assert_eq!((status, &error["error"]["code"]), (404, &json!("previous_response_not_found")), "{error}");
    }
}

#[test]
fn openapi_document_describes_the_fields_of_requests() {
    let document = get(shared(), "/openapi.json").json();
    let schema =
        |path: &str| document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"].clone();
    for (path, field, name, value) in [
        ("/v1/chat/completions", "temperature", "maximum", json!(2)),
        ("/v1/chat/completions", "temperature", "default", json!(1)),
        ("/v1/chat/completions", "min_p", "default", json!(0.05)),
        ("/v1/completions", "logprobs", "maximum", json!(20)),
        ("/v1/completions", "typical_p", "const", json!(1)),
        ("/v1/responses", "store", "type", json!("boolean")),
        ("/v1/embeddings", "encoding_format", "enum", json!(["float", "base64"])),
        ("/api/chat", "stream", "default", json!(true)),
    ] {
        assert_eq!(schema(path)["properties"][field][name], value, "{path} {field}");
    }
    assert_eq!(schema("/v1/chat/completions")["required"], json!(["messages"]));
    let audio = &document["paths"]["/v1/audio/translations"]["post"]["requestBody"]["content"];
    let file = &audio["multipart/form-data"]["schema"]["properties"]["file"];
    assert_eq!((&file["type"], &file["format"]), (&json!("string"), &json!("binary")), "{audio}");
    // Every row has a description.
    for (path, methods) in document["paths"].as_object().unwrap() {
        let contents = methods["post"]["requestBody"]["content"].as_object();
        let Some(properties) = contents.and_then(|content| content.values().next()?.pointer("/schema/properties"))
        else {
            continue;
        };
        for (name, row) in properties.as_object().unwrap() {
            assert!(row["description"].as_str().is_some_and(|doc| doc.ends_with('.')), "{path} {name}: {row}");
        }
    }
}

/// A server with one model needs no name.
#[test]
fn only_model_answers_requests_without_a_name() {
    let server = start(vec![story("alone", tilewright::engine::EngineOptions::default())], ServerOptions::default());
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})),
        ("/v1/completions", json!({"prompt": "Hi", "max_tokens": 1})),
        ("/v1/responses", json!({"input": "Hi", "max_output_tokens": 1})),
    ] {
        assert_eq!(done(server.address, path, body).json()["model"], json!("alone"), "{path}");
    }
}
