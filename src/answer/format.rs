//! The formats, their marks, and detection of a format.

/// A model family's format of reasoning and tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4 and many others.
    Hermes,
    /// `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder, Qwen3.5,
    /// Nemotron 3.
    Xml,
    /// `{"name": ..., "parameters": {...}}`, `<|python_tag|>` optional, and `<|python_tag|>NAME.call(key="value")`.
    Llama3,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]` and `[TOOL_CALLS]NAME[CALL_ID]id[ARGS]{...}`.
    Mistral,
    /// `<|tool_call>call:NAME{key:<|"|>value<|"|>}<tool_call|>`, reasoning in `<|channel>thought`.
    Gemma4,
    /// OpenAI's harmony: channels `analysis`, `commentary` and `final`, calls as messages `to=functions.NAME`.
    Harmony,
    /// `<|tool_call_start|>[NAME(key="value")]<|tool_call_end|>`, with Python literals.
    Lfm2,
    /// `<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3.
    Granite,
    /// `<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`: Nemotron Nano 2.
    NemotronV2,
    /// `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 to 4.7, Ling 3.
    Glm,
    /// `<seed:tool_call><function=NAME><parameter=KEY>value</parameter></function></seed:tool_call>`, reasoning in
    /// `<seed:think>`.
    SeedOss,
    /// `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in a section: DeepSeek V3.1. V3 and R1 write
    /// `function` for the name, which is before the arguments, and those in a fence.
    DeepSeek,
    /// `<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">value</｜DSML｜parameter>` in a section:
    /// DeepSeek V3.2.
    Dsml,
    /// `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in a section: Kimi K2.
    KimiK2,
    /// `<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>` in `<minimax:tool_call>`: MiniMax M2.
    MiniMax,
    /// `{"name": ..., "arguments": {...}}` or a list of them as a whole answer, for models trained without a format.
    Json,
    /// Reasoning only: tool calls in an unknown format.
    Plain,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 17] = [
        Format::Hermes,
        Format::Xml,
        Format::Llama3,
        Format::Mistral,
        Format::Gemma4,
        Format::Harmony,
        Format::Lfm2,
        Format::Granite,
        Format::NemotronV2,
        Format::Glm,
        Format::SeedOss,
        Format::DeepSeek,
        Format::Dsml,
        Format::KimiK2,
        Format::MiniMax,
        Format::Json,
        Format::Plain,
    ];

    /// The short name that [`Format::from_name`] accepts.
    pub fn name(self) -> &'static str {
        match self {
            Format::Hermes => "hermes",
            Format::Xml => "xml",
            Format::Llama3 => "llama3",
            Format::Mistral => "mistral",
            Format::Gemma4 => "gemma4",
            Format::Harmony => "harmony",
            Format::Lfm2 => "lfm2",
            Format::Granite => "granite",
            Format::NemotronV2 => "nemotron-v2",
            Format::Glm => "glm",
            Format::SeedOss => "seed-oss",
            Format::DeepSeek => "deepseek",
            Format::Dsml => "dsml",
            Format::KimiK2 => "kimi-k2",
            Format::MiniMax => "minimax",
            Format::Json => "json",
            Format::Plain => "plain",
        }
    }

    /// The format with a name.
    pub fn from_name(name: &str) -> Option<Self> {
        Format::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The format of a chat template, or, for a template without tools, the one of the vocabulary's special tokens. A
    /// template with unknown tool syntax is [`Format::Plain`]; without any sign it is [`Format::Json`].
    pub fn detect(template: &str, has_token: impl Fn(&str) -> bool) -> Self {
        // A template has all signs of its entry; the first match counts, so shared signs are last.
        const SIGNS: [(Format, &[&str]); 20] = [
            (Format::Harmony, &["<|channel|>", "<|message|>", "<|call|>"]),
            (Format::Gemma4, &["<|tool_call>"]),
            (Format::Mistral, &["[TOOL_CALLS]"]),
            (Format::Lfm2, &["<|tool_call_start|>"]),
            (Format::Lfm2, &["<|tool_list_start|>"]),
            (Format::Lfm2, &["List of tools: [", "keep_past_thinking"]),
            (Format::Granite, &["<|tool_call|>"]),
            (Format::NemotronV2, &["<TOOLCALL>"]),
            (Format::SeedOss, &["<seed:tool_call>"]),
            (Format::DeepSeek, &["<｜tool▁calls▁begin｜>"]),
            (Format::Dsml, &["｜DSML｜", "function_calls"]),
            (Format::KimiK2, &["<|tool_calls_section_begin|>"]),
            (Format::MiniMax, &["<minimax:tool_call>"]),
            (Format::Glm, &["<tool_call>", "<arg_key>", "<arg_value>"]),
            (Format::Xml, &["<tool_call>", "<function=", "<parameter="]),
            // Functionary: JSON in its own tags.
            (Format::Plain, &["<function="]),
            (Format::Hermes, &["<tool_call>", "name", "\"arguments\""]),
            (Format::Hermes, &["<tool_call>", "name", "\\\"arguments\\\""]),
            (Format::Llama3, &["<|python_tag|>"]),
            (Format::Llama3, &["<|start_header_id|>", "\"parameters\": dictionary"]),
        ];
        const TOKENS: [(Format, &str); 12] = [
            (Format::Harmony, "<|channel|>"),
            (Format::Gemma4, "<|tool_call>"),
            (Format::Mistral, "[TOOL_CALLS]"),
            (Format::Lfm2, "<|tool_call_start|>"),
            (Format::Granite, "<|tool_call|>"),
            (Format::SeedOss, "<seed:tool_call>"),
            (Format::DeepSeek, "<｜tool▁calls▁begin｜>"),
            (Format::KimiK2, "<|tool_calls_section_begin|>"),
            (Format::MiniMax, "<minimax:tool_call>"),
            (Format::Glm, "<arg_key>"),
            (Format::Hermes, "<tool_call>"),
            (Format::Llama3, "<|python_tag|>"),
        ];
        let fits = |signs: &[&str]| signs.iter().all(|sign| template.contains(sign));
        if let Some((format, _)) = SIGNS.iter().find(|(_, signs)| fits(signs)) {
            return *format;
        }
        if template.contains("tools") || template.contains("tool_calls") {
            return Format::Plain;
        }
        TOKENS.iter().find(|(_, token)| has_token(token)).map_or(Format::Json, |(format, _)| *format)
    }

    /// Whether a call may have no mark before it.
    pub(crate) fn is_bare(self) -> bool {
        matches!(self, Format::Llama3 | Format::Json)
    }

    /// Whether an answer in this format may have reasoning.
    pub fn can_think(self) -> bool {
        self == Format::Harmony || self.marks().iter().any(|(_, mark)| *mark == Mark::ThinkOpen)
    }

    /// The marks of the format.
    pub(crate) fn marks(self) -> &'static [(&'static str, Mark)] {
        const THINK: [(&str, Mark); 2] = [("<think>", Mark::ThinkOpen), ("</think>", Mark::ThinkClose)];
        const TAGGED: [(&str, Mark); 7] = [
            THINK[0],
            THINK[1],
            ("<tool_call>", Mark::CallOpen),
            ("</tool_call>", Mark::CallClose),
            // Apriel's, around a list.
            ("<tool_calls>", Mark::CallOpen),
            ("</tool_calls>", Mark::CallClose),
            // Qwen3-Coder may omit `<tool_call>`.
            ("<function=", Mark::Function),
        ];
        match self {
            Format::Hermes => TAGGED.split_at(6).0,
            Format::Xml => &TAGGED,
            Format::Llama3 => &[THINK[0], THINK[1], ("<|python_tag|>", Mark::CallOpen)],
            Format::Mistral => &[
                ("[THINK]", Mark::ThinkOpen),
                ("[/THINK]", Mark::ThinkClose),
                ("[TOOL_CALLS]", Mark::CallOpen),
                ("[CALL_ID]", Mark::Inner),
                ("[ARGS]", Mark::Inner),
            ],
            Format::Gemma4 => &[
                ("<|channel>", Mark::ThinkOpen),
                ("<channel|>", Mark::ThinkClose),
                ("<|tool_call>", Mark::CallOpen),
                ("<tool_call|>", Mark::CallClose),
                (super::values::GEMMA_QUOTE, Mark::Inner),
            ],
            Format::Harmony => &[
                ("<|start|>", Mark::Start),
                ("<|channel|>", Mark::Channel),
                ("<|message|>", Mark::Message),
                ("<|end|>", Mark::End),
                ("<|call|>", Mark::End),
                ("<|return|>", Mark::End),
                ("<|constrain|>", Mark::Inner),
            ],
            Format::Lfm2 => {
                &[THINK[0], THINK[1], ("<|tool_call_start|>", Mark::CallOpen), ("<|tool_call_end|>", Mark::CallClose)]
            }
            Format::Granite => &[
                THINK[0],
                THINK[1],
                ("<|tool_call|>", Mark::CallOpen),
                ("<tool_call>", Mark::CallOpen),
                ("</tool_call>", Mark::CallClose),
                // Phi-4-mini's.
                ("<|/tool_call|>", Mark::CallClose),
                // Granite 3.3's, around the answer after reasoning.
                ("<response>", Mark::Silent),
                ("</response>", Mark::Silent),
            ],
            Format::NemotronV2 => {
                &[THINK[0], THINK[1], ("<TOOLCALL>", Mark::CallOpen), ("</TOOLCALL>", Mark::CallClose)]
            }
            Format::Glm => &[
                THINK[0],
                THINK[1],
                ("<tool_call>", Mark::CallOpen),
                ("</tool_call>", Mark::CallClose),
                ("<arg_key>", Mark::Inner),
                ("</arg_key>", Mark::Inner),
                ("<arg_value>", Mark::Inner),
                ("</arg_value>", Mark::Inner),
            ],
            Format::SeedOss => &[
                ("<seed:think>", Mark::ThinkOpen),
                ("</seed:think>", Mark::ThinkClose),
                ("<seed:tool_call>", Mark::CallOpen),
                ("</seed:tool_call>", Mark::CallClose),
            ],
            Format::DeepSeek => &[
                THINK[0],
                THINK[1],
                ("<｜tool▁calls▁begin｜>", Mark::CallOpen),
                ("<｜tool▁call▁begin｜>", Mark::CallOpen),
                ("<｜tool▁sep｜>", Mark::Inner),
                ("<｜tool▁call▁end｜>", Mark::CallClose),
                ("<｜tool▁calls▁end｜>", Mark::CallClose),
            ],
            // `｜DSML｜` is a token with text, and the rest of a tag is other tokens.
            Format::Dsml => &[
                THINK[0],
                THINK[1],
                ("<｜DSML｜function_calls>", Mark::CallOpen),
                ("</｜DSML｜function_calls>", Mark::CallClose),
                ("<｜DSML｜invoke name=\"", Mark::Function),
            ],
            Format::KimiK2 => &[
                THINK[0],
                THINK[1],
                ("<|tool_calls_section_begin|>", Mark::CallOpen),
                ("<|tool_call_begin|>", Mark::CallOpen),
                ("<|tool_call_argument_begin|>", Mark::Inner),
                ("<|tool_call_end|>", Mark::CallClose),
                ("<|tool_calls_section_end|>", Mark::CallClose),
            ],
            Format::MiniMax => &[
                THINK[0],
                THINK[1],
                ("<minimax:tool_call>", Mark::CallOpen),
                ("</minimax:tool_call>", Mark::CallClose),
                ("<invoke name=\"", Mark::Function),
            ],
            Format::Json => &THINK,
            Format::Plain => &[THINK[0], THINK[1], ("[THINK]", Mark::ThinkOpen), ("[/THINK]", Mark::ThinkClose)],
        }
    }
}

impl std::fmt::Display for Format {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A mark's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    ThinkOpen,
    ThinkClose,
    CallOpen,
    CallClose,
    /// Starts a call and is part of it.
    Function,
    /// Part of a call or a header, parsed as text there.
    Inner,
    /// Around the answer, without meaning.
    Silent,
    /// Starts a harmony message.
    Start,
    /// Starts a channel's name.
    Channel,
    /// Ends a header.
    Message,
    /// Ends a message.
    End,
}
