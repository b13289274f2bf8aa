//! Order of the library's modules: each uses only those before it, so there are no cycles.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Modules of `src/`, lowest first.
const ORDER: [&str; 46] = [
    // Independent.
    "counted",
    "counters",
    "loss",
    "platform",
    "memory",
    "sort",
    "xxh64",
    // Errors and files.
    "error",
    "panics",
    "cache",
    "formats",
    "picture",
    "sound",
    // Elements of passes.
    "dtype",
    "shaders",
    "target",
    "tensor",
    "matrix",
    "recording",
    "kernels",
    // Text.
    "tokenizer",
    "answer",
    "grammar",
    // Executors.
    "gpu",
    "cpu",
    "tested",
    "device",
    "interop",
    "recovery",
    "saving",
    // Models.
    "model",
    "load",
    "chat",
    "hub",
    "tuning",
    "open",
    "vision",
    "audio",
    // Public API.
    "generate",
    "transcribe",
    "engine",
    "chat_model",
    "embed",
    "retrieval",
    "bench",
    "web",
];

/// A module name used in a file, and its line.
#[derive(Debug, PartialEq)]
struct Use {
    line: usize,
    module: String,
}

/// The text without comments and trailing tests; line numbers are kept.
fn code_of(text: &str) -> String {
    let lines = text.lines().map(|line| match line.find("//") {
        // The slashes of a URL follow a colon.
        Some(at) if !line[..at].ends_with(':') => &line[..at],
        _ => line,
    });
    let lines: Vec<&str> = lines.collect();
    let is_tests =
        |pair: &[&str]| pair[0].starts_with("#[cfg(") && pair[0].contains("test") && pair[1].starts_with("mod ");
    let end = lines.windows(2).position(|pair| is_tests(pair) && pair[1].ends_with('{')).unwrap_or(lines.len());
    lines[..end].join("\n")
}

/// First names of a path: `a` of `a::b`, and `a`, `b` of `{a::c, b}`.
fn first_names(path: &str) -> Vec<&str> {
    let name = |text: &'_ str| text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let Some(list) = path.strip_prefix('{') else { return vec![&path[..name(path)]] };
    let (mut names, mut depth, mut is_first) = (Vec::new(), 0, true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => is_first = true,
            c if is_first && (c.is_alphabetic() || c == '_') => {
                names.push(&list[at..][..name(&list[at..])]);
                is_first = false;
            }
            _ => {}
        }
    }
    names
}

/// Modules used by a file; `exported` maps names that `lib.rs` re-exports to their modules.
fn uses(file: &Path, text: &str, exported: &BTreeMap<String, String>) -> Vec<Use> {
    let code = code_of(text);
    // At the top of a module file, `super` is the crate.
    let to_root = format!("{}::", vec!["super"; file.components().count()].join("::"));
    let mut found = Vec::new();
    for prefix in ["crate::", to_root.as_str()] {
        for (at, _) in code.match_indices(prefix) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':' || c == '$') {
                continue;
            }
            let line = code[..at].matches('\n').count() + 1;
            for name in first_names(&code[at + prefix.len()..]) {
                let module = exported.get(name).map_or(name, String::as_str);
                // A macro, or a function of the crate's root.
                if name != "super" && !module.is_empty() {
                    found.push(Use { line, module: module.into() });
                }
            }
        }
    }
    found
}

/// Names exported by `lib.rs`, with their modules.
fn exported(lib: &str) -> BTreeMap<String, String> {
    let code = code_of(lib);
    let statements = code.split(';').filter_map(|statement| statement.split_once("pub use "));
    let mut exported = BTreeMap::new();
    for (_, path) in statements {
        let Some((module, names)) = path.split_once("::") else { continue };
        for name in names.trim_matches(['{', '}']).split(',') {
            let name = name.rsplit(" as ").next().unwrap_or(name).trim();
            exported.insert(name.to_owned(), module.to_owned());
        }
    }
    exported
}

/// Faults in the uses of a module's file, one per line.
fn upward(file: &Path, text: &str, exported: &BTreeMap<String, String>) -> Vec<String> {
    let top = file.iter().next().expect("a nonempty path").to_str().expect("a name in UTF-8").trim_end_matches(".rs");
    let place = |module: &str| ORDER.iter().position(|&known| known == module);
    let own = place(top);
    let describe = |found: Use| {
        let Use { line, module } = found;
        let at = format!("src/{}:{line}: `{top}` uses `{module}`", file.display());
        match (own, place(&module)) {
            (None, _) => Some(format!("{at}: `{top}` has no place in ORDER")),
            (_, None) => Some(format!("{at}, which is not a module in ORDER")),
            (Some(own), Some(used)) => (used > own).then(|| format!("{at}, which is above it")),
        }
    };
    uses(file, text, exported).into_iter().filter_map(describe).collect()
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("src exists") {
        let path = entry.expect("a readable entry").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

#[test]
fn no_module_uses_a_module_of_a_higher_layer() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let exported = exported(&std::fs::read_to_string(src.join("lib.rs")).expect("lib.rs exists"));
    let mut paths = Vec::new();
    files(&src, &mut paths);
    let (mut wrong, mut n_uses, mut seen) = (Vec::new(), 0, std::collections::BTreeSet::new());
    for path in paths {
        let file = path.strip_prefix(&src).expect("a path in src");
        if file == Path::new("lib.rs") {
            continue;
        }
        let text = std::fs::read_to_string(&path).expect("readable");
        n_uses += uses(file, &text, &exported).len();
        wrong.extend(upward(file, &text, &exported));
        seen.insert(file.iter().next().map(|top| top.to_string_lossy().trim_end_matches(".rs").to_owned()));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(n_uses > 1000, "only {n_uses} uses were found");
    let gone: Vec<_> = ORDER.iter().filter(|&&module| !seen.contains(&Some(module.to_owned()))).collect();
    assert!(gone.is_empty(), "no such modules: {gone:?}");
}

#[test]
fn use_of_a_module_above_is_detected() {
    let exported = exported("pub use device::{Clock, Device as D};\npub use error::Error;");
    let text = "// crate::web\nuse crate::{tensor::{Role, Tensor}, D};\nfn f() { crate::hub::fetch(); }\n";
    let places = |file: &str| upward(Path::new(file), text, &exported).join("\n");
    assert_eq!(
        places("kernels/linear.rs"),
        "src/kernels/linear.rs:2: `kernels` uses `device`, which is above it\n\
         src/kernels/linear.rs:3: `kernels` uses `hub`, which is above it"
    );
    assert_eq!(places("web.rs"), "");
    let own = "use super::device::Device;\n#[cfg(test)]\nmod tests {\n    use crate::web;\n}\n";
    assert_eq!(upward(Path::new("cpu.rs"), own, &exported).len(), 1);
    assert_eq!(upward(Path::new("cpu/dots.rs"), own, &exported).len(), 0);
    let deep = "use super::super::device::Device;\n";
    assert_eq!(upward(Path::new("cpu/dots.rs"), deep, &exported).len(), 1);
    assert!(places("unheard_of.rs").contains("has no place"));
}
