"""Whisper with several windows decoded at once, on the CPU; batch sizes take turns.

usage: windows.py FOLDER [--tilewright target/release/tilewright --batches 1,4,8 --rounds 5 --threads 2]

FOLDER is a Whisper model that `tilewright transcribe` reads. Needs espeak-ng, which speaks the sentences of
`spoken.py` twice, 153 s. Counts the processor time of the whole program, with loading, because the
machine may have other work, and the words that are wrong.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import tempfile
import wave
from pathlib import Path

from spoken import SENTENCES, errors, plain

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--threads", type=int, default=2)
args = parser.parse_args()


def heard(sound, batch):
    """The transcript, and CPU seconds."""
    command = [args.tilewright, "transcribe", args.folder, sound, "--device", "cpu", "--language", "en", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
    done = subprocess.run([*command, "--batch-size", str(batch)], env=env, stdout=subprocess.PIPE, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return json.loads(done.stdout), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


with tempfile.TemporaryDirectory() as scratch:
    text = " ".join(2 * SENTENCES)
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
