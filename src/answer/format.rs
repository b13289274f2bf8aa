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
    /// `{"name": ..., "arguments": {...}}` or a list of them as a whole answer, for models trained without a format.
    Json,
    /// Reasoning only: tool calls in an unknown format.
    Plain,
}

impl Format {
    /// All formats.
    pub const ALL: [Format; 10] = [
        Format::Hermes,
        Format::Xml,
        Format::Llama3,
        Format::Mistral,
        Format::Gemma4,
        Format::Harmony,
        Format::Lfm2,
        Format::Granite,
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
        const SIGNS: [(Format, &[&str]); 14] = [
            (Format::Harmony, &["<|channel|>", "<|message|>", "<|call|>"]),
            (Format::Gemma4, &["<|tool_call>"]),
            (Format::Mistral, &["[TOOL_CALLS]"]),
            (Format::Lfm2, &["<|tool_call_start|>"]),
            (Format::Lfm2, &["<|tool_list_start|>"]),
            (Format::Lfm2, &["List of tools: [", "keep_past_thinking"]),
            (Format::Granite, &["<|tool_call|>"]),
            // Qwen's prompt with other marks, which are not supported.
            (Format::Plain, &["seed:tool_call"]),
            (Format::Xml, &["<tool_call>", "<function=", "<parameter="]),
            // Functionary: JSON in its own tags.
            (Format::Plain, &["<function="]),
            (Format::Hermes, &["<tool_call>", "name", "\"arguments\""]),
            (Format::Hermes, &["<tool_call>", "name", "\\\"arguments\\\""]),
            (Format::Llama3, &["<|python_tag|>"]),
            (Format::Llama3, &["<|start_header_id|>", "\"parameters\": dictionary"]),
        ];
        const TOKENS: [(Format, &str); 7] = [
            (Format::Harmony, "<|channel|>"),
            (Format::Gemma4, "<|tool_call>"),
            (Format::Mistral, "[TOOL_CALLS]"),
            (Format::Lfm2, "<|tool_call_start|>"),
            (Format::Granite, "<|tool_call|>"),
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
