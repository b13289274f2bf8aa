"""Whisper with several windows decoded at once, on the CPU; batch sizes take turns.

usage: windows.py FOLDER [--tilewright target/release/tilewright --batches 1,4,8 --rounds 5 --threads 2]

FOLDER is a Whisper model that `tilewright transcribe` reads. Needs espeak-ng, which speaks the sentences of
`benches/peers/vs_faster_whisper.py` twice, 153 s. Counts the processor time of the whole program, with loading, because the
machine may have other work, and the words that are wrong.
"""
import argparse
import ast
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
import wave
from pathlib import Path

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()


def sentences():
    source = ast.parse((Path(__file__).parent / "peers/vs_faster_whisper.py").read_text())
    [found] = [node.value for node in source.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "SENTENCES"]
    return ast.literal_eval(found)


def heard(sound, batch):
    """The transcript, and CPU seconds."""
    command = [args.tilewright, "transcribe", args.folder, sound, "--device", "cpu", "--language", "en", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    done = subprocess.run([*command, "--batch-size", str(batch)], env=env, stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def plain(text):
    return re.sub(r"[^a-z' ]", "", text.lower().replace("-", " ")).split()


def errors(found, want):
    """Words to insert, delete or replace."""
    row = list(range(len(want) + 1))
    for i, word in enumerate(found, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(want, 1):
            above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (word != other))
    return row[-1]


with tempfile.TemporaryDirectory() as scratch:
    text = " ".join(2 * sentences())
    sound = Path(scratch) / "long.wav"
    subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", sound, text], check=True)
    with wave.open(str(sound)) as file:
        print(f"{args.folder.resolve().name}, {args.threads} threads, {args.rounds} rounds, {file.getnframes() / file.getframerate():.1f} s of sound")
    times = {batch: [] for batch in args.batches}
    transcripts = {}
    for _ in range(args.rounds):
        for batch in args.batches:
            transcripts[batch], seconds = heard(sound, batch)
            times[batch].append(seconds)
first = args.batches[0]
for batch, transcript in transcripts.items():
    ratios = [own / other for own, other in zip(times[batch], times[first])]
    n_windows = len({segment["seek"] for segment in transcript["segments"]})
    print(
        f"batch {batch}: {n_windows} windows, {errors(plain(transcript['text']), plain(text))} of {len(plain(text))} words wrong, "
        f"median {statistics.median(times[batch]):.2f} CPU seconds, {statistics.median(ratios):.2f} of batch {first} "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
