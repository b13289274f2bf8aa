"""Embeds Arrow tables with a `tilewright embed` process that lives as long as its worker.

The process keeps no state between batches, and a text's vector does not depend on its batch. So a process that dies is
restarted and its batch repeated, and a dead worker can be replaced.
"""

import collections
import logging
import os
import subprocess
import threading

import pyarrow as pa

log = logging.getLogger("tilewright")

# Exit codes for which retrying is useless: usage, model, no adapter, input.
FINAL = {2, 3, 4, 6}


class EmbedError(RuntimeError):
    """The process ended, and restarting it is useless or failed too often."""


def adapter_flags(environ=os.environ):
    """The flag for the GPU that the engine assigned to this worker.

    Engines assign NVIDIA GPUs by CUDA_VISIBLE_DEVICES, which Vulkan ignores: the flag names the PCI address.
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
    """Adds a column of vectors to `pyarrow.Table`s with a column of texts.

    model: folder or file of a text encoder, on this machine.
    column: the column with the texts; a null text has a null vector.
    flags: further flags of `tilewright embed`, such as `["--device", "cpu"]`.
    program: path of the command, if not on PATH.
    tries: attempts per batch before the job fails.
    """

    def __init__(self, model, column="text", flags=(), program="tilewright", tries=3):
        streams = ["--io", "arrow-stream", "--column", column, "--json-logs"]
        self.command = [program, "embed", model, *streams, *adapter_flags(), *flags]
        self.tries = tries
        self.process = None
        # Serial: some engines call from several threads.
        self.lock = threading.Lock()

    def __call__(self, table):
        """The rows of `table` in order, with their vectors."""
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
            # A stream that ended early raises OSError, StopIteration or an Arrow error.
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
        """Reason why the process ended; raises EmbedError if retrying is useless."""
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
    """Exit code of a process, which is killed if it does not end by itself."""
    process.stdout.close()
    try:
        process.stdin.close()
    except OSError:
        pass  # Its reader is gone.
    try:
        return process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def with_lists(table):
    """The table with variable-size lists: pyarrow cannot read Parquet files with nulls in fixed-size lists."""
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
