//! The names in GGUF's `tokenizer.ggml.pre`, with llama.cpp's meaning (`llama-vocab.cpp` in `llama-cpp-sys-2`
//! 0.1.161). If its expressions only approximate those in the models' own `tokenizer.json`, the latter are used; and
//! if these normalise to NFC, so does this crate, unlike llama.cpp.

use super::splits::{self, Split};

/// A text preparation with its names.
pub(super) struct Family {
    pub names: &'static [&'static str],
    pub steps: &'static [Split],
    pub nfc: bool,
    pub ignore_merges: bool,
    pub add_bos: bool,
    pub add_sep: bool,
}

const GPT2: Family = Family {
    // Files older than these names are `default`, and most are GPT-2's. llama.cpp has an expression for it that no
    // model uses, and warns.
    names: &[
        "default",
        "gpt-2",
        "phi-2",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "exaone4",
        "jais",
        "trillion",
        "granite-docling",
    ],
    steps: &[splits::GPT2],
    nfc: false,
    ignore_merges: false,
    add_bos: false,
    add_sep: false,
};
const STARCODER: Family = Family {
    names: &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
    steps: &[splits::DIGIT, splits::GPT2],
    ..GPT2
};
const DBRX: Family = Family { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], steps: &[splits::LLAMA3], ..GPT2 };
const QWEN2: Family = Family { names: &["qwen2", "f2llmv2"], steps: &[splits::QWEN2], nfc: true, ..GPT2 };
const GPT4O: Family =
    Family { names: &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], steps: &[splits::GPT4O], ..GPT2 };
const DEEPSEEK3: Family = Family {
    names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
    steps: &[splits::THREE_DIGITS, splits::CJK, splits::DEEPSEEK3],
    ..GPT2
};

pub(super) const FAMILIES: [Family; 34] = [
    GPT2,
    Family { names: &["mpt", "olmo", "modern-bert"], nfc: true, ..GPT2 },
    Family { names: &["roberta-bpe", "jina-v1-en", "jina-v2-code"], add_sep: true, ..GPT2 },
    STARCODER,
    Family { names: &["command-r"], nfc: true, ..STARCODER },
    DBRX,
    Family { names: &["glm4", "glm5"], ignore_merges: true, ..DBRX },
    Family {
        names: &[
            "llama3",
            "llama-v3",
            "llama-bpe",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        ignore_merges: true,
        add_bos: true,
        ..DBRX
    },
    Family { names: &["jais-2"], steps: &[splits::JAIS2], ..GPT2 },
    Family { names: &["minicpm5"], steps: &[splits::THREE_DIGITS, splits::MINICPM5], ignore_merges: true, ..GPT2 },
    QWEN2,
    Family {
        names: &["deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"],
        nfc: false,
        ..QWEN2
    },
    Family { names: &["bailingmoe", "bailingmoe2", "llada-moe"], steps: &[splits::BAILING], ..GPT2 },
    Family { names: &["qwen35"], steps: &[splits::QWEN35], ..QWEN2 },
    Family { names: &["seed-coder"], steps: &[splits::SEED_CODER], ..GPT2 },
    Family { names: &["ufakzeka"], steps: &[splits::UFAKZEKA], ..GPT2 },
    Family { names: &["laguna"], steps: &[splits::LINES, splits::QWEN2], ..GPT2 },
    Family { names: &["exaone-moe"], steps: &[splits::EXAONE_MOE], ..GPT2 },
    GPT4O,
    Family { names: &["granite-embed-multi-97m"], ignore_merges: true, ..GPT4O },
    Family { names: &["tiny_aya", "cohere2moe"], steps: &[splits::DIGIT_GROUPS, splits::GPT4O], ..GPT2 },
    Family { names: &["tekken"], steps: &[splits::TEKKEN], ignore_merges: true, add_bos: true, ..GPT2 },
    Family { names: &["youtu"], steps: &[splits::SCRIPTS, splits::YOUTU], ignore_merges: true, ..GPT2 },
    Family { names: &["kimi-k2"], steps: &[splits::KIMI], ..GPT2 },
    DEEPSEEK3,
    Family { names: &["spark2_5"], steps: &[splits::THREE_DIGITS, splits::CJK, splits::SPARK, splits::DIGIT], ..GPT2 },
    Family { names: &["afmoe"], steps: &[splits::NUMBER_GROUPS, splits::ASIAN, splits::DEEPSEEK3], ..GPT2 },
    Family {
        names: &["deepseek-llm"],
        steps: &[
            splits::LINE_BREAK,
            splits::SPACED_CASED_LETTERS,
            splits::SPACED_SIGNS,
            splits::SPACES_AT_END,
            splits::EAST_ASIAN,
            splits::NUMBERS,
        ],
        ..GPT2
    },
    Family {
        names: &["deepseek-coder"],
        steps: &[
            splits::LINE_BREAK,
            splits::SPACED_LETTERS,
            splits::SPACED_PUNCTUATION,
            splits::EAST_ASIAN,
            splits::DIGIT,
        ],
        ..GPT2
    },
    Family { names: &["falcon"], steps: &[splits::PUNCTUATION_RUN, splits::GPT2, splits::THREE_ASCII_DIGITS], ..GPT2 },
    Family { names: &["poro-chat", "bloom", "gpt3-finnish"], steps: &[splits::BLOOM], ..GPT2 },
    Family { names: &["viking"], steps: &[splits::BLOOM, splits::DIGIT], ..GPT2 },
    Family {
        names: &["chameleon"],
        steps: &[splits::SENTINEL, splits::IMAGE, splits::TABS, splits::DIGIT, splits::PUNCTUATION, splits::GPT2],
        add_bos: true,
        ..GPT2
    },
    Family { names: &["superbpe"], steps: &[splits::NUMBERS, splits::BEFORE_GROUPS], ..GPT2 },
];
