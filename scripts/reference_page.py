"""What scripts/cli-docs and scripts/api-docs share: each writes a page of docs/ from the built program."""

import os
import re
import sys
import textwrap
from pathlib import Path

WIDTH = 118


def wrapped(text, indent=""):
    """Wraps a paragraph or a list item, except inside code."""
    kept = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(kept, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def joined(lines):
    """The page of these lines, without several empty ones after each other."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def main(script, source, usage, page, page_of):
    """Runs a script with the arguments of the command line. `page`: the file in the repository; `source`: what it is
    made from; `page_of(binary, writes)`: its text, where a `SystemExit` says what the program lacks."""
    arguments = sys.argv[1:]
    check = False
    root = Path(__file__).resolve().parent.parent
    binary = None
    while arguments:
        match arguments:
            case ["--check", *arguments]:
                check = True
            case ["--binary", binary, *arguments]:
                pass
            case [folder, *arguments] if not folder.startswith("-"):
                root = Path(folder)
            case _:
                print(usage, file=sys.stderr)
                return 2
    binary = Path(binary or root / os.environ.get("CARGO_TARGET_DIR", "target") / "debug" / "tilewright").resolve()
    if not os.access(binary, os.X_OK):
        print(f"no program {binary}: run cargo build --all-features", file=sys.stderr)
        return 1
    new = page_of(binary, not check)
    path = root / page
    if not check:
        path.write_text(new, encoding="utf-8")
        return 0
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == new:
        return 0
    pairs = zip([*old.split("\n"), None], [*new.split("\n"), None])
    number = next(number for number, (before, after) in enumerate(pairs, 1) if before != after)
    print(f"{page}:{number}: differs from {source}: update it with scripts/{script}")
    return 1
