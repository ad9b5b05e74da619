"""Measures the speed of making and checking corpora per core, side by side in one run.

    python -m benchmarks.tokenize                  about two minutes on one core

Contenders take turns on the same JSON lines; CPU seconds of one thread, medians of rounds.
raw: `tokenizers` alone on texts in memory, including the reading of its ids. ours: the whole work
on a unit (reading, JSON, rules for text, filters, tokenizing, hashes, writing) with `tokenizers`
and, where it is installed, with `gigatoken`. verify: a full pass of `corpus-verify` over a shard,
against reading the file and hashing it. Rule: the ids of all contenders are compared before any
speed is reported.

Units: bytes of text or of tokens per CPU second. Only ratios are comparable between machines.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import Tokenizer

from commands.corpus_verify import ShardCheck, check_shard_bytes
from data.corpus.block_hashes import BLOCK_BYTES
from data.corpus.shard_writer import ShardWriter
from data.corpus.sotu import read_documents
from data.corpus.tokenizer import TextTokenizer, train_bpe
from data.text.encoding import Encoder
from data.text.inputs import find_inputs
from data.text.settings import Settings
from data.text.unit import UnitTask, build_unit
from data.text.unit_plan import plan_units

PIECE_CHARS = 4000  # length of a document in the benchmark
VERIFY_TOKENS = 64 << 20
OUT = Path(__file__).resolve().parent / "results" / "tokenize"


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenize")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--pieces", type=int, default=1500, help=f"texts of {PIECE_CHARS} characters"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "command": "python -m benchmarks.tokenize " + " ".join(arguments),
            "tokenizing": tokenizing(Path(folder), options.rounds, options.pieces),
            "verify": verifying(Path(folder), options.rounds),
            "versions": versions(),
        }
    text = table(result)
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(text + "\n")
    return 0


def tokenizing(folder: Path, rounds: int, pieces: int) -> dict:
    """Bytes of text per CPU second of each contender, and ratios to raw."""
    documents = [document.data.decode() for document in read_documents()]
    texts = [t[i : i + PIECE_CHARS] for t in documents for i in range(0, len(t), PIECE_CHARS)]
    texts = texts[:: max(1, len(texts) // pieces)][:pieces]  # from all years
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts))
    tokenizer = train_bpe(documents[::8])
    engines = ["tokenizers"]
    if importlib.util.find_spec("gigatoken"):
        engines.append("gigatoken")
    contenders: dict[str, Callable[[], np.ndarray]] = {"raw tokenizers": raw(tokenizer, texts)}
    for engine in engines:
        contenders[f"ours, {engine}"] = ours(tokenizer, engine, path, folder)
    return compare(contenders, rounds, sum(len(text.encode()) for text in texts))


def raw(tokenizer: TextTokenizer, texts: list[str]) -> Callable[[], np.ndarray]:
    plain = Tokenizer.from_str(tokenizer.definition)
    plain.encode_special_tokens = True

    def run() -> np.ndarray:
        found = []
        for start in range(0, len(texts), 256):
            batch = plain.encode_batch_fast(texts[start : start + 256], add_special_tokens=False)
            found += [one.ids for one in batch]
        return found

    return run


def ours(tokenizer: TextTokenizer, engine: str, path: Path, folder: Path):
    encoder = Encoder(tokenizer, engine)
    (unit,) = plan_units(find_inputs(str(path)), "file")
    task = UnitTask(unit, folder / "unit", Settings())

    def run() -> np.ndarray:
        shutil.rmtree(task.folder, ignore_errors=True)
        build_unit(task, encoder, lambda count: None)
        return np.fromfile(task.folder / "ids.bin", dtype="<u2")

    return run


def verifying(folder: Path, rounds: int) -> dict:
    """Bytes of tokens per CPU second of a full pass, and of reading with one hash."""
    writer = ShardWriter(folder / "shard", np.dtype("<u2"), 0)
    draw = np.random.default_rng(0)
    for _ in range(16):
        writer.add(draw.integers(1, 50000, VERIFY_TOKENS // 16).astype("<u2"))
    entry = writer.close()
    check = ShardCheck(folder / "shard.bin", entry, "uint16", 0)

    def verify() -> None:
        assert check_shard_bytes(check, None, lambda count: None) == []

    def read_and_hash() -> None:
        buffer = bytearray(BLOCK_BYTES)
        with open(check.path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                xxhash.xxh3_64_intdigest(memoryview(buffer)[:count])

    contenders = {"read and hash": read_and_hash, "corpus-verify": verify}
    return compare(contenders, rounds, entry["bin_bytes"])


def compare(contenders: dict[str, Callable], rounds: int, size: int) -> dict:
    """Run contenders in turns; the first round compares their results and is not counted."""
    given = {name: run() for name, run in contenders.items()}
    _check_equal(given)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            contenders[name]()
            seconds[name].append(time.process_time() - start)
    first = seconds[names[0]]
    return {
        name: {
            "bytes_per_cpu_s": size / max(statistics.median(some), 1e-9),
            "ratio": statistics.median(
                a / max(b, 1e-9) if some is not first else 1.0
                for a, b in zip(first, some, strict=True)
            ),
        }
        for name, some in seconds.items()
    }


def _check_equal(given: dict) -> None:
    plain = given.get("raw tokenizers")
    if plain is None:
        return
    expected = np.concatenate([[*ids, 0] for ids in plain])  # the end id of every document is 0
    for name, ids in given.items():
        if name != "raw tokenizers" and not np.array_equal(ids, expected):
            raise AssertionError(f"{name} gives other ids")


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("tokenizers", "gigatoken", "numpy", "xxhash"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def table(result: dict) -> str:
    lines = [f"`{result['command'].strip()}`", ""]
    for title, unit, scale in (("tokenizing", "MB/s", 1e6), ("verify", "GB/s", 1e9)):
        lines += [f"| {title}, one core | {unit} | times the first |", "|---|---|---|"]
        for name, one in result[title].items():
            lines.append(f"| {name} | {one['bytes_per_cpu_s'] / scale:.2f} | {one['ratio']:.2f}x |")
        lines.append("")
    text = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, text])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
