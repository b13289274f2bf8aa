"""Embeds the texts in Parquet files with Daft: on this machine, or on a Ray cluster (DAFT_RUNNER=ray).

    python daft_job.py --model all-MiniLM-L6-v2/ --input docs/*.parquet --output vectors/
"""

import argparse

import daft
import pyarrow as pa

from tilewright_embed import Embedder, with_lists


def embedder(gpus, batch_size):
    """A class with a method `embed` from a column of texts to a column of vectors."""

    @daft.cls(gpus=gpus)
    class Worker:
        def __init__(self, model, flags, program):
            self.embedder = Embedder(model, "text", flags, program)

        @daft.method.batch(return_dtype=daft.DataType.list(daft.DataType.float32()), batch_size=batch_size)
        def embed(self, texts: daft.Series):
            table = with_lists(self.embedder(pa.table({"text": texts.to_arrow()})))
            return table.column("embedding").combine_chunks()

    return Worker


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or file of a text encoder, the same on every node")
    parser.add_argument("--input", required=True, help="Parquet files")
    parser.add_argument("--output", required=True, help="folder for Parquet files with the vectors")
    parser.add_argument("--column", default="text", help="column with the texts")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows per batch")
    parser.add_argument("--program", default="tilewright", help="path of the command, if not on PATH")
    parser.add_argument("flags", nargs="*", help="after `--`: flags of `tilewright embed`")
    args = parser.parse_args()

    worker = embedder(args.gpus, args.batch_size)(args.model, args.flags, args.program)
    rows = daft.read_parquet(args.input)
    rows.with_column("embedding", worker.embed(rows[args.column])).write_parquet(args.output)


if __name__ == "__main__":
    main()
