//! `tilewright chat` with the built-in model, which has no template and was trained without one.

use crate::files;

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn chat(args: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args([&["chat", "--device", "cpu", "-n", "12", "--seed", "3", "--lines"], args].concat());
    run(command, input)
}

fn run(mut command: Command, input: &str) -> Output {
    command.env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A command that ends early does not read its stdin.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

/// A model with its own template, and its answer to a message with these arguments.
fn answer_of(name: &str, args: &[&str]) -> String {
    let told = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}{% for d in documents or [] %}\
                ({{ d.title }}){% endfor %}{{ mood|default('') }}{% for m in messages %} {{ m.role }}: {{ m.content }}\
                {% endfor %}{% if add_generation_prompt %} assistant:{% endif %}";
    let path = |ending: &str| format!("{}/{name}{ending}", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(path(".gguf"), files::with_templates(told, &[])).unwrap();
    std::fs::write(path("_tools.json"), r#"[{"type": "function", "function": {"name": "sun"}}]"#).unwrap();
    std::fs::write(path("_documents.json"), r#"[{"title": "A day"}]"#).unwrap();
    let args: Vec<String> = args.iter().map(|arg| arg.replace("AT", &path(""))).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let output = chat(&[&[path(".gguf").as_str(), "--temperature", "0"], &args[..]].concat(), "a dog\n");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn continuation(prompt: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["run", "--device", "cpu", "-n", "12", "--temperature", "0", "--json", "--prompt", prompt]);
    let output = command.env("TILEWRIGHT_CACHE_DIR", "").env_remove("TILEWRIGHT_DEVICE").output().unwrap();
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    json["text"].as_str().unwrap().to_owned()
}

#[test]
fn chat_flags_pass_tools_documents_and_variables() {
    let args = ["--tools", "AT_tools.json", "--documents", "AT_documents.json", "--template-var", "mood=Happy"];
    let expected = continuation("<sun>(A day)Happy user: a dog assistant:");
    assert_eq!(answer_of("chat_told", &args), expected + "\n");
    assert_eq!(chat(&["--template-var", "x"], "").status.code(), Some(2));
    let output = chat(&["--template", "alpaca", "--tools", "/nowhere.json"], "");
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn prefill_flag_begins_the_answer() {
    let begun = answer_of("chat_begun", &["--prefill", "Once upon"]);
    assert_eq!(begun, format!("Once upon{}\n", continuation(" user: a dog assistant: Once upon")));
}

fn saved(name: &str, lines: &str) -> (Value, Output) {
    let path = format!("{}/{name}.json", env!("CARGO_TARGET_TMPDIR"));
    let output = chat(&["--template", "alpaca", "--system", "Once upon a time"], &format!("{lines}/save {path}\n"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap(), output)
}

/// `chat` without `--lines`, greedy, with the built-in model.
fn chat_once(args: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args([&["chat", "--device", "cpu", "-n", "12", "--temperature", "0"], args].concat());
    run(command, input)
}

#[test]
fn model_without_a_template_continues_the_messages_with_a_notice() {
    let output = chat_once(&["-p", "The cat"], "");
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{message}");
    assert!(message.contains("has no chat template") && message.contains("one of chatml, llama2"), "{message}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), continuation("The cat") + "\n");
    assert_eq!(chat(&["--template", "nope"], "").status.code(), Some(2));
}

#[test]
fn prompt_and_pipe_are_one_message() {
    let answer = |args: &[&str], input: &str| {
        let output = chat_once(args, input);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(answer(&[], "The cat\nsat\n"), continuation("The cat\nsat") + "\n");
    assert_eq!(answer(&["-p", "And a dog"], "The cat\r\n"), continuation("The cat\nAnd a dog") + "\n");
    // A message is not a command.
    assert_eq!(answer(&["--prompt", "/help"], ""), continuation("/help") + "\n");
    let output = chat_once(&[], "");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr).unwrap().contains("stdin: no text, expected a message there or as PROMPT")
    );
    assert_eq!(chat_once(&["--lines", "-p", "x"], "").status.code(), Some(2));
}

#[test]
fn input_lines_are_messages_and_answers_are_printed() {
    let (messages, output) = saved("chat_lines", "Lily had a\\\ndog.\n\n//slash\n");
    let messages = messages.as_array().unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user", "assistant"]);
    assert_eq!(
        (messages[1]["content"].as_str(), messages[3]["content"].as_str()),
        (Some("Lily had a\ndog."), Some("/slash"))
    );
    let answers = [&messages[2], &messages[4]].map(|message| message["content"].as_str().unwrap().to_owned() + "\n");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), answers.concat());
}

#[test]
fn answer_does_not_depend_on_the_kv_cache() {
    // Nothing remains from before /clear, and resuming a conversation equals computing it at once.
    let (cleared, _) = saved("chat_cleared", "The cat\n/clear\nA dog\nAnd then\n");
    let (fresh, _) = saved("chat_fresh", "A dog\nAnd then\n");
    assert_eq!(cleared, fresh);
}

#[test]
fn chat_commands_change_the_conversation() {
    let (messages, output) = saved("chat_commands", "/regen\n/nope\n/help\n/system\nA dog\n/regen\n");
    let notes = String::from_utf8(output.stderr).unwrap();
    for note in ["no message to answer", "no command /nope", "/regen         answer"] {
        assert!(notes.contains(note), "{notes}");
    }
    let messages = messages.as_array().unwrap();
    assert_eq!((messages.len(), messages[0]["content"].as_str()), (2, Some("A dog")));
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.ends_with(&format!("{}\n", messages[1]["content"].as_str().unwrap())));
    // Sampled with another seed.
    let first = printed.strip_suffix(&format!("{}\n", messages[1]["content"].as_str().unwrap())).unwrap();
    assert!(!first.is_empty() && first.trim_end() != messages[1]["content"]);
    assert!(chat(&["--template", "alpaca"], "/quit\nA dog\n").stdout.is_empty());
}

#[test]
fn thinking_and_tool_calls_are_separated_and_saved() {
    let path = |ending: &str| format!("{}/chat_calls{ending}", env!("CARGO_TARGET_TMPDIR"));
    let tools = r#"[{"type": "function", "function": {"name": "sun", "description": "Where the sun is.\nNow."}}]"#;
    std::fs::write(path("_tools.json"), tools).unwrap();
    let begun = r#"<think>Sunny?</think><tool_call>{"name": "sun", "arguments": {"day": 2}}</tool_call>"#;
    let (tools, saved) = (path("_tools.json"), path(".json"));
    let args = ["--template", "alpaca", "--tool-format", "hermes", "--prefill", begun, "--tools", &tools];
    let lines = format!("/tools\n/result 1\nA dog\n/result 21 degrees\n/save {saved}\n");
    let output = chat(&args, &lines);
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{notes}");
    assert!(notes.contains("sun            Where the sun is.\n") && notes.contains("no call to answer"), "{notes}");
    let messages: Vec<Value> = serde_json::from_slice(&std::fs::read(saved).unwrap()).unwrap();
    let roles: Vec<&str> = messages.iter().map(|message| message["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "tool", "assistant"]);
    let mut printed = String::new();
    for message in [&messages[1], &messages[3]] {
        assert_eq!(message["reasoning_content"], "Sunny?");
        let call = &message["tool_calls"][0];
        assert_eq!(call["function"], serde_json::json!({"name": "sun", "arguments": {"day": 2}}));
        assert_eq!(call["id"].as_str().map(str::len), Some(9));
        let text = message["content"].as_str().unwrap();
        printed += &format!("<think>\nSunny?\n</think>\n\ncall sun {{\"day\":2}}\n{text}\n");
    }
    assert_eq!(String::from_utf8(output.stdout).unwrap(), printed);
    assert_eq!(messages[2]["content"], "21 degrees");
    assert_eq!(messages[2]["tool_call_id"], messages[1]["tool_calls"][0]["id"]);
    assert_eq!(chat(&["--template", "alpaca", "--tool-format", "nope"], "").status.code(), Some(2));
}
