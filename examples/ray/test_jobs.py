"""Kills processes of running jobs: every row is in the result exactly once.

    cargo build --release --features tables,serve && pip install -r examples/ray/requirements.txt && python examples/ray/test_jobs.py
"""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import numpy
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

import tilewright_embed
from tilewright_embed import EmbedError, Embedder, with_lists
from tilewright_generate import GenerateError, Generator

HERE = pathlib.Path(__file__).resolve().parent
PROGRAM = os.environ.get("TILEWRIGHT", str(HERE.parent.parent / "target/release/tilewright"))
ROWS = int(os.environ.get("ROWS", 100_000))
STORIES = str(HERE.parent.parent / "assets/stories.gguf")
FLAGS = ["--device", "cpu"]
WORDS = "a quiet river runs under the old stone bridge where children fish for silver eels at noon".split()


def make_model(folder):
    """A small BERT with random weights: different texts have different, meaningless vectors."""
    width, inner, layers = 128, 512, 4
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(WORDS))]
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(vocab), "hidden_size": width,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "hidden_act": "gelu",
        "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    }
    shapes = {f"embeddings.{name}_embeddings.weight": [rows, width]
              for name, rows in [("word", len(vocab)), ("position", 64), ("token_type", 2)]}
    shapes |= {f"embeddings.LayerNorm.{part}": [width] for part in ["weight", "bias"]}
    for layer in range(layers):
        products = {"attention.self.query": (width, width), "attention.self.key": (width, width),
                    "attention.self.value": (width, width), "attention.output.dense": (width, width),
                    "intermediate.dense": (inner, width), "output.dense": (width, inner)}
        for name, (rows, columns) in products.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = [rows, columns]
            shapes[f"encoder.layer.{layer}.{name}.bias"] = [rows]
        for norm in ["attention.output.LayerNorm", "output.LayerNorm"]:
            shapes |= {f"encoder.layer.{layer}.{norm}.{part}": [width] for part in ["weight", "bias"]}
    rng, header, data = numpy.random.default_rng(1), {}, b""
    for name, shape in shapes.items():
        tensor = rng.normal(0, 0.3, shape).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(tensor)]}
        data += tensor
    header = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text(json.dumps(config))
    special = {token: {"id": token, "ids": [vocab.index(token)], "tokens": [token]} for token in ["[CLS]", "[SEP]"]}
    sequence = lambda name, kind: {"Sequence": {"id": name, "type_id": kind}}
    token = lambda name, kind: {"SpecialToken": {"id": name, "type_id": kind}}
    single = [token("[CLS]", 0), sequence("A", 0), token("[SEP]", 0)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for i, content in enumerate(vocab[:5])
        ],
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
                       "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "TemplateProcessing", "single": single, "special_tokens": special,
                           "pair": [*single, sequence("B", 1), token("[SEP]", 1)]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                  "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(vocab)}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def texts(n):
    random.seed(1)
    return [None if i % 97 == 0 else " ".join(random.choices(WORDS, k=random.randint(3, 20))) for i in range(n)]


def processes(program, command=b"embed"):
    """Process and parent of each `tilewright embed`, or of another command."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        try:
            called = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
        if called[:2] == [program.encode(), command]:
            found.append((int(folder.name), parent))
    return found


class Job(unittest.TestCase):
    n_rows, model = ROWS, None

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        table = pa.table({"id": range(self.n_rows), "text": texts(self.n_rows)})
        (self.folder / "docs").mkdir()
        n_files = 20
        for i in range(n_files):
            part = table.slice(i * self.n_rows // n_files, self.n_rows // n_files)
            pa.parquet.write_table(part, self.folder / "docs" / f"{i:02}.parquet")

    def start(self, job, *args):
        command = [sys.executable, str(HERE / job), "--model", self.model or MODEL, "--output", str(self.folder / "vectors")]
        command += ["--program", PROGRAM, "--batch-size", "512", *args, "--", *FLAGS]
        self.log = open(self.folder / "log", "ab")
        self.addCleanup(self.log.close)
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=HERE)

    def finish(self, job):
        code = job.wait(timeout=1800)
        self.log.close()
        self.assertEqual(code, 0, (self.folder / "log").read_text()[-4000:])

    def written(self):
        return list((self.folder / "vectors").glob("**/*.parquet"))

    def check_rows(self):
        """Checks that every row is there once."""
        table = pa.dataset.dataset(self.written()).to_table().sort_by("id")
        counts = collections.Counter(table.column("id").to_pylist())
        self.assertEqual(len(counts), self.n_rows)
        self.assertEqual(set(counts.values()), {1})
        self.assertEqual(table.column("text").to_pylist(), texts(self.n_rows))
        return table


class Vectors(Job):
    def start_ray(self):
        return self.start("ray_job.py", "--input", str(self.folder / "docs"), "--workers", "2", "--cpus", "0")

    def until_midway(self, job):
        """Waits until some vectors are written while others are being computed."""
        while len(self.written()) < 3 or len(processes(PROGRAM)) < 2:
            self.assertIsNone(job.poll(), "the job ended too early")
            time.sleep(0.1)

    def check_all(self):
        table = self.check_rows()
        embedder = Embedder(MODEL, flags=FLAGS, program=PROGRAM)
        self.addCleanup(embedder.close)
        # A null stays null; every other vector is the same as in any other batch.
        for start in range(0, ROWS, max(ROWS // 7, 1)):
            part = table.slice(start, 101)
            found = with_lists(embedder(part.select(["text"]))).column("embedding").to_pylist()
            self.assertEqual(found, part.column("embedding").to_pylist())

    def test_ray_with_killed_processes(self):
        job = self.start_ray()
        self.until_midway(job)
        (embed, _), (_, worker) = processes(PROGRAM)[:2]
        # A process that embeds, and a Ray worker with its processes.
        os.kill(embed, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        self.finish(job)
        self.check_all()

    def test_ray_with_a_killed_job(self):
        job = self.start_ray()
        self.until_midway(job)
        job.kill()
        job.wait()
        self.assertLess(len(self.written()), ROWS / 2048)
        self.finish(self.start_ray())
        self.check_all()

    def test_daft(self):
        job = self.start("daft_job.py", "--input", str(self.folder / "docs" / "*.parquet"))
        self.finish(job)
        self.check_all()


class Answers(Job):
    # Generation takes longer.
    n_rows, model = max(ROWS // 50, 400), STORIES

    def test_ray_generates_with_killed_processes(self):
        generate = ["--generate", "24", "--parallel", "8", "--batch-size", "20"]
        job = self.start("ray_job.py", "--input", str(self.folder / "docs"), "--workers", "2", "--cpus", "0", *generate)
        while not self.written() or len(processes(PROGRAM, b"serve")) < 2:
            self.assertIsNone(job.poll(), (self.folder / "log").read_text()[-4000:])
            time.sleep(0.1)
        (first, _), (second, worker) = processes(PROGRAM, b"serve")[:2]
        # A server, and a Ray worker whose server ends with it.
        os.kill(first, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)
        self.finish(job)
        while {second, first} & {process for process, _ in processes(PROGRAM, b"serve")}:
            time.sleep(0.1)
        table = self.check_rows()
        self.assertEqual(table.column("error").null_count, self.n_rows)
        # A null has no answer; every other answer is the same as when generated alone.
        generator = Generator(STORIES, options={"max_tokens": 24}, flags=FLAGS, program=PROGRAM, parallel=1)
        self.addCleanup(generator.close)
        part = table.slice(self.n_rows // 3, 40)
        self.assertEqual(generator(part.select(["text"])).column("answer"), part.column("answer"))
        self.assertEqual(table.column("answer").null_count, len(range(0, self.n_rows, 97)))


class Adapter(unittest.TestCase):
    def embedder(self, *args, **kwargs):
        embedder = Embedder(MODEL, *args, flags=FLAGS, program=PROGRAM, **kwargs)
        self.addCleanup(embedder.close)
        return embedder

    def test_a_dead_process_is_replaced(self):
        embedder = self.embedder()
        table = pa.table({"id": [1, 2], "text": ["a river", "a bridge"]})
        before = embedder(table)
        embedder.process.kill()
        self.assertEqual(embedder(table), before)

    def test_other_columns_and_no_rows(self):
        embedder = self.embedder()
        narrow = pa.table({"text": pa.array(["a river"], pa.large_string())})
        self.assertEqual(embedder(narrow).column_names, ["text", "embedding"])
        self.assertEqual(embedder(narrow.append_column("id", [[1]])).column_names, ["text", "id", "embedding"])
        self.assertEqual(embedder(narrow.slice(0, 0)).num_rows, 0)

    def test_what_no_other_try_would_mend_is_not_tried(self):
        with self.assertRaisesRegex(EmbedError, "no column `body`"):
            self.embedder("body")(pa.table({"text": ["a"]}))
        with self.assertRaisesRegex(EmbedError, "ended with 3"):
            Embedder("/nowhere", flags=FLAGS, program=PROGRAM)(pa.table({"text": ["a"]}))

    def test_tries_end(self):
        embedder = self.embedder(tries=2)
        embedder.command = ["false"]
        with self.assertRaisesRegex(EmbedError, "2 tries: `false` ended with 1"):
            embedder(pa.table({"text": ["a"]}))

    def test_a_dead_server_is_replaced(self):
        generator = Generator(STORIES, options={"max_tokens": 8}, flags=FLAGS, program=PROGRAM)
        self.addCleanup(generator.close)
        table = pa.table({"text": ["Once", None, "the cat " * 400, "A dog"]})
        before = generator(table)
        self.assertEqual([answer is None for answer in before.column("answer").to_pylist()], [False, True, True, False])
        self.assertRegex(before.column("error")[2].as_py(), "holds 512")
        generator.process.kill()
        self.assertEqual(generator(table), before)
        with self.assertRaisesRegex(GenerateError, "did not start"):
            Generator("/nowhere", flags=FLAGS, program=PROGRAM)(table)

    def test_the_gpu_of_a_worker_is_named_by_its_address(self):
        with tempfile.TemporaryDirectory() as folder:
            fake = pathlib.Path(folder) / "nvidia-smi"
            fake.write_text("#!/bin/sh\necho '0, GPU-11aa, 00000000:17:00.0'\necho '1, GPU-22bb, 00000000:3B:00.0'\n")
            fake.chmod(0o755)
            path = os.environ["PATH"]
            os.environ["PATH"] = f"{folder}:{path}"
            self.addCleanup(os.environ.__setitem__, "PATH", path)
            flags = lambda visible: tilewright_embed.adapter_flags({"CUDA_VISIBLE_DEVICES": visible})
            self.assertEqual(flags("1,0"), ["--adapter", "pci:00000000:3B:00.0"])
            self.assertEqual(flags("GPU-11aa"), ["--adapter", "pci:00000000:17:00.0"])
            self.assertEqual(flags(""), [])
            with self.assertRaises(EmbedError):
                flags("7")


def setUpModule():
    global MODEL, PROGRAM
    folder = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(folder.cleanup)
    # Processes are found by their path and killed: a copy's are this test's own.
    PROGRAM = shutil.copy2(PROGRAM, folder.name)
    MODEL = make_model(pathlib.Path(folder.name) / "model")


if __name__ == "__main__":
    unittest.main()
