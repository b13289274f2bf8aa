"""Answers the texts of Arrow tables with a `tilewright serve` process that lives as long as its worker.

The server batches concurrent requests. A text's answer does not depend on its batch, and the process keeps no state.
So a process that dies is restarted and given the unanswered texts, and a dead worker can be replaced.
"""

import collections
import concurrent.futures
import http.client
import json
import logging
import re
import subprocess
import threading
import urllib.error
import urllib.request
import zlib

import pyarrow as pa

from tilewright_embed import adapter_flags

log = logging.getLogger("tilewright")


class GenerateError(RuntimeError):
    """The server did not start, or failed too often."""


class Generator:
    """Adds the columns `answer` and `error` to `pyarrow.Table`s with a column of texts.

    model: a generative model on this machine.
    column: the column with the texts; a null text has a null answer.
    options: fields of the requests to `/v1/completions`. Each text has its own seed, the same in every attempt.
    flags: further flags of `tilewright serve`, such as `["--device", "cpu"]`.
    program: path of the command, if not on PATH.
    parallel: concurrent texts.
    tries: attempts per text before the job fails.
    """

    def __init__(self, model, column="text", options=None, flags=(), program="tilewright", parallel=16, tries=3):
        # The pipe to its stdin closes when the worker ends for any reason.
        serve = ["serve", f"model={model}", "--port", "0", "--parallel", str(parallel), "--end-with-stdin"]
        self.command = [program, *serve, *adapter_flags(), *flags]
        self.column, self.options, self.tries = column, {"temperature": 0, **(options or {})}, tries
        self.pool = concurrent.futures.ThreadPoolExecutor(parallel)
        self.process = None
        # Serial: some engines call from several threads.
        self.lock = threading.Lock()

    def __call__(self, table):
        """The rows of `table` in order, with their answers. An error concerns the text, such as its length."""
        texts = table.column(self.column).to_pylist()
        with self.lock:
            answers = self._answers(texts)
        of = lambda at: pa.array([answer[at] for answer in answers], pa.string())
        return table.append_column("answer", of(0)).append_column("error", of(1))

    def close(self):
        """Ends the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.stdin.close()
            process.wait()

    def __del__(self):
        if getattr(self, "process", None) is not None:
            self.process.kill()

    def _answers(self, texts):
        answers = {at: (None, None) for at, text in enumerate(texts) if text is None}
        for number in range(1, self.tries + 1):
            if self.process is None:
                self._start()
            open_ones = [at for at in range(len(texts)) if at not in answers]
            failures = []
            for at, answer in zip(open_ones, self.pool.map(lambda at: self._ask(texts[at]), open_ones)):
                if isinstance(answer, Exception):
                    failures.append(answer)
                else:
                    answers[at] = answer
            if not failures:
                return [answers[at] for at in range(len(texts))]
            reason = f"{failures[0]}: {' '.join(self.said)}"
            log.warning("try %d of %d, %d texts open: %s", number, self.tries, len(failures), reason)
            self.close()
        raise GenerateError(f"{self.tries} tries: {reason}")

    def _ask(self, text):
        body = {"model": "model", "prompt": text, "seed": zlib.crc32(text.encode()), **self.options}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)["choices"][0]["text"], None
        except urllib.error.HTTPError as error:
            with error:
                told = json.load(error)["error"]["message"]
            # Retrying is useless.
            return (None, told) if error.code == 400 else GenerateError(told)
        # A server that ended raises any of these.
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            return error

    def _start(self):
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = collections.deque(maxlen=20)
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if found := re.search(r"^serving .* at (http://\S+)$", line):
                self.url = found[1]
                listener = threading.Thread(target=_listen, args=(self.process.stderr, self.said), daemon=True)
                return listener.start()
        self.process.stderr.close()
        self.close()
        raise GenerateError(f"`{' '.join(self.command)}` did not start: {' '.join(self.said)}")


def _listen(stream, said):
    with stream:
        for line in stream:
            said.append(line.rstrip())
            log.info("%s", line.rstrip())
