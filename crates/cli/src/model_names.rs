//! Hints for models that are neither a file nor an address.

use std::path::Path;

use tilewright::hub::Address;

use super::hub::KnownModel;

/// Hosts of the hub, in links and in names that ollama accepts.
const HOSTS: [&str; 3] = ["huggingface.co/", "www.huggingface.co/", "hf.co/"];

/// Whether a first argument means a model, not a subcommand.
pub fn is_model(word: &str) -> bool {
    Path::new(word).exists()
        || word.contains(['/', '\\'])
        || Address::is_meant_by(word)
        || word.to_ascii_lowercase().ends_with(".gguf")
}

/// Name of the built-in model in `serve`.
pub const BUILTIN: &str = "stories";

/// What to do about a model that does not exist.
pub fn hint(name: &str, known: &[KnownModel]) -> String {
    match address(name, known) {
        _ if [BUILTIN, "builtin"].contains(&name) => "the built-in model is the default: leave the name out".into(),
        Some(address) => format!("did you mean `{address}`? `tilewright list --available` lists other models"),
        None if name.contains(' ') => {
            "the first argument is the model; to give the built-in model a prompt, use -p PROMPT".into()
        }
        None if name.contains("://") => "download it, and give the path of the file".into(),
        None if is_path(name) => "expected a GGUF file, a Hugging Face folder, or hf:OWNER/REPO".into(),
        None => "expected a file, a folder or hf:OWNER/REPO; `tilewright list --available` lists models".into(),
    }
}

/// The address that a name or link stands for.
pub fn address(name: &str, known: &[KnownModel]) -> Option<String> {
    let name = name.trim_end_matches('/');
    let bare = name.strip_prefix("https://").or_else(|| name.strip_prefix("http://")).unwrap_or(name);
    if let Some(path) = HOSTS.iter().find_map(|host| bare.strip_prefix(host)) {
        return of_link(path);
    }
    if name.contains("://") || is_path(name) {
        return None;
    }
    match name.split('/').count() {
        1 => of_whisper(name).or_else(|| of_name(name, known)),
        2 => valid(format!("hf:{name}")),
        _ => None,
    }
}

/// Whether a name can only be that of a file.
fn is_path(name: &str) -> bool {
    name.starts_with(['/', '.', '~', '\\']) || name.to_ascii_lowercase().ends_with(".gguf") || name.contains('\\')
}

/// The address of a link without its host: `OWNER/REPO`, or with `/blob/REVISION/PATH` or the like behind it.
fn of_link(path: &str) -> Option<String> {
    let path = path.split(['?', '#']).next()?.trim_end_matches('/');
    let parts: Vec<&str> = path.splitn(5, '/').collect();
    let (repo, rest) = (parts.get(..2)?.join("/"), &parts[2..]);
    let revision = |name: &str| if name == "main" { String::new() } else { format!("@{name}") };
    match rest {
        [] => valid(format!("hf:{repo}")),
        ["tree", name] => valid(format!("hf:{repo}{}", revision(name))),
        ["resolve" | "blob" | "tree", name, file] => valid(format!("hf:{repo}/{file}{}", revision(name))),
        _ => None,
    }
}

fn valid(address: String) -> Option<String> {
    address.parse::<Address>().is_ok().then_some(address)
}

/// The address of a model of OpenAI's `whisper`, by its size, with `whisper-` before it or not.
fn of_whisper(name: &str) -> Option<String> {
    let size = match name.strip_prefix("whisper-").unwrap_or(name) {
        "large" => "large-v3",
        "turbo" => "large-v3-turbo",
        size => size,
    };
    let stem = size.strip_suffix(".en").filter(|stem| !stem.starts_with("large")).unwrap_or(size);
    let sizes = ["tiny", "base", "small", "medium", "large-v1", "large-v2", "large-v3", "large-v3-turbo"];
    sizes.contains(&stem).then(|| match size {
        "large-v1" => "hf:openai/whisper-large".into(),
        size => format!("hf:openai/whisper-{size}"),
    })
}

/// The first known model whose name contains this one, as `llama3.2` or `qwen3:0.6b` in ollama's registry.
fn of_name(name: &str, known: &[KnownModel]) -> Option<String> {
    // Dots stay: `qwen3.8` is not Qwen3 8B.
    let plain = |text: &str| text.to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "");
    let wanted = plain(name.strip_suffix(":latest").unwrap_or(name));
    let is_it = |model: &&KnownModel| plain(&model.name).contains(&wanted) || plain(&model.address).contains(&wanted);
    if wanted.len() < 4 { None } else { known.iter().find(is_it).map(|model| model.address.clone()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::available;

    #[test]
    fn names_of_other_programs_lead_to_addresses() {
        let known = available().unwrap();
        for (name, want) in [
            ("llama3.2", Some("hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M")),
            ("llama3.2:3b", Some("hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M")),
            ("qwen3:0.6b", Some("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0")),
            ("qwen3", Some("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0")),
            ("qwen3.8", Some("hf:unsloth/Qwen3.8-27B-GGUF:UD-Q4_K_M")),
            ("qwen3:8b", Some("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M")),
            ("gemma3:latest", Some("hf:ggml-org/gemma-3-1b-it-GGUF:Q4_K_M")),
            ("all-minilm", Some("hf:sentence-transformers/all-MiniLM-L6-v2")),
            ("all-MiniLM-L6-v2/", Some("hf:sentence-transformers/all-MiniLM-L6-v2")),
            ("tiny", Some("hf:openai/whisper-tiny")),
            ("small.en", Some("hf:openai/whisper-small.en")),
            ("whisper-turbo", Some("hf:openai/whisper-large-v3-turbo")),
            ("large-v3", Some("hf:openai/whisper-large-v3")),
            ("Qwen/Qwen3-0.6B-GGUF", Some("hf:Qwen/Qwen3-0.6B-GGUF")),
            ("Qwen/Qwen3-0.6B-GGUF:Q8_0", Some("hf:Qwen/Qwen3-0.6B-GGUF:Q8_0")),
            ("hf.co/a/b:Q4_0", Some("hf:a/b:Q4_0")),
            ("https://huggingface.co/a/b", Some("hf:a/b")),
            ("https://huggingface.co/a/b/tree/main", Some("hf:a/b")),
            ("https://huggingface.co/a/b/resolve/main/c-Q4_0.gguf?download=true", Some("hf:a/b/c-Q4_0.gguf")),
            ("https://huggingface.co/a/b/blob/v1/c/d.gguf", Some("hf:a/b/c/d.gguf@v1")),
            ("https://example.org/a/b.gguf", None),
            ("./a/b", None),
            ("models/b.gguf", None),
            ("rnu", None),
            ("nothing-known", None),
        ] {
            assert_eq!(address(name, &known).as_deref(), want, "{name}");
        }
    }
}
