"""Makes `nomic-bert-moe.cases.json`: the ids that SentencePiece itself gives for XLM-RoBERTa's vocabulary, which
`scripts/test-data` fetches as `ggml-vocab-nomic-bert-moe.gguf`.

    pip install sentencepiece gguf protobuf && python make.py

The GGUF file has all that SentencePiece's own file has: pieces, scores and the rules for characters.
"""

import json
import pathlib
import random

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model

HERE = pathlib.Path(__file__).parent
VOCABULARY = HERE.parents[2] / "target/test-data/vocab/ggml-vocab-nomic-bert-moe.gguf"
ALPHABET = (
    "etaoin shrdlu  \n\t'sST.,!?()[]{}<>|/\\#01239éÉÅñüßçÇИжΩأहि中文あ가각ｶﾞＡ９①½™ﬁ…😀👍🏽\u0301\u0327\u200d\u200b\u00a0\u3000▁ſ²"
)
TEXTS = [
    "", " ", "Hello world", "  two  spaces ", "\n\nlines\r\n", "Ünïcödé ﬁne ½ ①", "你好，世界。", "Привет мир", "नमस्ते दुनिया",
    "สวัสดีชาวโลก", "안녕하세요", "1234567890", "a" * 60, "e\u0301\u0301", "👩\u200d👩\u200d👧", "<s> </s> <mask>", "▁▁ x ▁", "ＡＢＣ ｶﾞ",
]


def main():
    fields = gguf.GGUFReader(VOCABULARY).fields
    value = lambda name: fields[f"tokenizer.ggml.{name}"].contents()
    proto = model.ModelProto()
    for text, score, kind in zip(value("tokens"), value("scores"), value("token_type")):
        # The numbers of the types are the same, but SentencePiece has no type for what is only padding.
        proto.pieces.add(piece=text, score=score, type=kind)
    proto.trainer_spec.model_type = model.TrainerSpec.UNIGRAM
    proto.trainer_spec.unk_id = value("unknown_token_id")
    proto.trainer_spec.vocab_size = len(proto.pieces)
    proto.normalizer_spec.precompiled_charsmap = bytes(byte & 0xFF for byte in value("precompiled_charsmap"))
    proto.normalizer_spec.add_dummy_prefix = value("add_space_prefix")
    proto.normalizer_spec.remove_extra_whitespaces = value("remove_extra_whitespaces")
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    chooser = random.Random(11)
    texts = TEXTS + ["".join(chooser.choice(ALPHABET) for _ in range(chooser.randrange(1, 40))) for _ in range(300)]
    cases = [{"text": text, "ids": processor.encode(text)} for text in texts]
    file = HERE / "nomic-bert-moe.cases.json"
    file.write_text(json.dumps({"cases": cases}, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


main()
