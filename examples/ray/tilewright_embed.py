"""Vectors for Arrow tables, from a `tilewright embed` process that lives as long as its worker.

The process keeps nothing between batches, and a text's vector does not depend on its batch. So a process that dies is
started again and given the batch once more, and a worker that dies may be replaced by another.
"""

import collections
import logging
import os
import subprocess
import threading

import pyarrow as pa

log = logging.getLogger("tilewright")

# Exit codes after which another try would end in the same way: usage, model, no adapter, input.
FINAL = {2, 3, 4, 6}


class EmbedError(RuntimeError):
    """The process ended, and starting it again is of no use, or was tried often enough."""


def adapter_flags(environ=os.environ):
    """The GPU that an engine has given this worker, as a flag.

    Engines hand out NVIDIA GPUs by CUDA_VISIBLE_DEVICES, which Vulkan does not know: the flag names the PCI address.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    if not visible:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]
    for line in subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines():
        index, uuid, address = (field.strip() for field in line.split(","))
        if visible == index or uuid.startswith(visible):
            return ["--adapter", f"pci:{address}"]
    raise EmbedError(f"CUDA_VISIBLE_DEVICES names {visible}, which nvidia-smi does not list")


class Embedder:
    """Takes `pyarrow.Table`s with a column of texts and returns them with one more column, the vectors.

    model: folder or file of a text encoder, on this machine.
    column: the column with the texts; a null text has a null vector.
    flags: further flags of `tilewright embed`, such as `["--device", "cpu"]`.
    program: the command, if it is not on the PATH.
    tries: how often a batch is given to a process before the job fails.
    """

    def __init__(self, model, column="text", flags=(), program="tilewright", tries=3):
        streams = ["--io", "arrow-stream", "--column", column, "--json-logs"]
        self.command = [program, "embed", model, *streams, *adapter_flags(), *flags]
        self.tries = tries
        self.process = None
        # One after the other: some engines call from several threads.
        self.lock = threading.Lock()

    def __call__(self, table):
        """The rows of `table`, in their order, with their vectors."""
        batches = table.combine_chunks().to_batches() or [_empty_batch(table.schema)]
        with self.lock:
            return pa.Table.from_batches([self._embed(batch) for batch in batches])

    def close(self):
        """Ends the process."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            _wait(process)

    def __del__(self):
        if getattr(self, "process", None) is not None:
            self.process.kill()

    def _embed(self, batch):
        for number in range(1, self.tries + 1):
            try:
                if self.process is None or self.schema != batch.schema:
                    self._start(batch.schema)
                self.writer.write_batch(batch)
                self.process.stdin.flush()
                if self.reader is None:
                    self.reader = pa.ipc.open_stream(self.process.stdout)
                return self.reader.read_next_batch()
            # However a stream that ended early shows itself: OSError, StopIteration, or Arrow's own.
            except (OSError, StopIteration, pa.ArrowException) as error:
                reason = self._reason(error)
                log.warning("try %d of %d: %s", number, self.tries, reason)
        raise EmbedError(f"{self.tries} tries: {reason}")

    def _start(self, schema):
        self.close()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=pipe)
        self.said = collections.deque(maxlen=20)
        self.listener = threading.Thread(target=_listen, args=(self.process.stderr, self.said), daemon=True)
        self.listener.start()
        self.schema = schema
        self.reader = None
        self.writer = pa.ipc.new_stream(self.process.stdin, schema)

    def _reason(self, error):
        """Why the process ended; raises EmbedError if another try is of no use."""
        process, self.process = self.process, None
        if process is None:
            return str(error)
        code = _wait(process)
        self.listener.join(timeout=10)
        reason = f"`{' '.join(self.command)}` ended with {code}: {' '.join(self.said)}"
        if code in FINAL:
            raise EmbedError(reason) from error
        return reason


def _wait(process):
    """The exit code of a process that ends by itself, or else is ended."""
    process.stdout.close()
    try:
        process.stdin.close()
    except OSError:
        pass  # Nobody reads it any longer.
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def with_lists(table):
    """The table with its vectors as lists of any length: pyarrow cannot read a Parquet file that has nulls in lists of
    fixed size, not even its own.
    """
    at = table.schema.get_field_index("embedding")
    return table.set_column(at, "embedding", table.column(at).cast(pa.list_(pa.float32())))


def _empty_batch(schema):
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


def _listen(stream, said):
    with stream:
        for line in stream:
            line = line.decode(errors="replace").rstrip()
            said.append(line)
            log.info("%s", line)
