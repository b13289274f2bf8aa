"""Writes tokenizer.json and generation_config.json for the random model of 293 tokens in this folder: special tokens as
Whisper has them, text of single characters and a few pairs, and 151 timestamps for windows of 3 seconds."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
SPECIAL = ["<|unused|>", "<|startoftranscript|>", "<|endoftext|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
           "<|startoflm|>", "<|startofprev|>", "<|nospeech|>"]
N_TOKENS, N_TIMES = 293, 151

letters = [chr(code) for code in range(0x21, 0x7F)] + ["Ġ"]
pairs = [f"Ġ {chr(code)}" for code in range(ord("a"), ord("z") + 1)]
pairs += ["t h", "h e", "i n", "e r", "a n", "r e", "o n", "a t", "e n", "n d"]
text = letters + [pair.replace(" ", "") for pair in pairs]
assert len(SPECIAL) + len(text) + 1 + N_TIMES == N_TOKENS

times = [f"<|{i * 0.02:.2f}|>" for i in range(N_TIMES)]
tokens = SPECIAL + text + ["<|notimestamps|>"] + times
added = [(i, token) for i, token in enumerate(tokens) if token.startswith("<|")]
tokenizer = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                      "normalized": False, "special": token not in times} for i, token in added],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
              "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
              "vocab": {token: i for i, token in enumerate(tokens)}, "merges": pairs},
}
(FOLDER / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n")
generation = {
    "decoder_start_token_id": 1, "eos_token_id": 2, "is_multilingual": True, "lang_to_id": {"<|en|>": 3, "<|de|>": 4},
    "suppress_tokens": [12, 13], "begin_suppress_tokens": [tokens.index("Ġ"), 2], "max_initial_timestamp_index": 50,
    "no_timestamps_token_id": tokens.index("<|notimestamps|>"), "task_to_id": {"transcribe": 6, "translate": 5},
}
(FOLDER / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
