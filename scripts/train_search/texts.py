"""Pairs of a query and its passage: from WordNet for training, from other texts to test generalisation."""

import ast
import re
import sysconfig
from pathlib import Path

# Synsets of each kind: texts that one thread embeds in ten minutes.
N_EXAMPLES, N_WORDS, N_CLAUSES = 22_000, 26_000, 9_000
KINDS = ["example", "words", "clause"]
N_DOCSTRINGS = 1500
PASSAGE_WORDS = 90  # as on the demo page


def one_line(text: str) -> str:
    return " ".join(text.split())


def synsets(folder: Path):
    """Words, definition and examples of each synset; wndb(5WN) describes the files."""
    for part in ["noun", "verb", "adj", "adv"]:
        for line in (folder / f"data.{part}").read_text("latin-1").splitlines():
            if line.startswith("  "):  # the licence
                continue
            fields, _, gloss = line.partition(" | ")
            fields = fields.split()
            words = [re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            examples = re.findall(r'"([^"]+)"', gloss)
            yield words, re.split(r'[;:,]?\s*"', gloss)[0].strip(" ;:,"), examples


def wordnet(folder: Path, rng) -> list[tuple[str, str, str]]:
    """(kind, query, passage), one per synset of a sample; passages and queries are unique.

    example  an example sentence -> the definition
    words    the synset's words -> the definition
    clause   the definition up to its first semicolon -> the rest of it
    """
    every = list(synsets(folder))
    left = {"example": N_EXAMPLES, "words": N_WORDS, "clause": N_CLAUSES}
    pairs, seen = [], set()
    for i in rng.permutation(len(every)):
        words, definition, examples = every[i]
        first, _, rest = (part.strip() for part in definition.partition(";"))
        examples = [text for text in examples if len(text.split()) >= 3]
        if left["example"] and examples:
            kind, query, passage = "example", examples[rng.integers(len(examples))], definition
        elif left["clause"] and min(len(first.split()), len(rest.split())) >= 3:
            kind, query, passage = "clause", first, rest
        elif left["words"] and len(definition.split()) >= 3:
            kind, query, passage = "words", ", ".join(words), definition
        else:
            continue
        if not seen & {query, passage}:
            seen |= {query, passage}
            left[kind] -= 1
            pairs.append((kind, query, passage))
    return pairs


def documents(root: Path) -> tuple[list[str], list[str], list[int]]:
    """For each paragraph in the project's documents, every second sentence as a query and the others as a passage."""
    queries, passages, own = [], [], []
    files = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "npm/README.md", "examples/ray/README.md"]
    for name in [*files, "scripts/train_builtin/README.md"]:
        text = re.sub(r"```.*?```", "", (root / name).read_text(), flags=re.S)
        for block in re.split(r"\n\s*\n", text):
            lines = [line for line in block.splitlines() if not re.match(r"[|#]", line)]
            sentences = re.split(r"(?<=\.)\s+", one_line(re.sub(r"[`*]|\]\(\S*\)|\[", "", " ".join(lines))))
            sentences = [text for text in sentences if len(text.split()) >= 4]
            queries += sentences[1::2]
            own += [len(passages)] * len(sentences[1::2])
            if len(sentences) >= 2:
                passages.append(" ".join(" ".join(sentences[::2]).split()[:PASSAGE_WORDS]))
    return queries, passages, own


def docstrings(rng) -> tuple[list[str], list[str], list[int]]:
    """First lines of docstrings in Python's own library, and the paragraph after each."""
    pairs, seen = [], set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests"} & set(path.parts):
            continue
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                parts = [one_line(part) for part in (ast.get_docstring(node) or "").split("\n\n")]
                if len(parts) > 1 and 3 <= len(parts[0].split()) <= 30 and len(parts[1].split()) >= 8 and not seen & set(parts[:2]):
                    seen |= set(parts[:2])
                    pairs.append((parts[0], " ".join(parts[1].split()[:PASSAGE_WORDS])))
    queries, passages = zip(*(pairs[i] for i in rng.permutation(len(pairs))[:N_DOCSTRINGS]))
    return list(queries), list(passages), list(range(len(queries)))
