"""Makes the small Unigram vocabulary of this folder and the ids that SentencePiece itself gives.

    pip install sentencepiece gguf && python make.py

Rules and text are made up here, for the rules that SentencePiece comes with are large. Ids are moved as XLM-RoBERTa has
them: <s>, <pad>, </s>, <unk>, then the pieces, then <mask>.
"""

import base64
import io
import json
import pathlib
import random

import gguf
import sentencepiece as spm

HERE = pathlib.Path(__file__).parent
# What SentencePiece's own rules do, for a few characters: white space, widths, ligatures, composition, and what vanishes.
RULES = {
    "\t": " ", "\n": " ", "\r": " ", "\u3000": " ", "\u00a0": " ", "\u200b": "", "\u200d": "", "\ufb01": "fi", "\ufb02": "fl",
    "\u2026": "...", "\u00bd": "1\u20442", "\u2122": "TM", "e\u0301": "\u00e9", "u\u0308": "\u00fc", "c\u0327": "\u00e7",
    "c\u0327\u0301": "\u1e09", "\u2460": "1",
    **{chr(0xFF21 + i): chr(0x41 + i) for i in range(26)}, **{chr(0xFF41 + i): chr(0x61 + i) for i in range(26)},
    **{chr(0xFF10 + i): chr(0x30 + i) for i in range(10)},
}
WORDS = (
    "the river runs quietly past an old engine that nobody has repaired since spring floods came again and rivers ran on "
    "quiet engines repair nothing running runner floodlight lighthouse house houses housing über für façade garçon fine "
    "final flow reflow 1 2 10 100 2024 TM don't can't it's well-known 東京 京都 東 река реки речной дом дома домой"
).split()
ALPHABET = "etaoin shrdlu  \t\n'T.,!?()[]<>|/\\#0129éÉüßçИжреко東京中文あ가😀👍🏽\u0301\u0308\u0327\u200d\u00a0\u3000▁ﬁﬂ…½™ＡｂＣ９①"


def main():
    chooser = random.Random(5)
    sentence = lambda: " ".join(chooser.choice(WORDS) for _ in range(chooser.randrange(3, 14)))
    rules = HERE / "rules.tsv"
    rules.write_text("".join(
        " ".join(f"{ord(c):X}" for c in key) + "\t" + " ".join(f"{ord(c):X}" for c in value) + "\n" for key, value in RULES.items()
    ))
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter([sentence() for _ in range(3000)]), model_writer=model, model_type="unigram", vocab_size=220,
        normalization_rule_tsv=str(rules), character_coverage=1.0, num_threads=1, minloglevel=2, hard_vocab_limit=False,
    )
    rules.unlink()
    sp = spm.SentencePieceProcessor(model_proto=model.getvalue())
    n = sp.get_piece_size()
    # SentencePiece's own first three are <unk>, <s> and </s>.
    ids = lambda text: [id + 1 if id > 2 else 3 for id in sp.encode(text)]
    texts = ["", " ", "  the  river ", "The quick zebra", "東京 domestic", "don't ﬁnd\tthe façade", "über", "▁▁ the", "a" * 300]
    texts += [" " * chooser.randrange(3) + sentence() + " " * chooser.randrange(3) for _ in range(40)]
    texts += ["".join(chooser.choice(ALPHABET) for _ in range(chooser.randrange(1, 40))) for _ in range(400)]
    cases = [{"text": text, "ids": ids(text)} for text in texts]
    (HERE / "cases.json").write_text(json.dumps({"cases": cases}, ensure_ascii=False, separators=(",", ":")) + "\n")

    writer = gguf.GGUFWriter(HERE / "vocab.gguf", "bert")
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    tokens = [("<s>", 0, control), ("<pad>", 0, control), ("</s>", 0, control), ("<unk>", 0, gguf.TokenType.UNKNOWN)]
    tokens += [(sp.id_to_piece(id), sp.get_score(id), normal) for id in range(3, n)] + [("<mask>", 0, control)]
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([float(score) for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    writer.add_precompiled_charsmap(charsmap(model.getvalue()))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_sep_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = tokenizer_json([(token, score) for token, score, _ in tokens], charsmap(model.getvalue()))
    (HERE / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")) + "\n")


def tokenizer_json(vocab, rules):
    """The same vocabulary as the file of Hugging Face's tokenizers that XLM-RoBERTa has."""
    ids = {token: id for id, (token, _) in enumerate(vocab)}
    flags = {"special": True, "normalized": False, "rstrip": False, "single_word": False}
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    item = lambda token: {"SpecialToken": {"id": token, "type_id": 0}}
    text = lambda name: {"Sequence": {"id": name, "type_id": 0}}
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": ids[token], "content": token, "lstrip": token == "<mask>", **flags} for token in special],
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(rules).decode()},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [item("<s>"), text("A"), item("</s>")],
            "pair": [item("<s>"), text("A"), item("</s>"), item("</s>"), text("B"), item("</s>")],
            "special_tokens": {token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in ("<s>", "</s>")},
        },
        "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": ids["<unk>"], "vocab": vocab, "byte_fallback": False},
    }


def charsmap(proto):
    """Field 2 (`precompiled_charsmap`) of field 3 (`normalizer_spec`) of the model's protocol buffer."""
    return field(field(proto, 3), 2)


def field(message, wanted):
    def varint(at):
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value, at

    at = 0
    while at < len(message):
        key, at = varint(at)
        number, wire = key >> 3, key & 7
        if wire == 2:
            size, at = varint(at)
            if number == wanted:
                return message[at : at + size]
            at += size
        elif wire == 0:
            _, at = varint(at)
        else:
            at += {1: 8, 5: 4}[wire]
    raise ValueError(f"no field {wanted}")


main()
