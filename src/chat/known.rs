//! Built-in templates for files without one, in the formats that their publishers document.

/// A built-in template.
pub struct KnownTemplate {
    pub name: &'static str,
    pub source: &'static str,
    /// The publisher's tokens before and after a text.
    pub bos: &'static str,
    pub eos: &'static str,
    /// Stop strings that start another turn where no control token does.
    pub stop_texts: &'static [&'static str],
}

pub const NAMES: [&str; TEMPLATES.len()] = {
    let mut names = [""; TEMPLATES.len()];
    let mut at = 0;
    while at < TEMPLATES.len() {
        names[at] = TEMPLATES[at].name;
        at += 1;
    }
    names
};

/// Templates by special tokens of their vocabularies; the first match counts.
pub const MARKERS: [(&str, &[&str]); 7] = [
    ("phi4", &["<|im_start|>", "<|im_sep|>", "<|im_end|>"]),
    ("chatml", &["<|im_start|>", "<|im_end|>"]),
    ("llama3", &["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    ("gemma", &["<start_of_turn>", "<end_of_turn>"]),
    ("gemma4", &["<|turn>", "<turn|>"]),
    ("phi3", &["<|user|>", "<|assistant|>", "<|end|>"]),
    // In the first versions' vocabularies these are plain text.
    ("mistral-v3", &["[INST]", "[/INST]"]),
];

pub const TEMPLATES: [KnownTemplate; 12] = [
    // Qwen, Yi, Hermes, SmolLM and many others.
    KnownTemplate {
        name: "chatml",
        source: "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}",
        bos: "<|endoftext|>",
        eos: "<|im_end|>",
        stop_texts: &[],
    },
    // The system message is part of the first user message. Each exchange has its own BOS and EOS.
    KnownTemplate {
        name: "llama2",
        source: "\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = '<<SYS>>\\n' + message.content + '\\n<</SYS>>\\n\\n' -%}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content|trim + ' ' + eos_token -}}
{%- else -%}
{{- bos_token + '[INST] ' + (ns.system + message.content)|trim + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &[],
    },
    KnownTemplate {
        name: "llama3",
        source: "\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content|trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}",
        bos: "<|begin_of_text|>",
        eos: "<|eot_id|>",
        stop_texts: &[],
    },
    // The first versions: one BOS per conversation, the system message before the first user message.
    KnownTemplate {
        name: "mistral",
        source: "\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content|trim + eos_token -}}
{%- else -%}
{{- '[INST] ' + ns.system + message.content + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &[],
    },
    // Version 3, whose markers are control tokens.
    KnownTemplate {
        name: "mistral-v3",
        source: "\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = message.content + '\\n\\n' -%}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content|trim + eos_token -}}
{%- else -%}
{{- '[INST] ' + ns.system + message.content + '[/INST]' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &[],
    },
    // The role markers are plain text in the base model's vocabulary.
    KnownTemplate {
        name: "zephyr",
        source: "\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &["<|user|>", "<|system|>"],
    },
    // No system role: a system message becomes the start of the first user message.
    KnownTemplate {
        name: "gemma",
        source: "\
{{- bos_token -}}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- set ns.system = message.content|trim + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + ns.system + message.content|trim + '<end_of_turn>\\n' -}}
{%- set ns.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}",
        bos: "<bos>",
        eos: "<end_of_turn>",
        stop_texts: &[],
    },
    // With empty reasoning, as in the publisher's template when thinking is off.
    KnownTemplate {
        name: "gemma4",
        source: "\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<|turn>' + role + '\\n' + message.content|trim + '<turn|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|turn>model\\n<|channel>thought\\n<channel|>' -}}{%- endif -%}",
        bos: "<bos>",
        eos: "<turn|>",
        stop_texts: &[],
    },
    KnownTemplate {
        name: "phi3",
        source: "\
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}",
        bos: "<s>",
        eos: "<|end|>",
        stop_texts: &[],
    },
    KnownTemplate {
        name: "phi4",
        source: "\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant<|im_sep|>' -}}{%- endif -%}",
        bos: "<|endoftext|>",
        eos: "<|im_end|>",
        stop_texts: &[],
    },
    // For single instructions; a conversation is several of them.
    KnownTemplate {
        name: "alpaca",
        source: "\
{%- set ns = namespace(system='Below is an instruction that describes a task. Write a response that appropriately \
completes the request.') -%}
{%- for message in messages if message.role == 'system' -%}
{%- set ns.system = message.content -%}
{%- endfor -%}
{{- ns.system -}}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- message.content + eos_token -}}
{%- elif message.role != 'system' -%}
{{- '\\n\\n### Instruction:\\n' + message.content + '\\n\\n### Response:\\n' -}}
{%- endif -%}
{%- endfor -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &["### Instruction:"],
    },
    // For models that were never trained on conversations: they continue the text of all messages.
    KnownTemplate {
        name: "plain",
        source: "\
{{- bos_token -}}
{%- for message in messages -%}
{{- message.content + ('' if loop.last else '\\n') -}}
{%- endfor -%}",
        bos: "<s>",
        eos: "</s>",
        stop_texts: &[],
    },
];
