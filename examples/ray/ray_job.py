"""Embeds or answers the texts in Parquet files, with a pool of workers on a Ray cluster.

    python ray_job.py --model all-MiniLM-L6-v2/ --input docs/ --output vectors/ --workers 4 --gpus 1
    python ray_job.py --model qwen.gguf --generate 200 --input prompts/ --output answers/ --workers 4 --gpus 1

Run it again after any crash: it skips rows that were already written.
"""

import argparse

import ray
from ray.data.checkpoint import CheckpointConfig

from tilewright_embed import Embedder, with_lists
from tilewright_generate import Generator


class Embeds(Embedder):
    def __call__(self, table):
        return with_lists(super().__call__(table))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or file of a text encoder or generative model, the same on every node")
    parser.add_argument("--input", required=True, help="Parquet file or folder")
    parser.add_argument("--output", required=True, help="folder for Parquet files with the vectors or answers")
    parser.add_argument("--column", default="text", help="column with the texts")
    parser.add_argument("--id", default="id", help="column with unique row ids")
    parser.add_argument("--generate", type=int, metavar="N", help="continue each text by up to N tokens instead of embedding it")
    parser.add_argument("--parallel", type=int, default=16, help="concurrent texts per worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per worker")
    parser.add_argument("--cpus", type=float, default=0.5, help="cores reserved per worker; readers and writers need one each")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows per batch")
    parser.add_argument("--checkpoint", help="folder that records finished rows [default: OUTPUT.checkpoint]")
    parser.add_argument("--program", default="tilewright", help="path of the command, if not on PATH")
    parser.add_argument("flags", nargs="*", help="after `--`: flags of `tilewright embed` or `tilewright serve`")
    args = parser.parse_args()

    context = ray.data.DataContext.get_current()
    checkpoint = args.checkpoint or args.output.rstrip("/") + ".checkpoint"
    context.checkpoint_config = CheckpointConfig(args.id, checkpoint)
    # Rows per task: the work repeated if a worker dies.
    blocks = ray.data.read_parquet(args.input).repartition(target_num_rows_per_block=4 * args.batch_size)
    if args.generate:
        options = {"max_tokens": args.generate}
        worker, arguments = Generator, (args.model, args.column, options, args.flags, args.program, args.parallel)
    else:
        worker, arguments = Embeds, (args.model, args.column, args.flags, args.program)
    rows = blocks.map_batches(
        worker,
        fn_constructor_args=arguments,
        batch_format="pyarrow",
        batch_size=args.batch_size,
        compute=ray.data.ActorPoolStrategy(size=args.workers),
        num_cpus=args.cpus,
        num_gpus=args.gpus,
    )
    rows.write_parquet(args.output)


if __name__ == "__main__":
    main()
