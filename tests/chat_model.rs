//! Conversations with `ChatModel`, against plain text and each part alone.

use serde_json::{Value, json};
use tilewright::answer::{Event, Format};
use tilewright::chat::{ChatTemplate, Message, SpecialTexts};
use tilewright::engine::{Engine, EngineOptions};
use tilewright::generate::StopReason;
use tilewright::grammar::{Constraint, ToolChoice, ToolRules};
use tilewright::load::ModelFile;
use tilewright::{ChatModel, ChatRequest, ChatStream, Error, GenerateOptions, LoadOptions, Model};

use crate::common::{self, block_on};
use crate::scripted::{self, Says};

const PLAIN: &str = "{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}\
                     {% if add_generation_prompt %} assistant:{% endif %}";

fn template(source: &str) -> Option<ChatTemplate> {
    Some(ChatTemplate::from_source(source, SpecialTexts::new()).unwrap())
}

fn asked(options: GenerateOptions) -> ChatRequest {
    ChatRequest { options, ..ChatRequest::new(vec![Message::new("user", "a dog")]) }
}

fn tools() -> Vec<Value> {
    let parameters = json!({"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"]});
    vec![json!({"type": "function", "function": {"name": "sun", "parameters": parameters}})]
}

/// The built-in model's continuation of a text.
fn continued(model: &Model, text: &str, n: usize) -> String {
    common::collect(&mut model.session().unwrap().generate(text, &GenerateOptions::greedy(n)).unwrap()).1
}

fn texts(mut stream: ChatStream<'_>) -> (String, Option<StopReason>) {
    let mut text = String::new();
    while let Some(event) = block_on(stream.next()) {
        match event.unwrap() {
            Event::Text(more) => text += &more,
            other => panic!("{other:?}"),
        }
    }
    (text, stream.stop_reason())
}

#[test]
fn chat_answers_match_generation_in_session_and_engine() {
    let model = Model::builtin(&common::cpu()).unwrap();
    let chat = ChatModel::of(&model, template(PLAIN)).unwrap();
    let mut request = asked(GenerateOptions::greedy(16));
    let expected = continued(&model, " user: a dog assistant:", 16);
    assert_eq!(chat.prepare(&request).unwrap().ids, model.encode(" user: a dog assistant:").unwrap());
    let mut session = model.session().unwrap();
    let answer = block_on(chat.answer(&mut session, &request)).unwrap();
    assert_eq!((&answer.text, answer.stop_reason), (&expected, StopReason::MaxTokens));
    assert!(answer.thinking.is_empty() && answer.calls.is_empty());
    let engine = Engine::spawn(&model, &EngineOptions::default()).unwrap();
    let ended = (expected.clone(), Some(StopReason::MaxTokens));
    assert_eq!(texts(chat.stream(&mut session, &request).unwrap()), ended);
    assert_eq!(texts(chat.submit(&engine, &request).unwrap()), ended);

    // Another turn includes the answer, and the session reuses its cache.
    request.push(answer);
    request.messages.push(Message::new("user", "and then"));
    let next = block_on(chat.answer(&mut session, &request)).unwrap();
    let text = format!(" user: a dog assistant: {expected} user: and then assistant:");
    assert_eq!(next.text, continued(&model, &text, 16));

    request.prefill = Some("Once upon".into());
    request.messages.truncate(1);
    let begun = block_on(chat.answer(&mut session, &request)).unwrap();
    assert_eq!(begun.text, "Once upon".to_owned() + &continued(&model, " user: a dog assistant: Once upon", 16));
}

#[test]
fn request_fields_reach_the_template() {
    let model = Model::builtin(&common::cpu()).unwrap();
    let source = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ documents[0].title }} {{ mood }} \
                  {{ thinking }} {{ enable_thinking }} {{ strftime_now('%Y') }}";
    let chat = ChatModel::of(&model, template(source)).unwrap();
    let variables = json!({"mood": "happy", "thinking": "deep"});
    let request = ChatRequest {
        tools: tools(),
        documents: vec![json!({"title": "A day"})],
        variables: variables.as_object().unwrap().clone(),
        thinking: Some(false),
        now: Some(1_000_000_000),
        ..ChatRequest::new(Vec::new())
    };
    let ids = chat.prepare(&request).unwrap().ids;
    assert_eq!(ids, model.encode("[sun]A day happy deep False 2001").unwrap());
}

/// A template's answers: scripted output after the prompt of a request.
fn scripted(source: &str, special: &[&str], request: &ChatRequest, says: &str) -> (Model, ChatModel) {
    let load = |says: &Says| {
        let file = ModelFile::from_gguf_bytes(scripted::gguf(source, special, says, 512)).unwrap();
        let model = Model::from_file(&common::cpu(), file, LoadOptions::default()).unwrap();
        let chat = ChatModel::new(&model).unwrap();
        (model, chat)
    };
    // The same vocabulary, to count the prompt's tokens.
    let n_before = load(&Says::Behind(1, "")).1.prepare(request).unwrap().ids.len();
    load(&Says::Behind(n_before, says))
}

const MARKS: [&str; 5] = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"];
const THINKS: &str = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<think>\
                      {% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}{% endif %}";

#[test]
fn thinking_opened_by_the_prompt_is_separated() {
    let request = asked(GenerateOptions::greedy(100));
    let says = "I think.</think>Look: <tool_call>{\"name\": \"sun\", \"arguments\": {\"day\": 2}}</tool_call>";
    let (model, chat) = scripted(THINKS, &MARKS, &request, says);
    assert_eq!(chat.format(), Format::Hermes);
    let answer = block_on(chat.answer(&mut model.session().unwrap(), &request)).unwrap();
    assert_eq!((answer.thinking.as_str(), answer.text.as_str()), ("I think.", "Look:"));
    assert_eq!(answer.stop_reason, StopReason::Eos);
    let message = answer.into_message(3);
    assert_eq!(message.fields["reasoning_content"], "I think.");
    let function = json!({"name": "sun", "arguments": {"day": 2}});
    assert_eq!(message.fields["tool_calls"], json!([{"type": "function", "id": "call00300", "function": function}]));

    let text =
        |request: &ChatRequest| model.tokenizer().unwrap().decode(&chat.prepare(request).unwrap().ids, false).unwrap();
    assert_eq!(text(&request), "a dog<think>");
    assert_eq!(text(&ChatRequest { thinking: Some(false), ..request.clone() }), "a dog<think></think>");
    // The constraint of forced calls begins within the reasoning.
    let bound = chat.prepare(&ChatRequest { tools: tools(), ..request }).unwrap().options.constraint;
    let of_prompt = |prompt: &str| {
        let rules = ToolRules::new(Format::Hermes);
        Some(Constraint::tools(&tools(), &rules, model.tokenizer().unwrap(), prompt).unwrap())
    };
    assert!(bound == of_prompt("a dog<think>") && bound != of_prompt("a dog"));
}

#[test]
fn constraint_applies_after_the_prompts_thinking_or_header() {
    let constraint = Some(Constraint::Regex("yes|no".into()));
    let request = asked(GenerateOptions { constraint, ..GenerateOptions::greedy(20) });
    let harmony = ["<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"];
    let channels = "{% for m in messages %}{{ m.content }}{% endfor %}\
                    {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    for (source, special, prompt) in [
        (THINKS, &MARKS, "a dog<think></think>\n\n"),
        (channels, &harmony, "a dog<|start|>assistant<|channel|>final<|message|>"),
    ] {
        let (model, chat) = scripted(source, special, &request, "no");
        let ids = chat.prepare(&request).unwrap().ids;
        assert_eq!(model.tokenizer().unwrap().decode(&ids, false).unwrap(), prompt);
        let answer = block_on(chat.answer(&mut model.session().unwrap(), &request)).unwrap();
        assert_eq!((answer.thinking.as_str(), answer.text.as_str()), ("", "no"));
        assert_eq!(answer.stop_reason, StopReason::Complete);
    }
}

#[test]
fn tool_choice_decides_whether_tools_are_called() {
    let model = Model::builtin(&common::cpu()).unwrap();
    let chat = ChatModel::of(&model, ChatTemplate::known("chatml")).unwrap().with_format(Format::Hermes);
    let options = GenerateOptions { temperature: 1.0, seed: Some(4), ..GenerateOptions::greedy(100) };
    let request = ChatRequest { tools: tools(), parallel_calls: false, thinking: Some(false), ..asked(options) };
    let choose = |tool_choice: ToolChoice| ChatRequest { tool_choice, ..request.clone() };
    let answer = |request: &ChatRequest| block_on(chat.answer(&mut model.session().unwrap(), request)).unwrap();
    for choice in [ToolChoice::Required, ToolChoice::Tool("sun".into())] {
        let calls = answer(&choose(choice)).calls;
        assert_eq!(calls.len(), 1);
        assert!(calls[0].name == "sun" && [1, 2].map(Value::from).contains(&calls[0].arguments["day"]), "{calls:?}");
    }
    assert!(answer(&choose(ToolChoice::None)).calls.is_empty());
    // The model is free until it begins a call.
    let bound = |request: &ChatRequest, chat: &ChatModel| chat.prepare(request).unwrap().options.constraint;
    let rules = ToolRules { parallel: false, thinking: false, ..ToolRules::new(Format::Hermes) };
    let expected = Constraint::tools(&tools(), &rules, model.tokenizer().unwrap(), "").unwrap();
    assert_eq!(bound(&request, &chat), Some(expected));
    assert_eq!(bound(&ChatRequest { enforce_calls: false, ..request.clone() }, &chat), None);
    assert_eq!(bound(&ChatRequest { prefill: Some("Well".into()), ..request.clone() }, &chat), None);
    assert_eq!(bound(&request, &chat.clone().with_format(Format::Plain)), None);
}

#[test]
fn unanswerable_chat_requests_are_refused() {
    let model = Model::builtin(&common::cpu()).unwrap();
    let refused = ChatModel::new(&model).unwrap_err();
    assert!(matches!(&refused, Error::Template { found, .. } if found == "missing"), "{refused}");
    // Plain continuation still works.
    let continues = ChatModel::of(&model, None).unwrap();
    let request = ChatRequest { tools: tools(), ..asked(GenerateOptions::greedy(8)) };
    assert!(matches!(continues.prepare(&request), Err(Error::Template { .. })));
    assert!(continues.continue_text("Once", &request).unwrap().0.constraint.is_some());

    let chat = ChatModel::of(&model, template(PLAIN)).unwrap();
    let required = ChatRequest { tool_choice: ToolChoice::Required, ..request.clone() };
    let regex = GenerateOptions { constraint: Some(Constraint::Regex("a".into())), ..required.options.clone() };
    for (says, request) in [
        ("no tools", ChatRequest { tools: Vec::new(), ..required.clone() }),
        ("rule one out", ChatRequest { prefill: Some("Well".into()), ..required.clone() }),
        ("rule one out", ChatRequest { enforce_calls: false, ..required.clone() }),
        ("rule one out", ChatRequest { options: regex, ..required }),
    ] {
        let error = chat.prepare(&request).unwrap_err();
        assert!(matches!(error, Error::Option { option: "tool_choice", .. }), "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    let other = ChatRequest { tool_choice: ToolChoice::Tool("moon".into()), ..request.clone() };
    let error = chat.prepare(&other).unwrap_err();
    assert!(matches!(error, Error::Constraint { .. }) && error.to_string().contains("`moon`"), "{error}");

    let options = GenerateOptions { prompt_lookup: 3, ..GenerateOptions::greedy(8) };
    let mut guesses = ChatRequest { options, ..request };
    let mut session = model.session().unwrap();
    let error = chat.stream(&mut session, &guesses).err().unwrap();
    assert!(matches!(error, Error::Option { option: "prompt_lookup", .. }), "{error}");
    guesses.enforce_calls = false;
    assert!(chat.stream(&mut session, &guesses).is_ok());
}
