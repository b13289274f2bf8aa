#!/usr/bin/env python3
"""Makes tests/data/pictures from a folder of tiny models with pictures, as ../shared/data/tiny-new has them.

Pixels are by Pillow, preprocessing by transformers (in the source), positions and angles by NumPy here.
Needs numpy, pillow, safetensors, ml_dtypes:

    scripts/picture_data.py SOURCE
"""

import io
import json
import struct
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
from PIL import Image, ImageOps
from safetensors.numpy import load_file, save_file

TARGET = Path(__file__).resolve().parent.parent / "tests/data/pictures"
PLAIN = ["a.png", "b.png", "c.png", "alpha.png", "gray.png", "turned.jpg"]
FAMILIES = ["qwen3-vl", "gemma4-vl", "gemma4-unified", "gemma3-vl", "lfm2-vl", "lfm3-vl", "smolvlm", "clip", "siglip2"]


def rgb(file):
    """The pixels of a file, turned, as processors see them."""
    return np.asarray(ImageOps.exif_transpose(Image.open(file)).convert("RGB"))


def drawn(width, height, seed):
    """A smooth picture with some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / (3 + i * 2) + i) + np.cos(y / (5 - i) - i) for i in range(3)]
    noise = rng.integers(-12, 13, (height, width, 3))
    return np.clip(np.stack(waves, -1) * 55 + 127 + noise, 0, 255).astype(np.uint8)


def odd_pictures(folder):
    """Pictures of odd sizes, depths and formats."""
    folder.mkdir(exist_ok=True)

    def save(name, image, **options):
        image.save(folder / name, **options)

    picture = Image.fromarray(drawn(33, 47, 0))
    alpha = Image.fromarray(drawn(33, 47, 1)[..., 0])
    save("one.png", Image.fromarray(drawn(1, 1, 2)))
    save("tall.png", Image.fromarray(drawn(1, 4000, 3)))
    save("odd.jpg", picture, quality=90)
    save("full.jpg", picture, quality=95, subsampling=0)
    save("progressive.jpg", picture, quality=80, progressive=True)
    save("grey.jpg", picture.convert("L"))
    save("cmyk.jpg", picture.convert("CMYK"), quality=95)
    y, x = np.mgrid[0:3000, 0:4000]
    large = np.stack([x // 16, y // 12, (x + y) // 28], -1).astype(np.uint8)
    save("large.png", Image.fromarray(large).quantize(8), optimize=True)
    palette = picture.quantize(16)
    save("palette.png", palette, transparency=bytes(range(0, 256, 16)))
    save("palette1.png", picture.quantize(2), bits=1)
    save("bilevel.png", picture.convert("1"))
    save("la.png", Image.merge("LA", [picture.convert("L"), alpha]))
    transparent = picture.copy()
    transparent.putalpha(alpha.point(lambda level: 0 if level < 128 else level))
    save("rgba.png", transparent)
    deep = drawn(33, 47, 4).astype(np.uint16) * 256 + drawn(33, 47, 5)
    save("grey16.png", Image.fromarray(deep[..., 0] >> 7))
    write_png(folder / "rgb16.png", deep, 2)
    write_png(folder / "la16.png", deep[..., :2], 4)
    frames = [Image.fromarray(drawn(33, 47, seed)).quantize(32) for seed in (6, 7)]
    save("animated.gif", frames[0], save_all=True, append_images=frames[1:], duration=50)
    save("transparent.gif", palette, transparency=3)
    part_gif(folder / "part.gif")
    save("lossless.webp", transparent, lossless=True, exact=True)
    save("lossy.webp", picture, quality=80)
    save("lossy-alpha.webp", transparent, quality=80)
    later = Image.fromarray(drawn(33, 47, 8))
    save("animated.webp", picture, save_all=True, append_images=[later], lossless=True)
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        name = f"turn{turn}.png" if turn % 2 else f"turn{turn}.webp"
        save(name, picture.crop((0, 0, 9, 5)), lossless=True, exif=exif)
    exif = Image.Exif()
    exif[0x0112] = 5
    save("turn5.jpg", picture, exif=exif, quality=95)


def write_png(path, values, color):
    """A PNG of 16 bits, which Pillow does not write in colour."""
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    header = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + data)


def part_gif(path):
    """A GIF whose frame is smaller than its screen."""
    buffer = io.BytesIO()
    Image.fromarray(drawn(10, 8, 9)).quantize(8).save(buffer, "GIF")
    data = bytearray(buffer.getvalue())
    struct.pack_into("<HH", data, 6, 20, 16)
    at = data.index(b"\x2c\0\0\0\0\x0a\0\x08\0")
    struct.pack_into("<HH", data, at + 1, 6, 5)
    path.write_bytes(data)


def tensor(file, name):
    """A BF16 tensor as F64."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])[name]
    begin, end = (8 + length + offset for offset in entry["data_offsets"])
    return np.frombuffer(data[begin:end], ml_dtypes.bfloat16).astype(np.float64).reshape(entry["shape"])


def levels(values, mean, std):
    """8-bit levels of normalised values; the inverse is checked."""
    found = np.rint((values * std + mean) * 255)
    assert np.abs((found / 255 - mean) / std - values).max() < 1e-6 and found.min() >= 0 and found.max() <= 255
    return found.astype(np.uint8)


def pixel_levels(name, settings, value, mask):
    """The levels of `pixel_values`: [n, patch_dim] or [tiles, n, patch_dim] or [tiles, 3, height, width]."""
    mean, std = np.zeros(3), np.ones(3)
    if settings["do_normalize"]:
        mean, std = np.array(settings["image_mean"]), np.array(settings["image_std"])
    if name in ("qwen3-vl", "lfm3-vl"):
        frames = value.reshape(len(value), 3, 2, -1)
        assert (frames[:, :, 0] == frames[:, :, 1]).all()
        return levels(frames[:, :, 0], mean[:, None], std[:, None]).reshape(len(value), -1)
    if name in ("gemma4-vl", "gemma4-unified", "lfm2-vl"):
        value = value if mask is None else np.where(mask[..., None] > 0, value, -1)
        return levels(value.reshape(*value.shape[:2], -1, 3), mean, std).reshape(value.shape)
    value = value.reshape(-1, *value.shape[-3:])
    return levels(value, mean[:, None, None], std[:, None, None])


KEPT = [
    "ids",
    "position_ids",
    "image_grid_thw",
    "spatial_shapes",
    "num_soft_tokens_per_image",
    "image_rows",
    "image_cols",
    "image_position_ids",
]


def family(source, name):
    """Preprocessing of a family: `<i>.levels`, ids, grids; for some `table` and `positions`, and `angles`."""
    settings = json.loads((source / name / "preprocessor_config.json").read_text())
    refs = load_file(source / name / "refs.safetensors")
    refs = {key.removeprefix("image."): value for key, value in refs.items() if not key.startswith("text.")}
    kept = {}
    for key, value in refs.items():
        case, _, stem = key.partition(".")
        if stem == "pixel_values" and (case == "0" or name not in ("lfm3-vl", "smolvlm")):
            mask = refs.get(f"{case}.pixel_attention_mask")
            kept[f"{case}.levels"] = pixel_levels(name, settings, value, mask)
        elif stem in KEPT:
            kept[key] = value
    add_positions(kept, refs, name, source / name / "model.safetensors")
    folder = TARGET / name
    folder.mkdir(exist_ok=True)
    save_file(kept, folder / "refs.safetensors")
    config = json.loads((source / name / "config.json").read_text())
    names = ("model_type", "scale_factor", "downsample_factor", "mm_tokens_per_image")
    wanted = {key: value for key, value in config.items() if key in names}
    if "vision_config" in config:
        wanted["vision_config"] = {"patch_size": config["vision_config"].get("patch_size")}
    (folder / "config.json").write_text(json.dumps(wanted, indent=1) + "\n")
    for file in ("preprocessor_config.json", "cases.json"):
        (folder / file).write_bytes((source / name / file).read_bytes())


# Names of the weights of the patches, and of the table of positions.
EMBEDDINGS = {
    "qwen3-vl": ("model.visual.patch_embed.proj", "model.visual.pos_embed.weight"),
    "gemma4-vl": (
        "model.vision_tower.patch_embedder.input_proj",
        "model.vision_tower.patch_embedder.position_embedding_table",
    ),
    "lfm2-vl": (
        "model.vision_tower.vision_model.embeddings.patch_embedding",
        "model.vision_tower.vision_model.embeddings.position_embedding.weight",
    ),
    "smolvlm": (
        "model.vision_model.embeddings.patch_embedding",
        "model.vision_model.embeddings.position_embedding.weight",
    ),
}


def add_positions(kept, refs, name, model):
    """What is added to the patches of case 0 before the first block: its input without the product; and angles."""
    if name == "qwen3-vl":
        kept["angles"] = grid_angles(6, 8, 2, 16, 1e4, False)
        kept["text_angles"] = text_angles(refs["2.position_ids"], [4, 4, 4], 24, 1e6)
    if name == "gemma4-vl":
        kept["angles"] = grid_angles(9, 9, 3, 16, 100.0, True)
    if name not in EMBEDDINGS:
        return
    patch, table = EMBEDDINGS[name]
    weight = tensor(model, patch + ".weight")
    weight = weight.reshape(len(weight), -1)
    bias = 0 if name == "gemma4-vl" else tensor(model, patch + ".bias")
    pixels = refs["0.pixel_values"].astype(np.float64)
    if name == "gemma4-vl":
        pixels = 2 * (pixels - 0.5)
    if name == "smolvlm":
        pixels = pixels[0, :1].reshape(3, 6, 8, 6, 8).transpose(1, 3, 0, 2, 4)
    pixels = pixels.reshape(-1, weight.shape[1])
    first = refs["0.vision_layers"][0].reshape(-1, len(weight))[: len(pixels)]
    kept["table"] = tensor(model, table).astype(np.float32)
    kept["positions"] = (first - pixels @ weight.T - bias).astype(np.float32)


def grid_angles(rows, columns, merge, dim, base, column_first):
    frequencies = 1 / base ** (np.arange(0, dim // 2, 2) / (dim // 2))
    y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    places = np.stack([x, y] if column_first else [y, x], -1)
    blocks = places.reshape(rows // merge, merge, columns // merge, merge, 2).swapaxes(1, 2).reshape(-1, 2)
    angles = (blocks[..., None] * frequencies).reshape(rows * columns, -1)
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def text_angles(positions, sections, dim, base):
    """The time's angles, overwritten as transformers does."""
    frequencies = 1 / base ** (np.arange(0, dim, 2) / dim)
    angles = positions[..., None] * frequencies
    mixed = angles[0].copy()
    for axis in (1, 2):
        index = slice(axis, sections[axis] * 3, 3)
        mixed[:, index] = angles[axis][:, index]
    return np.stack([np.cos(mixed), np.sin(mixed)], -1).astype(np.float32)


def main():
    source = Path(sys.argv[1])
    pixels = load_file(source / "images/refs.safetensors")
    pixels = {key.removesuffix(".pil"): value for key, value in pixels.items() if not key.endswith(".torchvision")}
    for name in PLAIN:
        (TARGET / name).write_bytes((source / "images" / name).read_bytes())
        assert (rgb(TARGET / name) == pixels[name + ".rgb"]).all(), name
    odd = TARGET / "odd"
    odd_pictures(odd)
    for path in sorted(odd.iterdir()):
        decoded = rgb(path)
        if decoded.size > 1 << 20:
            decoded = np.asarray(Image.fromarray(decoded).resize((64, 48), Image.Resampling.BICUBIC))
        pixels[f"odd/{path.name}.rgb"] = np.ascontiguousarray(decoded)
    tall = Image.open(odd / "tall.png")
    pixels["odd/tall.png.lanczos.30x40"] = np.asarray(tall.resize((30, 40), Image.Resampling.LANCZOS))
    save_file(pixels, TARGET / "pixels.safetensors")
    for name in FAMILIES:
        family(source, name)


main()
