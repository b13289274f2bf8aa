//! Ollama's interface, as its clients use it.

use std::fs;

use serde_json::{Value as Json, json};
use tilewright::chat::{ChatOptions, ChatTemplate, Message};
use tilewright::{Device, Model};

use super::client::{Answer, done, get, post, send};
use super::program::{Program, command};
use super::server::{embedder, own, shared};
use crate::hub::server::{Server, cache, sha256};

/// Tokens of the prompt of these messages.
fn prompt_of(messages: &[Message]) -> Vec<u32> {
    let model = Model::builtin(&Device::cpu()).unwrap();
    let template = ChatTemplate::known("chatml").unwrap();
    template.encode(model.tokenizer().unwrap(), messages, &ChatOptions::default()).unwrap()
}

fn notices(answer: &Answer) -> String {
    answer.header("x-tilewright-notice").unwrap_or_default().to_owned()
}

/// Bodies as Ollama's command line and Go's client library write them: with every field, however empty.
#[test]
fn requests_of_ollamas_command_line_are_answered() {
    assert_eq!(send(shared(), "HEAD", "/", &[], b"").status, 200);
    // `ollama list` and `ollama ps` print twelve characters of the digest.
    let tags = get(shared(), "/api/tags").json();
    let ps = get(shared(), "/api/ps").json();
    // Models that expire later come first.
    let running = ps["models"].as_array().unwrap().iter().find(|model| model["name"] == "story").unwrap();
    for model in [&tags["models"][0], running] {
        assert_eq!(model["digest"], tags["models"][0]["digest"]);
        assert!(model["digest"].as_str().unwrap().len() >= 12 && model["details"]["family"].is_string(), "{model}");
        assert_eq!(model["details"]["context_length"], json!(512));
    }
    let (size, vram) = (&running["size"], &running["size_vram"]);
    assert!(size.as_u64().unwrap() > 1 << 20 && *vram == json!(0), "{ps}");
    assert_eq!(running["context_length"], json!(512));
    // `ollama show -v` and `ollama run`.
    let asked = json!({"model": "", "system": "", "template": "", "verbose": true, "options": null, "name": "story"});
    let shown = done(shared(), "/api/show", asked).json();
    assert_eq!(shown["capabilities"], json!(["completion", "tools", "thinking"]));
    assert!(shown["modelfile"].as_str().unwrap().contains("FROM story") && shown["modified_at"].is_string());
    assert!(shown["model_info"]["general.architecture"].is_string());
    let agent = [("user-agent", "GitHubCopilotChat/0.30"), ("content-type", "application/json")];
    let body = br#"{"model": "story:latest"}"#;
    let shown = send(shared(), "POST", "/api/show", &agent, body).json();
    assert_eq!(shown["model_info"]["general.basename"], json!("story:latest"));
    let asked = json!({
        "model": "story", "prompt": "", "suffix": "", "system": "", "template": "", "keep_alive": "5m0s",
        "options": null, "think": true,
    });
    assert_eq!(done(shared(), "/api/generate", asked.clone()).json()["done_reason"], json!("load"));
    let messages = json!([{"role": "User", "content": "Hi"}]);
    let asked = json!({
        "model": "story", "messages": messages, "format": "", "keep_alive": -1, "think": "max",
        "options": {"num_predict": 3},
    });
    assert_eq!(done(shared(), "/api/chat", asked).lines().last().unwrap()["eval_count"], json!(3));
    // What this server does not do is refused by name, and what it lets only some do with the flag's name.
    for (method, path, body, status, word) in [
        ("POST", "/api/create", json!({"model": "a", "from": "story"}), 400, "/api/create"),
        ("POST", "/api/push", json!({"model": "story"}), 400, "/api/push"),
        ("POST", "/api/blobs/sha256:00", json!({}), 400, "/api/blobs"),
        (
            "POST",
            "/api/pull",
            json!({"model": "", "username": "", "password": "", "name": "hf.co/a/b"}),
            403,
            "--allow",
        ),
        ("POST", "/api/copy", json!({"source": "story", "destination": "a"}), 403, "--allow-model-changes"),
        ("DELETE", "/api/delete", json!({"model": "", "name": "story"}), 403, "--allow-model-changes"),
    ] {
        let answer = send(shared(), method, path, &agent[1..], body.to_string().as_bytes());
        let told = answer.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == status && told.contains(word), "{path}: {} {told}", answer.status);
    }
    // Clients that pull before use find the model there.
    let lines = done(shared(), "/api/pull", json!({"name": "story:latest"})).lines();
    assert_eq!(lines.last().unwrap(), &json!({"status": "success"}));
}

#[test]
fn ollama_options_act_or_are_reported() {
    let generate = |change: Json| {
        let mut asked = json!({"model": "story", "prompt": "Hi", "stream": false});
        asked.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        post(shared(), "/api/generate", &asked)
    };
    let n = prompt_of(&[Message::new("user", "Hi")]).len();
    let greedy = |options: Json| {
        let mut options = options;
        options["temperature"] = 0.into();
        generate(json!({"options": options}))
    };
    // A smaller context ends the answer; a larger one is the server's.
    let told = greedy(json!({"num_ctx": n + 5, "num_predict": -1})).json();
    assert_eq!((&told["eval_count"], &told["done_reason"]), (&json!(5), &json!("length")));
    let refused = greedy(json!({"num_ctx": n}));
    assert_eq!(refused.status, 400);
    assert!(refused.json()["error"].as_str().unwrap().contains("options.num_ctx"), "{}", refused.text());
    let plain = greedy(json!({"num_predict": 4}));
    let same = greedy(json!({"num_predict": 4, "num_ctx": 100_000, "num_gpu": 99, "num_thread": 4, "use_mmap": true}));
    assert_eq!((notices(&same), &same.json()["response"]), (String::new(), &plain.json()["response"]));
    // What Ollama ignores too is ignored, but said.
    let former = greedy(json!({"num_predict": 4, "mirostat": 2, "tfs_z": 0.5, "penalize_newline": true}));
    assert_eq!(former.json()["response"], plain.json()["response"]);
    assert_eq!(notices(&former), "options.mirostat is not supported; it was ignored");

    for (change, words) in [
        (json!({"suffix": "x"}), "suffix is \"x\", which is not supported"),
        (json!({"template": "{{ .Prompt }}"}), "template is \"{{ .Prompt }}\", which is not supported"),
        (json!({"images": ["aGk="]}), "has no vision encoder"),
        (json!({"raw": true, "system": "x"}), "system and raw exclude each other"),
        (json!({"raw": true, "context": [1]}), "context and raw exclude each other"),
        (json!({"context": [-1]}), "context is"),
        (json!({"context": [4_000_000]}), "4000000"),
        (json!({"model": "plain", "think": true}), "plain does not think"),
        (json!({"model": "plain", "system": "x"}), "plain has no chat template"),
        (json!({"top_logprobs": 21}), "top_logprobs is 21"),
        (json!({"options": {"num_ctx": "big"}}), "options.num_ctx"),
    ] {
        let answer = generate(change.clone());
        let told = answer.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(answer.status == 400 && told.contains(words), "{change}: {} {told}", answer.status);
    }
}

#[test]
fn ollama_log_probabilities_equal_those_of_openais_interface() {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let openai = json!({
        "model": "story", "messages": messages, "max_tokens": 6, "temperature": 0, "logprobs": true, "top_logprobs": 2,
    });
    let want = done(shared(), "/v1/chat/completions", openai).json()["choices"][0]["logprobs"]["content"].clone();
    let mut asked = json!({
        "model": "story", "messages": messages, "logprobs": true, "top_logprobs": 2,
        "options": {"num_predict": 6, "temperature": 0},
    });
    let lines = done(shared(), "/api/chat", asked.clone()).lines();
    let streamed: Vec<Json> = lines.iter().filter_map(|line| line["logprobs"].as_array()).flatten().cloned().collect();
    asked["stream"] = false.into();
    assert_eq!((&json!(streamed), &done(shared(), "/api/chat", asked).json()["logprobs"]), (&want, &want));
    assert_eq!(want.as_array().unwrap().len(), 6);
}

/// The context of an answer is its prompt and tokens; the next prompt follows it.
#[test]
fn ollama_context_continues_a_conversation() {
    let ask = |prompt: &str, context: &Json| {
        let options = json!({"num_predict": 6, "temperature": 0});
        let asked =
            json!({"model": "story", "prompt": prompt, "context": context, "options": options, "stream": false});
        done(shared(), "/api/generate", asked).json()
    };
    let first = ask("Hi", &json!([]));
    let context: Vec<u32> = serde_json::from_value(first["context"].clone()).unwrap();
    let prompt = prompt_of(&[Message::new("user", "Hi")]);
    assert_eq!((&context[..prompt.len()], context.len()), (&prompt[..], prompt.len() + 6));
    let model = Model::builtin(&Device::cpu()).unwrap();
    let text = model.tokenizer().unwrap().decode(&context[prompt.len()..], false).unwrap();
    assert_eq!(first["response"].as_str().unwrap().trim(), text.trim());

    let second = ask("And then?", &first["context"]);
    let mut prompt = prompt_of(&[Message::new("user", "And then?")]);
    if model.tokenizer().unwrap().bos_id() == Some(prompt[0]) {
        prompt.remove(0);
    }
    let ids = [context, prompt].concat();
    assert_eq!(second["prompt_eval_count"], json!(ids.len()));
    let asked = json!({"model": "story", "prompt": ids, "max_tokens": 6, "temperature": 0});
    let text = done(shared(), "/v1/completions", asked).json()["choices"][0]["text"].clone();
    assert_eq!(second["response"].as_str().unwrap().trim(), text.as_str().unwrap().trim());
}

#[test]
fn last_message_of_ollamas_assistant_is_continued() {
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]);
    let mut asked = json!({"model": "story", "messages": messages, "max_tokens": 6, "temperature": 0});
    asked["continue_final_message"] = true.into();
    let want = done(shared(), "/v1/chat/completions", asked).json()["choices"][0]["message"]["content"].clone();
    let options = json!({"num_predict": 6, "temperature": 0});
    let asked = json!({"model": "story", "messages": messages, "options": options, "stream": false});
    assert_eq!(done(shared(), "/api/chat", asked).json()["message"]["content"], want);
}

/// As in Ollama, a conversation that is too long loses its oldest turns, but not its system message.
#[test]
fn overlong_ollama_conversation_loses_its_oldest_turns() {
    let mut messages = vec![Message::new("system", "Be brief.")];
    for turn in 0..30 {
        messages.push(Message::new("user", format!("This is question {turn} of many.")));
        messages.push(Message::new("assistant", "Yes."));
    }
    messages.push(Message::new("user", "Well?"));
    let given: Vec<Json> =
        messages.iter().map(|message| json!({"role": message.role, "content": message.text()})).collect();
    let mut asked = json!({
        "model": "story", "messages": given, "stream": false, "options": {"temperature": 0, "num_predict": 8},
    });
    let answer = done(shared(), "/api/chat", asked.clone());
    // Eight tokens stay for the answer.
    let kept = |start: usize| [&messages[..1], &messages[start..]].concat();
    let start = (1..messages.len()).step_by(2).find(|&start| prompt_of(&kept(start)).len() + 8 <= 512).unwrap();
    assert!(start > 1);
    assert_eq!(answer.json()["prompt_eval_count"], json!(prompt_of(&kept(start)).len()));
    assert!(notices(&answer).starts_with(&format!("the {} oldest messages were left out", start - 1)));
    asked["truncate"] = false.into();
    let refused = post(shared(), "/api/chat", &asked);
    assert!(refused.status == 400 && notices(&refused).is_empty(), "{}", refused.text());
}

#[test]
fn ollama_keep_alive_sets_when_a_model_expires() {
    let server = own(|_, _| ());
    let year = |keep: Json| {
        done(server.address, "/api/generate", json!({"model": "story", "keep_alive": keep}));
        let ps = get(server.address, "/api/ps").json();
        ps["models"][0]["expires_at"].as_str().unwrap()[..4].parse::<u32>().unwrap()
    };
    assert!(year(json!(-1)) > 2100);
    assert!(year(json!("1h0m0s")) < 2100);
    assert!(year(json!(3600)) < 2100);
    assert!(year(json!("2562047h47m16s")) > 2100);
}

#[test]
fn ollama_embeddings_agree_and_are_shortened() {
    let embed = |change: Json| {
        let mut asked = json!({"model": "nomic", "input": "a quiet river"});
        asked.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        post(shared(), "/api/embed", &asked)
    };
    let vector =
        |answer: &Answer| -> Vec<f32> { serde_json::from_value(answer.json()["embeddings"][0].clone()).unwrap() };
    let whole = vector(&embed(json!({})));
    let older = done(shared(), "/api/embeddings", json!({"model": "nomic", "prompt": "a quiet river"})).json();
    assert_eq!(serde_json::from_value::<Vec<f32>>(older["embedding"].clone()).unwrap(), whole);
    let short = vector(&embed(json!({"dimensions": 8, "options": {"num_ctx": 2048}})));
    let norm = whole[..8].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    assert_eq!(short.len(), 8);
    assert!(short.iter().zip(&whole).all(|(a, b)| (f64::from(*a) - f64::from(*b) / norm).abs() < 1e-6));
    assert_eq!((embed(json!({"dimensions": 100_000})).status, vector(&embed(json!({"dimensions": 0})))), (400, whole));
    for nothing in [json!(""), json!([]), Json::Null] {
        assert_eq!(embed(json!({"input": nothing})).json()["embeddings"], json!([]));
    }
    assert_eq!(
        done(shared(), "/api/embeddings", json!({"model": "nomic", "prompt": ""})).json()["embedding"],
        json!([])
    );
    let long = "a word ".repeat(embedder().unwrap().max_tokens() as usize);
    assert!(notices(&embed(json!({"input": ["short", long]}))).starts_with("input[1] was cut to the model's"));
    let refused = embed(json!({"truncate": false, "options": {"num_ctx": 2}}));
    assert!(refused.status == 400 && refused.text().contains("2 tokens of options.num_ctx"), "{}", refused.text());
}

/// From a test hub: the model is listed with its file's digest, answers, gets another name, and is deleted.
#[test]
fn ollama_clients_pull_copy_and_delete_models() {
    let stories = fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/stories.gguf")).unwrap();
    let hub = Server::new("owner/name", &[("stories-Q8_0.gguf", &stories), ("broken-Q4_0.gguf", b"no model")]);
    let home = cache("ollama");
    let mut command = command(&["--port", "0", "--allow-model-changes", "--lazy"]);
    for name in ["HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY"] {
        command.env_remove(name);
    }
    command.env("HF_HOME", &home).env("HF_ENDPOINT", &hub.endpoint);
    let program = Program::start(command);
    let address = program.address;
    let change = |method: &str, path: &str, body: Json| {
        send(address, method, path, &[("content-type", "application/json")], body.to_string().as_bytes())
    };
    let names = || {
        let tags = get(address, "/api/tags").json();
        tags["models"].as_array().unwrap().iter().map(|model| model["name"].clone()).collect::<Vec<_>>()
    };
    let name = "hf.co/owner/name:Q8_0";
    let lines = done(address, "/api/pull", json!({"model": name})).lines();
    let (first, last) = (&lines[0], lines.last().unwrap());
    assert_eq!((first, last), (&json!({"status": "pulling manifest"}), &json!({"status": "success"})));
    let told = lines.iter().rfind(|line| line["digest"].is_string()).unwrap();
    assert_eq!((&told["total"], &told["completed"]), (&json!(stories.len()), &json!(stories.len())), "{told}");
    assert!(told["digest"].as_str().unwrap().starts_with("sha256:") && told["status"] != "pulling manifest");
    assert_eq!(names(), [json!("stories"), json!(name)]);
    let tags = get(address, "/api/tags").json();
    assert_eq!(tags["models"][1]["digest"], json!(sha256(&stories)));
    assert_eq!(tags["models"][1]["size"], json!(stories.len()));
    let ask = |model: &str| {
        let asked = json!({
            "model": model, "prompt": "Once", "raw": true, "stream": false,
            "options": {"num_predict": 3, "temperature": 0},
        });
        post(address, "/api/generate", &asked)
    };
    let text = ask("stories").json()["response"].clone();
    assert_eq!(ask(name).json()["response"], text);
    // Again, without a stream: the loaded model stays.
    let again = done(address, "/api/pull", json!({"name": name, "stream": false})).json();
    assert_eq!(again, json!({"status": "success"}));
    let loaded = get(address, "/api/ps").json()["models"].as_array().unwrap().len();
    assert_eq!(loaded, 2);

    // What cannot be pulled is not listed.
    for (model, words) in [
        ("llama3.2", "is not a model address"),
        ("hf.co/owner/none", "404"),
        ("hf.co/owner/name:Q5_0", "no Q5_0"),
        ("hf.co/owner/name:Q4_0", "the server's log says why"),
    ] {
        let lines = done(address, "/api/pull", json!({"model": model})).lines();
        let error = lines.last().unwrap()["error"].as_str().unwrap_or_default();
        assert!(error.contains(words), "{model}: {lines:?}");
        let whole = post(address, "/api/pull", &json!({"model": model, "stream": false}));
        assert!(whole.status >= 400 && whole.json()["error"].as_str() == Some(error), "{}", whole.text());
    }

    let copied = change("POST", "/api/copy", json!({"source": name, "destination": "tale:latest"}));
    assert_eq!((copied.status, copied.text().as_str()), (200, ""));
    assert_eq!(names(), [json!("stories"), json!(name), json!("tale")]);
    assert_eq!(ask("tale").json()["response"], text);
    let ids: Vec<Json> =
        get(address, "/v1/models").json()["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(ids, names());
    for (method, path, body, status) in [
        ("POST", "/api/copy", json!({"source": "none", "destination": "x"}), 404),
        ("POST", "/api/copy", json!({"source": name, "destination": "stories"}), 409),
        ("POST", "/api/copy", json!({"source": name, "destination": ""}), 400),
        // It has a further name; it is a file of the command line; it is unknown.
        ("DELETE", "/api/delete", json!({"model": name}), 409),
        ("DELETE", "/api/delete", json!({"model": "stories"}), 403),
        ("DELETE", "/api/delete", json!({"model": "none"}), 404),
    ] {
        assert_eq!(change(method, path, body.clone()).status, status, "{path} {body}");
    }
    let blobs = || fs::read_dir(home.join("hub/models--owner--name/blobs")).map_or(0, Iterator::count);
    let n_blobs = blobs();
    assert_eq!(change("DELETE", "/api/delete", json!({"name": "tale"})).status, 200);
    assert_eq!((names().len(), blobs()), (2, n_blobs));
    let deleted = change("DELETE", "/api/delete", json!({"model": name}));
    assert_eq!((deleted.status, names(), blobs()), (200, vec![json!("stories")], n_blobs - 1));
    assert_eq!(ask(name).status, 404);
    program.end();
}
