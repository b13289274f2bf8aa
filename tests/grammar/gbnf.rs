//! Grammars in the style of llama.cpp's documentation, against independent parsers: JSON's own, regular expressions, a
//! calculator.

use std::sync::Arc;
use std::time::Instant;

use serde::de::IgnoredAny;
use tilewright::Error;
use tilewright::formats::Gguf;
use tilewright::grammar::{Constraint, Grammars, Next};
use tilewright::load::vocab_from_gguf;
use tilewright::tokenizer::{EncodeOptions, Tokenizer};

use super::{is_expression, random_text};
use crate::common::Rng;

const JSON: &str = r##"# JSON
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,1})? ws
# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"##;
const ARITHMETIC: &str =
    "root ::= sum\nsum ::= term ([-+] term)*\nterm ::= num | \"(\" sum \")\"\nnum ::= [0-9] [0-9]? [0-9]?\n";
const LIST: &str = "root ::= item{1,3}\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]{1,9} \"\\n\"\n";
const CHESS: &str = r##"# Specifies chess moves as a list in algebraic notation
root   ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n"){0,3}
move   ::= (pawn | nonpawn | castle) [+#]?

# piece type, optional file/rank, optional capture, dest file & rank
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]

# optional file & capture, dest file & rank, optional promotion
pawn   ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?

castle ::= "O-O" "-O"?
"##;
const CHESS_REGEX: &str = r"^1\. M M\n([1-9][0-9]?\. M M\n){0,3}$";
const MOVE_REGEX: &str = r"((([a-h]x)?[a-h][1-8](=[NBKQR])?|[NBKQR][a-h]?[1-8]?x?[a-h][1-8]|O-O(-O)?)[+#]?)";

fn vocabulary() -> (Arc<Tokenizer>, Arc<Grammars>) {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders/qwen3-embedding/model.gguf");
    let bytes = std::fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_vocab(vocab_from_gguf(&gguf.metadata).unwrap()).unwrap());
    let grammars = Arc::new(Grammars::new(Arc::clone(&tokenizer), tokenizer.vocab_size() as u32).unwrap());
    (tokenizer, grammars)
}

fn gbnf(text: &str) -> Constraint {
    Constraint::Gbnf(text.into())
}

/// Whether the grammar accepts the whole text.
fn accepts(tokenizer: &Tokenizer, grammars: &Arc<Grammars>, constraint: &Constraint, text: &str) -> bool {
    let mut guide = grammars.begin(constraint, tokenizer.eos_ids()).unwrap();
    let ids = tokenizer.encode_with(text, EncodeOptions::default()).unwrap();
    for (at, &id) in ids.iter().enumerate() {
        if guide.allowed().unwrap()[id as usize / 32] >> (id % 32) & 1 == 0 {
            return false;
        }
        if guide.accept(id).unwrap() == Next::Complete {
            return at + 1 == ids.len();
        }
    }
    let end = tokenizer.eos_ids()[0] as usize;
    guide.allowed().unwrap()[end / 32] >> (end % 32) & 1 == 1
}

#[test]
fn output_of_published_gbnf_grammars_is_valid() {
    let (tokenizer, grammars) = vocabulary();
    let mut rng = Rng::new(3);
    let list = regex::Regex::new("^(- [^\r\n\x0b\x0c\u{85}\u{2028}\u{2029}]{1,9}\n){1,3}$").unwrap();
    let chess = regex::Regex::new(&CHESS_REGEX.replace('M', MOVE_REGEX)).unwrap();
    let is_json = |text: &str| text.starts_with('{') && serde_json::from_str::<IgnoredAny>(text).is_ok();
    type Check<'a> = &'a dyn Fn(&str) -> bool;
    let checks: [(&str, &str, Check); 4] = [
        ("json", JSON, &is_json),
        ("arithmetic", ARITHMETIC, &is_expression),
        ("list", LIST, &|text| list.is_match(text)),
        ("chess", CHESS, &|text| chess.is_match(text)),
    ];
    for (name, grammar, check) in checks {
        let mut whole = 0;
        for _ in 0..25 {
            if let Some(text) = random_text(&grammars, &tokenizer, &gbnf(grammar), &mut rng).unwrap() {
                assert!(check(&text), "{name}: {text:?}");
                assert!(accepts(&tokenizer, &grammars, &gbnf(grammar), &text), "{name}: {text:?}");
                whole += 1;
            }
        }
        println!("{name}: {whole} of 25 texts ended");
        assert!(whole >= 5, "{name}");
    }
}

#[test]
fn gbnf_grammar_accepts_exactly_its_language() {
    let (tokenizer, grammars) = vocabulary();
    for (grammar, yes, no) in [
        (
            JSON,
            &["{}", "{\"a\": [1, -2.5e1, {\"b\":\n \"\\u00e9x\"}]} ", "{\"k\":null}"][..],
            &["[]", "{\"a\": 01}", "{"][..],
        ),
        (ARITHMETIC, &["1+(22-3)", "7", "((1))"], &["", "1+", "1234", "(1"]),
        (CHESS, &["1. e4 e5\n2. Nf3 Nc6\n", "1. O-O-O Qxe4+\n"], &["1. e9 e5\n", "1. e4\n"]),
        ("root ::= \"a\" | \"ab\" \"c\"", &["a", "abc"], &["ab", "ac", ""]),
        // Longest-match parsing would fail.
        ("root ::= [a-z]* \"b\"", &["b", "ab", "abbb"], &["a", "", "ba"]),
        ("root ::= (\"ab\" \"!\" | [a-z]+ \"?\")", &["ab!", "ab?", "abc?"], &["ab", "abc!"]),
        (
            "root ::= x{2} y{,2} z{1,} \"é\"?\nx::=\"x\"\ny ::= [^xz]\nz ::= \"zz\"",
            &["xxzz", "xxaézzzzé"],
            &["xzz", "xxaaazz", "xxz"],
        ),
        (
            "root ::= \"\\x41\\u00e4\\U0001F600\\n\\t\\\"\\\\\" [\\]\\\\a-c-]",
            &["Aä😀\n\t\"\\]", "Aä😀\n\t\"\\-"],
            &["Aä😀\n\t\"\\d"],
        ),
        ("root ::= . [^a] [^]", &["aba", "\n\n\n"], &["aaa", "ab"]),
        ("root ::=\n  \"a\" |\n  # another\n  \"b\" # the last\n\n  \n", &["a", "b"], &["ab", ""]),
        ("root ::= ( | \"x\") (\"y\" | ) \"\"", &["", "x", "xy", "y"], &["yx"]),
        ("root ::= \"a/b\" [/]+ \"#\" [#]", &["a/b//##"], &["a/b##"]),
    ] {
        for text in yes {
            assert!(accepts(&tokenizer, &grammars, &gbnf(grammar), text), "{grammar}: {text:?}");
        }
        for text in no {
            assert!(!accepts(&tokenizer, &grammars, &gbnf(grammar), text), "{grammar}: {text:?}");
        }
    }
}

#[test]
fn malformed_gbnf_is_refused_with_its_line() {
    let (tokenizer, grammars) = vocabulary();
    let groups = format!("root ::= {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
    let chain: String = (0..900).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect();
    let doubled: String = (0..40).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
    let cases = [
        ("", "line 0", "a rule `root`"),
        ("x ::= \"a\"\n", "line 1", "a rule `root`"),
        ("root ::= \"a\"\n\nx ::= y", "line 3", "is `y`"),
        ("root ::= x\nx ::= y \"a\"\ny ::= \"b\"? x", "line", "left recursion"),
        ("root ::= root \"a\" | \"a\"", "line 1", "left recursion"),
        ("root ::= (\"\" | \"a\")* root", "line 1", "left recursion"),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2", "defined in line 1"),
        ("root ::= \"a", "line 1", "expected `\"`"),
        ("root ::= [a", "line 1", "expected `]`"),
        ("root ::= [z-a]", "line 1", "not before 'z'"),
        ("root ::= []", "line 1", "an empty class"),
        ("root ::= (\"a\"\n | \"b\"", "line 2", "expected `)`"),
        ("root ::= \"a\" )", "line 1", "a part of a rule"),
        ("root ::= * \"a\"", "line 1", "a part of a rule"),
        ("root ::= \"a\"{3,2}", "line 1", "at most 2 times"),
        ("root ::= \"a\"{2001}", "line 1", "at most 2000 times"),
        ("root ::= \"a\"{99999999999}", "line 1", "at most 2000 times"),
        ("root ::= \"a\"{}", "line 1", "a number of repetitions"),
        ("root ::= \"\\q\"", "line 1", "escapes"),
        ("root ::= \"\\u12\"", "line 1", "digits"),
        ("root ::= \"\\ud800\"", "line 1", "digits"),
        ("root = \"a\"", "line 1", "`::=`"),
        ("root ::= <a b>", "line 1", "a token"),
        (&groups, "line 1", "100 nested groups"),
        (&format!("root ::= r0\n{chain}r900 ::= r0"), "line", "left recursion"),
        (&format!("root ::= r0\n{doubled}r40 ::= \"x\""), "gbnf", "at most 20000"),
        (&"root ::= \"a\"\n".repeat(2000), "gbnf: bytes", "at most"),
        ("root ::= \"\" \u{0}", "line 1", "a part of a rule"),
    ];
    let mut longest = std::time::Duration::ZERO;
    for (grammar, line, says) in cases {
        let start = Instant::now();
        let error = grammars.begin(&gbnf(grammar), tokenizer.eos_ids()).unwrap_err();
        let elapsed = start.elapsed();
        let told = error.to_string();
        let shown: String = grammar.chars().take(80).collect();
        assert!(
            matches!(error, Error::Constraint { .. }) && told.contains(line) && told.contains(says),
            "{shown}: {told}"
        );
        longest = longest.max(elapsed);
    }
    println!("refused within {longest:?}");
    let chained = format!("root ::= r0\n{chain}r900 ::= \"x\"");
    let start = Instant::now();
    assert!(accepts(&tokenizer, &grammars, &gbnf(&chained), "x"));
    println!("a chain of 900 rules: {:?}", start.elapsed());
    assert!(matches!(Constraint::grammar_of(JSON.into()), Constraint::Gbnf(_)));
    assert!(matches!(Constraint::grammar_of("start: \"root ::= 1\"".into()), Constraint::Lark(_)));
}

#[test]
fn token_mask_of_a_large_vocabulary_is_fast() {
    let Some((tokenizer, grammars)) = super::vocabulary("ggml-vocab-qwen35") else { return };
    let text = "{\"name\": \"a text of some length\", \"list\": [1, 22, 333, {\"b\": true}]}";
    let mut guide = grammars.begin(&gbnf(JSON), tokenizer.eos_ids()).unwrap();
    let mut longest = std::time::Duration::ZERO;
    let ids = tokenizer.encode_with(text, EncodeOptions::default()).unwrap();
    for &id in &ids {
        let start = Instant::now();
        assert!(guide.allowed().unwrap()[id as usize / 32] >> (id % 32) & 1 == 1);
        longest = longest.max(start.elapsed());
        guide.accept(id).unwrap();
    }
    println!("{} tokens of JSON by a grammar of llama.cpp's, a mask in at most {longest:?}", ids.len());
}
