"""Writes the files of this folder with pyarrow, whose readers and writers share no code with ours."""

import pathlib

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

folder = pathlib.Path(__file__).parent
texts = ["a red ball", None, "", "Äpfel, \"Öl\"\nund Übermut", "eleven"]
ids = [7, 8, 9, 10, 11]
tags = [["x"], [], None, ["y", "z"], ["x"]]


def table(text_type):
    columns = {"id": pa.array(ids, pa.int64()), "text": pa.array(texts, text_type), "tags": pa.array(tags)}
    return pa.table(columns).replace_schema_metadata({"origin": "pyarrow"})


for name, text_type in [("utf8", pa.string()), ("large_utf8", pa.large_string()), ("utf8_view", pa.string_view())]:
    with pa.ipc.new_stream(folder / f"{name}.arrows", table(text_type).schema) as writer:
        for batch in table(text_type).to_batches(max_chunksize=2):
            writer.write_batch(batch)
pyarrow.feather.write_feather(table(pa.string()), folder / "lz4.arrow", compression="lz4")
for codec in ["none", "snappy", "gzip", "lz4", "zstd"]:
    pq.write_table(table(pa.string()), folder / f"{codec}.parquet", compression=codec, row_group_size=3)
