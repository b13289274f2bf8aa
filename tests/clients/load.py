"""A server under load and under abuse. `scripts/serve-load` runs this.

Each part starts a server of its own with small models, prints what it measured, and fails with an AssertionError:

streams      1, 8, 64 and 256 streams at the same time: each has the text that its request has alone, and memory is flat
overload     ten times as many requests as can be answered: refusals are quick, and what is accepted is answered as fast as before
disconnects  clients that go away at any time: places and pages come back, and others notice nothing
abuse        slow, idle, large, deep and broken requests: limits hold, and others notice nothing
prefix       prompts that begin alike: what they have in common is computed once
"""

import argparse
import asyncio
import collections
import gzip
import itertools
import json
import os
import pathlib
import random
import re
import resource
import selectors
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request

import aiohttp
from prometheus_client.openmetrics.parser import text_string_to_metric_families

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
WORDS = "once upon a time there was little dragon who lived in big old house with her friend and the cat saw sun".split()
# Never the end of the text.
NO_END = {"logit_bias": {"2": -100}}
MIB = 1 << 20


def tell(part, text):
    print(f"{part:12} {text}", flush=True)


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


# Models


def byte_tokenizer(size):
    """A `tokenizer.json` whose tokens are the bytes, for models that have no vocabulary."""
    shown = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    rest = (chr(256 + at) for at in range(256))
    vocab = {shown.get(byte) or next(rest): byte for byte in range(256)}
    names = [f"<unused{at}>" for at in range(256, size)]
    vocab |= {name: 256 + at for at, name in enumerate(names)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "dropout": None, "byte_fallback": False},
    }


def random_model(folder, name, context=4096):
    """A random model of the test data with a vocabulary and a long context."""
    made = folder / name
    made.mkdir()
    source = ROOT / "tests/data/tiny-random" / name
    shutil.copy(source / "model.safetensors", made)
    config = json.loads((source / "config.json").read_text())
    texts = config.get("text_config", config)
    texts["max_position_embeddings"] = context
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer.json").write_text(json.dumps(byte_tokenizer(texts["vocab_size"])))
    return f"{name}={made}"


def long_story(folder, context=4096):
    """The built-in model, said to have a longer context."""
    data = bytearray((ROOT / "assets/stories.gguf").read_bytes())
    key = b"llama.context_length"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = struct.pack("<I", context)
    path = folder / "long.gguf"
    path.write_bytes(data)
    return f"long={path}"


# The server


class Server:
    """A server that ends with its `async with`."""

    def __init__(self, options, models, *flags):
        self.command = [options.program, "serve", "--device", options.device, "--port", "0", "--template", "chatml"]
        self.command += [*models, *flags]

    async def __aenter__(self):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(self.command, stderr=self.log, env=os.environ | {"TILEWRIGHT_CACHE_DIR": ""})
        while not ("\nready\n" in self.said() and (found := re.search(r"at (http://127\.0\.0\.1:(\d+))", self.said()))):
            assert self.process.poll() is None, self.said()
            await asyncio.sleep(0.05)
        self.url, self.port = found[1], int(found[2])
        # A connection for each request: where both ends are short of time, one that is kept may end as it is used again.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self.session = aiohttp.ClientSession(self.url, connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, kind, error, trace):
        await self.session.close()
        code = self.process.poll()
        self.process.terminate()
        try:
            ended = self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        usual = ("serving ", "APIs: ", "access: ", "model `", "ready", "refused ", "shutting down: ", "notice: ")
        unexpected = [line for line in self.said().splitlines() if not line.startswith(usual)]
        if kind is None:
            assert code is None and ended == 0 and not unexpected, (code, ended, unexpected[:20])

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def rss(self):
        """Bytes of memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024

    def processor_time(self):
        """Seconds that its threads computed, by what they are for; those that are gone are not counted."""
        kinds, took = {"(tilewright)": "connections", "(tokio": "connections", "(tilewright ": "computing"}, collections.Counter()
        for thread in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            try:
                fields = (thread / "stat").read_text()
            except OSError:
                continue
            kind = next((kind for name, kind in kinds.items() if name in fields), "other")
            took[kind] += sum(map(int, fields.rsplit(")", 1)[1].split()[11:13])) / os.sysconf("SC_CLK_TCK")
        return took

    def files(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def metrics(self):
        """Sums of all samples by name, and by name and the value of a label."""
        async with self.session.get("/metrics") as answer:
            text = await answer.text()
        sums = collections.Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                name = sample.name.removeprefix("tilewright_")
                sums[name] += sample.value
                for value in sample.labels.values():
                    sums[name, value] += sample.value
        return sums

    async def is_idle(self, most=2.0):
        """Waits until nothing is computed and all pages are back; the seconds that it took."""
        since = time.monotonic()
        while True:
            now = await self.metrics()
            at_work = now["requests_running"] + now["requests_queued"]
            away = now["cache_pages"] - now["cache_free_pages"] - now["cache_kept_pages"]
            took = time.monotonic() - since
            if at_work == away == 0:
                return took
            assert took < most, f"{at_work} requests at work and {away} pages away after {took:.1f} s"
            await asyncio.sleep(0.01)

    async def is_well(self):
        """A usual request has its answer; the seconds that it took."""
        since = time.monotonic()
        async with self.session.get("/health", timeout=aiohttp.ClientTimeout(total=60)) as answer:
            assert answer.status == 200, answer.status
        return time.monotonic() - since

    async def ask(self, asked, streams=False):
        """What a request is answered with: its texts, reasons and usage."""
        path, body = asked
        if streams:
            body = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self.session.post(path, json=body) as answer:
            assert answer.status == 200, (answer.status, await answer.text())
            return await streamed(answer) if streams else whole(await answer.json())


def whole(answer):
    """An answer as it can be compared: what is cached depends on what else there was."""
    choices = [
        (choice.get("text") if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in answer["choices"]
    ]
    return choices, answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


async def streamed(answer):
    texts, reasons, usage, is_over = {}, {}, None, False
    async for line in answer.content:
        if not line.startswith(b"data: "):
            assert line == b"\n" or line.startswith(b": "), line
            continue
        assert not is_over, line
        if line == b"data: [DONE]\n":
            is_over = True
            continue
        part = json.loads(line[6:])
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + said
            reasons[choice["index"]] = choice["finish_reason"]
    assert is_over and usage, "the stream was cut"
    return [(texts[at], reasons[at]) for at in sorted(texts)], usage["prompt_tokens"], usage["completion_tokens"]


def requests(models, n, seed, most_words=60, most_tokens=48):
    """Requests of all kinds that have one answer each: greedy ones, and sampled ones with a seed."""
    rng = random.Random(seed)
    made = []
    for at in range(n):
        model = models[at % len(models)]
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, most_words)))
        body = {"model": model, "max_tokens": rng.randint(4, most_tokens)}
        body |= {"temperature": 0} if at % 2 else {"temperature": 0.9, "seed": at, "n": 1 + at % 3 // 2}
        if at % 3 == 0:
            made.append(("/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}))
        else:
            made.append(("/v1/completions", body | {"prompt": text}))
    return made


class Witness:
    """Requests in the background, each of which must have the answer that it had alone."""

    def __init__(self, server, asked, n=4):
        self.server, self.asked, self.n = server, asked, n

    async def __aenter__(self):
        self.alone = [await self.server.ask(asked) for asked in self.asked]
        self.n_equal, self.n_again, self.is_over = 0, 0, False
        self.tasks = [asyncio.create_task(self.watch(at)) for at in range(self.n)]
        return self

    async def watch(self, at):
        while not self.is_over:
            at = (at + 1) % len(self.asked)
            try:
                answer = await self.server.ask(self.asked[at], streams=at % 2 == 0)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                # A connection that was kept open made room for another: clients ask again over a new one.
                self.n_again += 1
                continue
            assert answer == self.alone[at], f"{self.asked[at]}: {answer} and not {self.alone[at]}"
            self.n_equal += 1

    async def __aexit__(self, *_):
        self.is_over = True
        await asyncio.gather(*self.tasks)
        assert self.n_equal > 0


# Streams at the same time


async def streams(options, folder):
    models = [random_model(folder, name) for name in ("gemma3", "qwen35")]
    flags = ["--parallel", "64", "--queue", "512", "--cache-tokens", "32768"]
    async with Server(options, [f"story={ROOT}/assets/stories.gguf", *models], *flags) as server:
        asked = requests(["story", "story", "story", "gemma3", "qwen35"], 200, seed=1)
        alone = [await server.ask(one) for one in asked]
        before = await server.metrics()
        memory, counts, n_tokens = [], dict.fromkeys((1, 8, 64, 256), 0), 0
        begin = time.monotonic()

        async def sample():
            while True:
                memory.append((time.monotonic() - begin, server.rss()))
                await asyncio.sleep(1)

        async def worker(rng, n_streams, until):
            nonlocal n_tokens
            while time.monotonic() < until:
                at = rng.randrange(len(asked))
                answer = await server.ask(asked[at], streams=rng.random() < 0.7)
                assert answer == alone[at], f"{n_streams} streams: {asked[at]}: {answer} and not {alone[at]}"
                counts[n_streams] += 1
                n_tokens += answer[2]

        sampler = asyncio.create_task(sample())
        # Each number of streams many times, so that memory is compared over all of the time.
        n_rounds = max(2, round(options.minutes / 2))
        for number in range(n_rounds):
            for n_streams in counts:
                until = time.monotonic() + 60 * options.minutes / n_rounds / len(counts)
                workers = [worker(random.Random(1000 * number + at), n_streams, until) for at in range(n_streams)]
                await asyncio.gather(*workers)
        took = await server.is_idle()
        sampler.cancel()
        if options.memory:
            pathlib.Path(options.memory).write_text("".join(f"{at:.0f},{rss}\n" for at, rss in memory))
        after = await server.metrics()
        for n_streams, n in counts.items():
            tell("streams", f"{n_streams:4} at a time: {n} requests, all equal to what they are alone")
        tell("streams", f"{n_tokens} tokens in {time.monotonic() - begin:.0f} s, idle {took * 1000:.0f} ms after the last")
        for name in ("engine_failed_total", "engine_refused_total", "engine_cancelled_total"):
            assert after[name] == 0, (name, after[name])
        for name in ("memory_bytes", "cache_pages", "connections"):
            assert name == "connections" or before[name] == after[name], (name, before[name], after[name])
        # What is taken once is taken by then: all numbers of streams have been there.
        steady = [(at, rss) for at, rss in memory if at > memory[-1][0] / 2]
        slope, _ = statistics.linear_regression(*zip(*steady))
        grown = slope * (steady[-1][0] - steady[0][0])
        tell("streams", f"memory {memory[0][1] / MIB:.1f} MiB at first, {steady[0][1] / MIB:.1f} MiB at half time, {memory[-1][1] / MIB:.1f} MiB at the end")
        tell("streams", f"slope {slope * 3600 / MIB:+.2f} MiB/h over the last {steady[-1][0] - steady[0][0]:.0f} s, {grown / MIB:+.2f} MiB in all")
        assert grown < 16 * MIB, "memory grows"


# More than can be answered


def flood(server, asked, seconds, rate=None, at_once=None):
    """Sends so many requests a second, or has so many at once, each over a connection of its own, until the time is over; then
    waits for the rest. Gives of each answer: number, when it was due, when it began and ended, in seconds from the beginning, and
    its bytes. Plain sockets: on the server's own processors, a library for it would take more time than the refusals."""
    selector, begin, n_sent, ended = selectors.DefaultSelector(), time.monotonic(), 0, []
    while True:
        now = time.monotonic() - begin
        n_due = n_sent + at_once - len(selector.get_map()) if rate is None else int(now * rate) + 1
        while now < seconds and n_sent < n_due:
            sender = socket.socket()
            sender.connect(("127.0.0.1", server.port))
            sender.sendall(asked[n_sent % len(asked)])
            due = now if rate is None else n_sent / rate
            selector.register(sender, selectors.EVENT_READ, [n_sent, due, None, b""])
            n_sent += 1
        if now >= seconds and not selector.get_map():
            return ended
        until_next = 0.01 if rate is None or now >= seconds else n_sent / rate - (time.monotonic() - begin)
        for key, _ in selector.select(max(until_next, 0)):
            answer, told = key.fileobj.recv(1 << 16), key.data
            told[2] = told[2] or time.monotonic() - begin
            told[3] += answer
            if not answer:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                number, due, began, answered = told
                ended.append((number, due, began, time.monotonic() - begin, answered))


def answer_of(data):
    """Status, headers and JSON of a whole answer."""
    head, body = data.split(b"\r\n\r\n", 1)
    first, *headers = head.decode().lower().split("\r\n")
    return int(first.split()[1]), dict(header.split(": ", 1) for header in headers), json.loads(body)


PARTS_OF_OVERLOAD = 4


async def overload(options, folder):
    seconds = options.seconds
    places, queue = 8, 16
    async with Server(options, [f"story={ROOT}/assets/stories.gguf"], "--parallel", str(places), "--queue", str(queue)) as server:
        asked = [(path, body | {"max_tokens": 200, "n": 1} | NO_END) for path, body in requests(["story"], 16, seed=2)]
        alone = [await server.ask(one) for one in asked]
        sent = [request_bytes(path, body, "connection: close") for path, body in asked]

        async def measured(seconds, **when):
            """Answers, and what share of the processors' time the client and the server's threads took."""
            server_before, client_before, since = server.processor_time(), time.process_time(), time.monotonic()
            ended = await asyncio.to_thread(flood, server, sent, seconds, **when)
            took = {"client": time.process_time() - client_before} | (server.processor_time() - server_before)
            all_of_it = (time.monotonic() - since) * os.cpu_count()
            return ended, ", ".join(f"{name} {100 * part / all_of_it:.0f} %" for name, part in took.items())

        async def at_most():
            """Requests a second where there are as many as there is room for."""
            time_of_it = max(10, seconds / 8)
            ended, shares = await measured(time_of_it, at_once=places + queue)
            assert all(answer_of(data)[0] == 200 for *_, data in ended)
            peak = sum(1 for *_, end, _ in ended if end < time_of_it) / time_of_it
            tell("overload", f"peak {peak:.2f} requests/s of 200 tokens, {places} at a time and {queue} that wait ({shares})")
            return peak

        # In turns, and each part is compared with the peaks before and after it: the speed of many machines drifts by more than
        # what is measured.
        await measured(3, at_once=places + queue)
        peaks, goodputs, refused, answered = [await at_most()], [], [], []
        for _ in range(PARTS_OF_OVERLOAD):
            time_of_it, rate = max(5, seconds / PARTS_OF_OVERLOAD), 10 * peaks[-1]
            ended, shares = await measured(time_of_it, rate=rate)
            accepted = []
            for number, due, began, end, data in ended:
                status, headers, told = answer_of(data)
                if status == 429:
                    assert headers["retry-after"] and told["error"]["code"] == "busy", (headers, told)
                    refused.append(began - due)
                    continue
                assert status == 200, (status, told)
                assert whole(told) == alone[number % len(asked)]
                answered.append(end - due)
                accepted.append(end)
            # From when the queue is full to when nothing is added any more.
            warm = (places + queue) / peaks[-1]
            goodputs.append(sum(1 for end in accepted if warm < end < time_of_it) / (time_of_it - warm))
            tell("overload", f"{rate:.1f} requests/s for {time_of_it:.0f} s: {len(ended) - len(accepted)} refused, {len(accepted)} answered, all equal to what they are alone; {goodputs[-1]:.2f} requests/s ({shares})")
            await server.is_idle()
            peaks.append(await at_most())
        share = sum(goodputs) / sum((before + after) / 2 for before, after in itertools.pairwise(peaks))
        tell("overload", f"refused within {percentile(refused, 0.5) * 1000:.1f} ms (p50), {percentile(refused, 0.99) * 1000:.1f} ms (p99), {max(refused) * 1000:.1f} ms (all)")
        tell("overload", f"answered {100 * share:.0f} % of peak, within {percentile(answered, 0.99):.1f} s (p99)")
        assert percentile(refused, 0.99) <= 0.050, "refusals take longer than 50 ms"
        assert share >= 0.9, "less than nine tenths are answered"


# Clients that go away


def request_bytes(path, body, *headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


async def connect(server):
    return await asyncio.open_connection("127.0.0.1", server.port)


def reset(writer):
    """Closes at once: the other end reads an error, and not an end."""
    if not writer.is_closing():
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()


async def disconnects(options, folder):
    n, places = options.disconnects, 8
    # Room for the prompt of each; what waits is never refused.
    async with Server(options, [f"story={ROOT}/assets/stories.gguf"], "--parallel", str(places), "--queue", "256") as server:
        rng, when = random.Random(3), collections.Counter()

        async def victim():
            streams = rng.random() < 0.7
            # A prompt of its own: nothing of it is cached.
            prompt = [rng.randrange(5, 500) for _ in range(rng.randrange(2, 400))]
            body = {"model": "story", "prompt": prompt, "max_tokens": 100, "stream": streams, "n": rng.randrange(1, 4)} | NO_END
            data = request_bytes("/v1/completions", body)
            reader, writer = await connect(server)
            kind = rng.choice(["request", "queued", "prompt", "tokens", "tokens"])
            if kind == "request":
                writer.write(data[: rng.randrange(len(data))])
                await asyncio.sleep(rng.random() * 0.05)
            else:
                writer.write(data)
                if kind == "queued":
                    await asyncio.sleep(rng.random() * 0.02)
                elif kind == "prompt" or not streams:
                    await asyncio.sleep(rng.random() * 2)
                else:
                    for _ in range(rng.randrange(1, 30)):
                        line = await reader.readuntil(b"\n\n")
                        assert b"[DONE]" not in line
            when[kind] += 1
            reset(writer) if rng.random() < 0.5 else writer.close()

        async def victims(share):
            for _ in range(share):
                await victim()

        async with Witness(server, requests(["story"], 24, seed=4)) as witness:
            before = await server.metrics()
            await asyncio.gather(*(victims(n // 32 + (at < n % 32)) for at in range(32)))
        took = await server.is_idle()
        after = await server.metrics()
        tell("disconnects", f"{n} clients went away: {', '.join(f'{count} in {kind}' for kind, count in sorted(when.items()))}")
        cancelled = after["engine_cancelled_total"] - before["engine_cancelled_total"]
        tell("disconnects", f"{cancelled:.0f} texts cancelled; all places and pages back {took * 1000:.0f} ms after the last answer to others")
        tell("disconnects", f"{witness.n_equal} answers to others meanwhile, all equal to what they are alone")
        assert cancelled > n / 4 and after["engine_failed_total"] == 0


# What no client of good will sends


async def closes(reader, most):
    """What comes until the other end closes the connection, and the seconds until then."""
    since, said = time.monotonic(), b""
    try:
        async with asyncio.timeout(most):
            while data := await reader.read(1 << 16):
                said += data
    except ConnectionError:
        pass
    return said, time.monotonic() - since


async def drip(server, data, pause, most):
    """Sends byte by byte."""
    reader, writer = await connect(server)

    async def send():
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await asyncio.sleep(pause)

    sender = asyncio.create_task(send())
    said, took = await closes(reader, most)
    sender.cancel()
    writer.close()
    return said, took


async def slow_headers(server):
    data = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"x-slow: 1\r\n" * 100
    found = await asyncio.gather(*(drip(server, data, 0.1, 15) for _ in range(200)))
    return f"200 connections, closed after {min(took for _, took in found):.1f} to {max(took for _, took in found):.1f} s"


async def slow_bodies(server):
    data = request_bytes("/v1/completions", {"model": "story", "prompt": "a" * 1000})
    head = data.index(b"\r\n\r\n") + 4

    async def one():
        reader, writer = await connect(server)
        writer.write(data[:head])

        async def send():
            for at in range(head, len(data)):
                writer.write(data[at : at + 1])
                await asyncio.sleep(0.1)

        sender = asyncio.create_task(send())
        async with asyncio.timeout(35):
            line = await reader.readline()
        sender.cancel()
        writer.close()
        return line

    found = await asyncio.gather(*(one() for _ in range(200)))
    assert all(b" 408 " in line for line in found), found[:3]
    return "200 connections, all answered 408"


async def slow_clients(server):
    return "; ".join(await asyncio.gather(slow_headers(server), slow_bodies(server)))


def fresh(server):
    """Seconds that a usual request takes over a connection of its own, from a thread of its own."""
    since = time.monotonic()
    with urllib.request.urlopen(server.url + "/health", timeout=60) as answer:
        assert answer.status == 200
    return time.monotonic() - since


async def idle_connections(server):
    n, before = 10_000, server.rss()
    opened, refused = [], collections.Counter()

    async def one():
        try:
            opened.append(await asyncio.wait_for(connect(server), 5))
        except (OSError, TimeoutError) as error:
            refused[type(error).__name__] += 1

    took, files = [], 0
    dialling = [asyncio.create_task(one()) for _ in range(n)]
    for _ in range(20):
        # A connection of its own: it has to come in among the others.
        took.append(await asyncio.to_thread(fresh, server))
        files = max(files, server.files())
        await asyncio.sleep(0.25)
    await asyncio.gather(*dialling)
    for _, writer in opened:
        writer.close()
    assert files < 700, f"{files} files open"
    grown = server.rss() - before
    assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB for idle connections"
    assert max(took) < 5, f"a usual request took {max(took):.1f} s"
    return f"{n} connections ({dict(refused)} not taken), {files} files open at most, {grown / MIB:+.1f} MiB, usual requests within {max(took) * 1000:.0f} ms"


async def gigabyte(server):
    before, most, found = server.rss(), server.rss(), []
    for has_length in (True, False):
        reader, writer = await connect(server)
        length = f"content-length: {1 << 30}" if has_length else "transfer-encoding: chunked"
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode())
        block, sent = b" " * MIB, 0
        framed = block if has_length else b"100000\r\n" + block + b"\r\n"
        line = asyncio.create_task(reader.readline())
        try:
            while sent < 1 << 30 and not line.done():
                writer.write(framed)
                await writer.drain()
                sent += MIB
                most = max(most, server.rss())
        except ConnectionError:
            pass
        try:
            line = await asyncio.wait_for(line, 10)
            assert b" 413 " in line, line
        except ConnectionError:
            # The server had closed it, and what was sent after that made the answer get lost.
            line = b""
        writer.close()
        assert sent < 64 * MIB, f"{sent // MIB} MiB were taken"
        found.append(f"{'with' if has_length else 'without'} length {'413' if line else 'closed'} after {sent // MIB} MiB")
    assert most - before < 32 * MIB, f"{(most - before) / MIB:.0f} MiB"
    return f"{', '.join(found)}, {(most - before) / MIB:+.1f} MiB"


async def answer_to(server, data, most=10):
    """The status of an answer; 0 if the connection is closed in its place."""
    reader, writer = await connect(server)
    try:
        writer.write(data)
        line = await asyncio.wait_for(reader.readline(), most)
        return int(line.split()[1]) if line else 0
    except ConnectionError:
        return 0
    finally:
        writer.close()


async def compressed_bomb(server):
    bomb = gzip.compress(bytes(64 * MIB), 9)
    status = await answer_to(server, request_bytes("/v1/completions", bomb, "content-encoding: gzip"))
    assert status == 415, status
    return f"{len(bomb) / 1024:.0f} KiB that would be 64 MiB: 415"


async def chunked_bombs(server):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    bombs = {
        "two million chunks of a byte": b"1\r\n \r\n" * 2_000_000 + b"0\r\n\r\n",
        "an extension of 1 MiB": b"1;" + b"x" * MIB + b"\r\n \r\n0\r\n\r\n",
        "a MiB of extensions": (b"1;" + b"x" * 1000 + b"\r\n \r\n") * 1000 + b"0\r\n\r\n",
        "a size of 1 MiB of zeros": b"0" * MIB + b"1\r\n \r\n0\r\n\r\n",
        "a size beyond 64 bits": b"10000000000000001\r\n \r\n0\r\n\r\n",
        "100,000 trailers": b"1\r\n \r\n0\r\n" + b"x-t: 1\r\n" * 100_000 + b"\r\n",
    }
    found = []
    for name, bomb in bombs.items():
        status = await answer_to(server, head + bomb, 35)
        assert status in (0, 400, 408, 413, 431), (name, status)
        found.append(f"{name}: {status or 'closed'}")
    return ", ".join(found)


async def deep_and_wide_json(server):
    before = server.rss()
    deep = [b"[" * depth + b"]" * depth for depth in (10_000, 1_000_000)] + [b'{"a":' * 1_000_000, b"[" * 4_000_000]
    for body in deep:
        assert await answer_to(server, request_bytes("/v1/chat/completions", body)) == 400
    wide = [b'{"model": "story", "prompt": [' + b"0," * 4_000_000 + b"0]}", b'{"model": "story", "x": {' + b",".join(b'"%d":0' % at for at in range(600_000)) + b"}}"]
    statuses = await asyncio.gather(*(answer_to(server, request_bytes("/v1/completions", body), 60) for body in wide * 4))
    assert set(statuses) <= {400, 429}, statuses
    return f"4 deep ones refused, 8 wide ones at a time: {sorted(set(statuses))}, {(server.rss() - before) / MIB:+.0f} MiB"


async def bodies_at_once(server):
    """As many large bodies as there are connections, none of which ends."""
    before, most, n = server.rss(), 0, 400
    body = b" " * (8 * MIB - 1)
    held = []

    async def one():
        reader, writer = await connect(server)
        held.append(writer)
        try:
            writer.write(request_bytes("/v1/completions", body + b" ")[:-1])
            return int((await reader.readline()).split()[1])
        except (ConnectionError, IndexError):
            return 0

    tasks = [asyncio.create_task(one()) for _ in range(n)]
    took = []
    for _ in range(30):
        took.append(await server.is_well())
        await server.ask(("/v1/completions", {"model": "story", "prompt": "a", "max_tokens": 1}))
        most = max(most, server.rss())
        await asyncio.sleep(0.1)
    answered = collections.Counter(task.result() for task in tasks if task.done())
    for writer in held:
        reset(writer)
    await asyncio.gather(*tasks)
    assert most - before < 256 * MIB, f"{(most - before) / MIB:.0f} MiB"
    assert set(answered) <= {0, 429}, answered
    return f"{n} bodies of 8 MiB: {dict(answered)}, {(most - before) / MIB:+.0f} MiB, usual requests within {max(took) * 1000:.0f} ms"


async def pipelining(server):
    before, n = server.rss(), 20_000
    reader, writer = await connect(server)
    data = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * n

    async def send():
        writer.write(data)
        await writer.drain()

    sender = asyncio.create_task(send())
    count, rest = 0, b""
    while count < n:
        block = await asyncio.wait_for(reader.read(1 << 16), 30)
        assert block, f"closed after {count}"
        rest += block
        count += rest.count(b"HTTP/1.1 200 OK")
        rest = rest[-14:] if not rest.endswith(b"HTTP/1.1 200 OK") else b""
    await sender
    writer.close()
    # Answers that nobody reads.
    reader, writer = await connect(server)
    reader._transport.pause_reading()
    writer.write(data)
    await asyncio.sleep(1)
    grown = server.rss() - before
    reset(writer)
    assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB"
    return f"{n} requests on one connection: all answered; unread ones {grown / MIB:+.1f} MiB"


async def http2(server):
    def frame(kind, flags, stream, payload=b""):
        return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload

    # Streams that are opened and reset at once.
    rapid = b"".join(frame(1, 5, at, b"\x82\x84\x86") + frame(3, 0, at, b"\0\0\0\x08") for at in range(1, 200_000, 2))
    found = []
    for begin in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0), b""):
        found.append(await answer_to(server, begin + rapid))
    upgrade = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n\r\n"
    assert await answer_to(server, upgrade) == 200
    assert all(status in (0, 400) for status in found), found
    return "not spoken: 100,000 streams opened and reset are not read"


async def churn(server):
    async def one():
        reader, writer = await connect(server)
        reset(writer) if random.random() < 0.5 else writer.close()

    for _ in range(50):
        await asyncio.gather(*(one() for _ in range(100)))
    return "5,000 connections opened and closed"


ABUSE = [slow_clients, idle_connections, gigabyte, compressed_bomb, chunked_bombs, deep_and_wide_json, bodies_at_once, pipelining, http2, churn]


async def abuse(options, folder):
    async with Server(options, [f"story={ROOT}/assets/stories.gguf"]) as server:
        async with Witness(server, requests(["story"], 24, seed=5), n=2) as witness:
            for case in ABUSE:
                if options.only and options.only != case.__name__:
                    continue
                n_equal, since = witness.n_equal, time.monotonic()
                found = await case(server)
                took = time.monotonic() - since
                while witness.n_equal == n_equal:
                    assert not any(task.done() for task in witness.tasks), [task for task in witness.tasks if task.done()]
                    await asyncio.sleep(0.01)
                tell("abuse", f"{case.__name__}: {found} ({took:.1f} s, then a usual request {await server.is_well() * 1000:.0f} ms)")
        await server.is_idle()
        tell("abuse", f"{witness.n_equal} answers to others meanwhile, all equal to what they are alone; {witness.n_again} asked again")


# Prompts that begin alike

RECURRENT = {"qwen35", "granite-hybrid", "lfm2"}


async def prefix(options, folder):
    names = ["gemma3", "mistral-sliding", "qwen35", "granite-hybrid", "lfm2"]
    models = [long_story(folder), *(random_model(folder, name) for name in names)]
    common, rest = 1500, 40
    async with Server(options, models, "--parallel", "4", "--cache-tokens", "16384") as server:
        for name in ["long", *names]:
            rng = random.Random(6)
            ids = lambda n: [rng.randrange(5, 250) for _ in range(n)]

            async def ask(prompt):
                body = {"model": name, "prompt": prompt, "max_tokens": 4, "temperature": 0}
                before, since = await server.metrics(), time.monotonic()
                async with server.session.post("/v1/completions", json=body) as answer:
                    assert answer.status == 200, (answer.status, await answer.text())
                    told = await answer.json()
                took, after = time.monotonic() - since, await server.metrics()
                cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
                counted = after["tokens_total", "cached"] - before["tokens_total", "cached"]
                assert counted == cached, (counted, cached)
                return cached, took

            begin = ids(common)
            first = await ask(begin + ids(rest))
            second = await ask(begin + ids(rest))
            # Whole pages of 64 tokens; copies of states are after passes of 128.
            least = common // 128 * 128 if name in RECURRENT else common // 64 * 64
            assert first[0] == 0 and second[0] >= least, (first, second)
            # Nine tenths alike.
            begin, found = ids(900), []
            for _ in range(20):
                found.append((await ask(begin + ids(100)))[0])
            share = sum(found) / (20 * 1000)
            assert share > 0.8, found
            tell("prefix", f"{name}: second prompt of {common + rest} tokens, {common} of them as before: {second[0]} not computed, {first[1] * 1000:.0f} -> {second[1] * 1000:.0f} ms; of 20 nine tenths alike {100 * share:.0f} % not computed")


PARTS = {part.__name__: part for part in (streams, overload, disconnects, abuse, prefix)}


def main():
    parser = argparse.ArgumentParser(prog="scripts/serve-load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="those to run; all if absent")
    parser.add_argument("--program", default=str(ROOT / "target/debug/tilewright"))
    parser.add_argument("--device", default="cpu", help="device of the server")
    parser.add_argument("--full", action="store_true", help="half an hour of streams, two minutes of overload, 1,000 disconnects")
    parser.add_argument("--minutes", type=float, help="minutes of streams")
    parser.add_argument("--memory", metavar="FILE", help="writes the memory of each second of streams, as CSV")
    parser.add_argument("--only", metavar="CASE", help="runs one case of abuse")
    options = parser.parse_args()
    options.minutes = options.minutes or (30 if options.full else 0.5)
    options.seconds, options.disconnects = (120, 1000) if options.full else (15, 200)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    # Sockets of 10,000 clients, here and in the server.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 30_000) if most != resource.RLIM_INFINITY else 30_000, most))
    failed = []
    for name in options.parts or PARTS:
        since = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                asyncio.run(PARTS[name](options, pathlib.Path(folder)))
                tell(name, f"done in {time.monotonic() - since:.0f} s")
            except (AssertionError, aiohttp.ClientError, OSError) as error:
                failed.append(name)
                tell(name, f"FAILED: {type(error).__name__}: {error}")
    print(f"failed: {', '.join(failed)}" if failed else "all parts are as they should be", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
