"""Measures seconds to save and load one training state: this project, DeepSpeed, bare torch.

    python -m benchmarks.checkpoint --zero 3 --world 2 --repeats 7 --folder /some/disk

    (a) ours       fragments -> commit.save (digests, commit, sampled read-back); restoring.load
    (b) deepspeed  save_checkpoint, load_checkpoint; under ZeRO-1 and 2 working weights as well
    (c) torch      torch.save of this rank's fp32 master and moments; torch.load, no pickle
    (d) async      like (a) beside training: only the time that training stands still is counted

Turns alternate (a b c d a b c d) on one engine, one disk, one thread per rank; the first round is
not counted. Rule: a save ends when all its files and folders are fsynced, that of (d) when training
can continue; a load ends when training can continue. Before a load the weights are overwritten and
the pages of the files are dropped from the page cache; afterwards weights, moments and step must
equal those before, to the bit. Times are those of the slowest rank.
Writes benchmarks/results/checkpoint-*.json and .md. Units: seconds, bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from benchmarks.processes import ROOT
from benchmarks.report import paired_ratios, quartiles, spread
from benchmarks.step import commit, machine
from benchmarks.workload import LR, Workload, count_targets, micro_batches, recipe_of, resolved_of
from checkpoint.comm import Comm, RankComm
from checkpoint.format.state import RunState, random_states
from checkpoint.load.choosing import drop_from_cache
from checkpoint.load.restoring import load
from checkpoint.save.background import Background
from checkpoint.save.commit import save
from model.cost import num_parameters
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.engine import Engine
from runtime.process import process

TIME_LIMIT_S = 900
MOST_BYTES_PER_PARAMETER = 12 * 1.01  # fp32 weights, two moments; 1 % for indexes and digests
WIDTH = dict(hidden_size=512, intermediate_size=1408, num_attention_heads=8, num_key_value_heads=4)
MOST_STALL = 0.2  # of the time of a synchronous save
KEYS = ("save_s", "save_cpu_s", "load_s", "load_cpu_s")


def main(arguments: list[str]) -> int:
    """Start the ranks and write what they measured; or, started by torchrun, be one of them."""
    options = parse(arguments)
    if options.rank_of is not None:
        measure(options, options.rank_of)
        process.leave(0)
    root, load_before = options.folder.resolve(), os.getloadavg()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-", dir=root) as folder:
        torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={options.world}"
        command = [sys.executable, *(torchrun.split() if options.world > 1 else [])]
        command += ["-m", "benchmarks.checkpoint", *arguments, f"--rank-of={folder}"]
        env = os.environ | dict(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
        subprocess.run(command, check=True, cwd=ROOT, env=env, timeout=TIME_LIMIT_S)
        result = json.loads(Path(folder, "result.json").read_text())
    result["command"] = " ".join(["python -m benchmarks.checkpoint", *arguments])
    result |= {"commit": commit(), "machine": machine(), "zero": options.zero}
    result |= {"world": options.world, "load_before": load_before, "load_after": os.getloadavg()}
    out = ROOT / f"benchmarks/results/checkpoint-zero{options.zero}-{options.world}ranks.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint")
    parser.add_argument("--millions", type=float, default=40, help="of parameters, about")
    parser.add_argument("--repeats", type=int, default=5, help="counted rounds")
    parser.add_argument("--world", type=int, choices=(1, 2), default=1, help="ranks")
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO stage")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs", help="on the disk to measure")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def workload(millions: float, world: int) -> Workload:
    """Workload with 2.95 million parameters per block and 4.2 for the embedding, few tokens."""
    shape = Workload().shape | WIDTH | {"num_hidden_layers": max(1, round((millions - 4.2) / 2.95))}
    return Workload("fp32", 1, world, seq_len=64, micro_batch=1, accumulation=1, shape=shape)


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Work of one rank: an engine after one update, then all rounds.

    Raises AssertionError where a loaded state differs.
    """
    work = workload(options.millions, options.world)
    recipe = recipe_of(work, zero=options.zero)
    me, resolved = process.start(recipe.cluster), resolved_of(recipe, options.world)
    engine = build(recipe, resolved.layout, resolved.config, me)
    batches = [to_device(batch, me.device) for batch in micro_batches(work, me.rank, "across")]
    engine.set_lr(LR)
    engine.train_step(batches, count_targets(work, "across"), work.tokens)
    data = {"order_version": 1, "corpora": [], "window_tokens": recipe.seq_len}  # no corpus is read
    health = {"skips_in_a_row": 0, "skipped_steps": 0}
    recorded = dataclasses.asdict(recipe)
    state = RunState(1, work.tokens, 1, recipe.seed, recorded, data, health=health)
    ranks = RankComm(timeout_s=TIME_LIMIT_S)
    turns: dict[str, list[dict]] = {name: [] for name in CONTENDERS}
    for number in range(options.repeats + 1):
        for letter, (name, contender) in zip("abcd", CONTENDERS.items(), strict=True):
            place = folder / f"{number}-{letter}" / "checkpoints"
            seen = turn(name, contender(engine, state, ranks, place), engine, ranks, place)
            if number:  # the first round imports modules and warms the allocator
                turns[name].append(seen)
    if me.is_first:
        text = json.dumps(summary(turns, num_parameters(recipe.model)))
        (folder / "result.json").write_text(text)
    process.finish()


def turn(name: str, steps: Iterator, engine: Engine, ranks: Comm, folder: Path) -> dict[str, float]:
    """Save, forget, load, compare, remove; a collective."""
    before = bits(engine)
    if ranks.rank == 0:
        folder.mkdir(parents=True)
        os.sync()  # so that this turn's fsync does not write what earlier turns left
    saved = timed(lambda: next(steps), ranks)
    for fragment in engine.fragments():
        fragment.tensor.fill_(7)
    engine.after_load(0)
    assert bits(engine) != before
    written = timed(lambda: next(steps), ranks) if name == ASYNC else (0.0, 0.0)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    num_bytes = sum(path.stat().st_size for path in paths)
    for path in paths:
        drop_from_cache(path)
    loaded = timed(lambda: next(steps, None), ranks)
    same = ranks.exchange(bits(engine) == before, "comparison")
    assert all(same), f"{name}: loaded is not what was saved; by rank: {same}"
    if ranks.rank == 0:
        shutil.rmtree(folder.parent)
    seen = dict(zip(("bytes", *KEYS), (num_bytes, *saved, *loaded), strict=True))
    return seen | {"written_s": written[0]}


def timed(action: Callable[[], Any], ranks: Comm) -> tuple[float, float]:
    """Wall seconds until the last rank has finished, and CPU seconds of all ranks."""
    ranks.exchange(None, "start")
    began, cpu = time.perf_counter(), time.process_time()
    action()
    cpu_s = sum(ranks.exchange(time.process_time() - cpu, "end"))
    return time.perf_counter() - began, cpu_s


def bits(engine: Engine) -> str:
    """Digest of this rank's fp32 weights and moments, working weights and step count."""
    text = xxhash.xxh3_128(str(engine.optimizer_step()).encode())
    for fragment in engine.fragments():
        text.update(fragment.tensor.numpy())
    for parameter in engine.model.parameters():
        for tensor in (parameter, getattr(parameter, "ds_tensor", parameter)):
            text.update(tensor.detach().contiguous().numpy())
    return text.hexdigest()


# A contender saves before its `yield` and loads after it; (d) ends its save between two yields.
def ours(engine: Engine, state: RunState, ranks: Comm, folder: Path) -> Iterator[None]:
    pieces, local = engine.fragments(), {"random": random_states()}
    report = save(folder.parent, 1, pieces, state.as_dict(), ranks, local=local)
    assert report.ok, report.problem
    yield
    loaded = load(folder.parent, engine.fragments(), ranks)
    engine.after_load(RunState.from_dict(loaded.state).optimizer_step)


def beside(engine: Engine, state: RunState, ranks: Comm, folder: Path) -> Iterator[None]:
    saver = background()
    local = {"random": random_states()}
    saver.begin(folder.parent, 1, engine.fragments(), state.as_dict(), local=local)
    yield
    report = saver.take(TIME_LIMIT_S)
    assert report is not None, "no end"
    assert report.ok, report.problem
    yield
    loaded = load(folder.parent, engine.fragments(), ranks)
    engine.after_load(RunState.from_dict(loaded.state).optimizer_step)


@functools.cache
def background() -> Background:
    """The Background of all rounds, whose buffers are made once. A collective at its first call."""
    return Background(RankComm(timeout_s=TIME_LIMIT_S))


def deepspeed(engine: Engine, state: RunState, ranks: Comm, folder: Path) -> Iterator[None]:
    engine.ds.save_checkpoint(folder, tag="step")  # ends with a barrier
    paths = sorted(folder.rglob("*"), key=lambda path: (path.stat().st_size, path.name))
    files = [path for path in paths if path.is_file()]
    sync(*files[ranks.rank :: ranks.world])  # each rank takes an equal share of the large files
    sync(folder, *(path for path in paths if path.is_dir()))
    yield
    assert engine.ds.load_checkpoint(folder, tag="step")[0] is not None


def bare_torch(engine: Engine, state: RunState, ranks: Comm, folder: Path) -> Iterator[None]:
    path = folder / f"{ranks.rank}.pt"
    tensors = [fragment.tensor for fragment in engine.fragments()]
    torch.save({"step": engine.optimizer_step(), "tensors": tensors}, path)
    sync(path, folder)
    yield
    found = torch.load(path, weights_only=True, mmap=False)
    for fragment, stored in zip(engine.fragments(), found["tensors"], strict=True):
        fragment.tensor.copy_(stored)
    engine.after_load(found["step"])


CONTENDERS = {
    "(a) ours": ours,
    "(b) deepspeed": deepspeed,
    "(c) torch": bare_torch,
    "(d) ours, async": beside,
}
OURS, DEEPSPEED, _, ASYNC = CONTENDERS


def sync(*paths: Path) -> None:
    """fsync files and folders."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def summary(turns: dict[str, list[dict]], parameters: int) -> dict[str, Any]:
    """Quartiles of each contender, and of the ratio of its times to ours in the same round.

    A ratio above 1 means that ours is faster. Raises AssertionError where ours stores more bytes
    than allowed.
    """
    found = {name: {"bytes_per_parameter": turns[name][0]["bytes"] / parameters} for name in turns}
    for key in KEYS:
        seconds = {name: [turn[key] for turn in seen] for name, seen in turns.items()}
        for name, theirs in seconds.items():
            found[name][key] = quartiles(theirs)
            found[name][f"{key}_over_ours"] = quartiles(paired_ratios(seconds[OURS], theirs))
    assert found[OURS]["bytes_per_parameter"] <= MOST_BYTES_PER_PARAMETER, found[OURS]
    found[ASYNC]["written_s"] = quartiles([turn["written_s"] for turn in turns[ASYNC]])
    return {"parameters": parameters, "contenders": found, "turns": turns}


def markdown(result: dict[str, Any]) -> str:
    """Report as Markdown."""
    lines = ["# Checkpoint benchmark", "", f"`{result['command']}` at {result['commit']}.", ""]
    lines += [*(f"- {key}: {value}" for key, value in result["machine"].items())]
    lines += [
        f"- load average {result['load_before']} before, {result['load_after']} after",
        "",
        f"{result['parameters']:,} parameters in fp32 with AdamW, ZeRO-{result['zero']},"
        f" {result['world']} ranks of one thread, {len(result['turns'][OURS])} rounds in turns;"
        " median [quartiles]. x (a) is the time over that of (a) in the same round: above 1 = this"
        " project is faster. Everything fsynced; page cache dropped before loads (a virtual disk's"
        " host may still cache); what is loaded equals, to the bit, what was saved.",
        "",
        "| contender | bytes/parameter | save s | x (a) | load s | x (a) | CPU s save, load |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, seen in result["contenders"].items():
        cells = [name, f"{seen['bytes_per_parameter']:.3f}"]
        for key in KEYS[::2]:
            cells += [spread(seen[key], ".2f"), spread(seen[f"{key}_over_ours"], ".2f")]
        cells.append(f"{seen['save_cpu_s'][1]:.2f}, {seen['load_cpu_s'][1]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    ratios = [result["contenders"][DEEPSPEED][f"{key}_over_ours"][1] for key in KEYS[::2]]
    lines += ["", f"Goal, no slower than (b) by the median: {min(ratios) >= 1}."]
    beside_ = result["contenders"][ASYNC]
    stall = beside_["save_s_over_ours"]
    lines += [
        f"The save of (d) is its stall: {spread(stall, '.3f')} of (a), goal at most {MOST_STALL}:"
        f" {stall[1] <= MOST_STALL}. On disk {spread(beside_['written_s'], '.2f')} s after the"
        " stall and the spoiling of all weights.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
