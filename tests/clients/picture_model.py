"""Makes a folder of the tiny random Qwen3-VL with a vocabulary of bytes and a template: picture_model.py FOLDER."""

import json
import shutil
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "data/tiny-random-pictures/qwen3-vl"
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>"]
FIRST_SPECIAL = 285  # as in the model's references
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' or 'image_url' in p %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bytes_as_letters():
    """GPT-2's letter of each byte."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)}


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in ["config.json", "model.safetensors", "preprocessor_config.json"]:
        shutil.copy(SOURCE / name, folder)
    letters = bytes_as_letters()
    tokens = [letters[byte] for byte in range(256)] + [f"<|{id}|>" for id in range(256, FIRST_SPECIAL)] + SPECIAL
    tokens += [f"<|{id}|>" for id in range(len(tokens), 293)]
    added = [
        {"id": id, "content": token, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for id, token in enumerate(tokens)
        if id >= 256
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(tokens)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|292|>"}))


main()
