"""Checks of benchmarks.gpu about time and memory: the clock, host syncs, ZeRO stages, utilisation.

Rule: steps are taken as pretrain.py takes them, and device values are read after the last step.
Units: seconds, GiB, tokens/s.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from base.units import GIB
from benchmarks import syncs
from benchmarks.gpu_bench import (
    SHAPE_1B,
    SHAPE_350M,
    TINY,
    WARM_UP,
    Bench,
    Row,
    allocated,
    take_steps,
)
from benchmarks.workload import Workload, count_targets, micro_batches
from model.cost import activation_bytes, flops_per_token, num_parameters
from model.decoder import compile_blocks
from recipes.schema import Recipe
from record.run_folder import device_name
from runtime.ds_config.state_bytes import state_bytes
from runtime.engine.batches import to_device
from runtime.monitor.speed import mfu, peak_flops
from runtime.resolve import Resolved


def step_clock(bench: Bench) -> Iterator[Row]:
    """Check that the parts of a step add up to the wall time; a late batch is data time."""
    size = bench.sized(dict(shape=SHAPE_350M, seq_len=1024), dict(shape=TINY, seq_len=32))
    work = Workload(precision="bf16", micro_batch=4, accumulation=1, **size)
    engine, *_ = bench.engine(work)
    take_steps(bench, engine, work, WARM_UP)
    taken = take_steps(bench, engine, work, 10)
    ratio = sum(t.step_s for t in taken.times) / taken.wall_s
    yield Row("clock: sum of 10 steps / wall", ratio, "", "0.95 .. 1.02", 0.95 <= ratio <= 1.02)
    for phase in ("data_s", "compute_s", "optimizer_s", "other_s"):
        share = sum(getattr(t, phase) for t in taken.times) / taken.wall_s
        yield Row(f"clock: share of {phase[:-2]}", share)
    bench.wait()
    clock = bench.clock()
    clock.start()
    with clock.phase("data"):
        time.sleep(0.05)
    late = clock.finish().times().data_s
    is_ok = 0.045 <= late <= 0.5
    yield Row("clock: data time of a batch 0.05 s late", late, "s", "0.045 .. 0.5", is_ok)


def host_syncs(bench: Bench) -> Iterator[Row]:
    """Count the host synchronisations of a step by the code that causes them."""
    steps = 4
    shape = bench.sized(dict(shape=TINY | {"num_hidden_layers": 8}), dict(shape=TINY))
    for stage in (1, 2, 3):
        for accumulation in (1, 2):
            work = Workload(
                precision="bf16", seq_len=64, micro_batch=2, accumulation=accumulation, **shape
            )
            engine, *_ = bench.engine(work, zero=stage)
            take_steps(bench, engine, work, WARM_UP)
            batches, targets = micro_batches(work, 0, "within"), count_targets(work, "within")
            clock = bench.clock()
            clock.start()
            with syncs.counted() as seen:
                for _ in range(steps):
                    moved = [to_device(batch, bench.me.device) for batch in batches]
                    engine.set_lr(1e-3)
                    engine.train_step(moved, targets, work.tokens, clock.phase)
                    clock.finish()
            name = f"zero={stage}, accumulation {accumulation}: host syncs per step"
            ours = seen.per_step(steps, "ours")
            yield Row(f"{name}, ours", ours, "", "0", ours == 0)
            yield Row(f"{name}, DeepSpeed's", seen.per_step(steps, "deepspeed"))
            if seen.places:
                yield Row(f"{name}, where", seen.describe(steps))


def zero_stages(bench: Bench) -> Iterator[Row]:
    """Compare ZeRO 1, 2 and 3 in bf16 on one device: losses, and memory against the formulas."""
    size = bench.sized(
        dict(shape=SHAPE_350M, seq_len=1024, micro_batch=8), dict(shape=TINY, seq_len=32)
    )
    work = Workload(precision="bf16", accumulation=2, **size)
    first: list[float] | None = None
    for stage in (1, 2, 3):
        before = allocated(bench)
        engine, resolved, recipe = bench.engine(work, zero=stage)
        taken = take_steps(bench, engine, work, WARM_UP + 5)
        first = first or taken.losses
        apart = max(abs(a - b) / b for a, b in zip(taken.losses, first, strict=True))
        name = f"zero={stage}, bf16"
        rule = "<= 0.005, norms finite"
        is_ok = apart <= 5e-3 and all(math.isfinite(norm) for norm in taken.norms)
        yield Row(f"{name}: loss against zero=1", apart, "relative", rule, is_ok)
        speed = work.tokens * 5 / sum(t.step_s for t in taken.times[WARM_UP:])
        yield Row(f"{name}: speed", speed, "tokens/s")
        yield from memory_rows(bench, name, before, resolved, recipe, work)
        del engine


def memory_rows(
    bench: Bench,
    name: str,
    before: float | None,
    resolved: Resolved,
    recipe: Recipe,
    work: Workload,
) -> Iterator[Row]:
    """Ratio of allocated memory to the formulas, after a step and at its peak."""
    config = resolved.engine
    per_parameter = state_bytes(
        config.stage,
        recipe.precision,
        config.grad_dtype,
        resolved.layout.accumulates,
        config.is_immediate,
        resolved.layout.data,
        config.is_offloaded,
    )
    state = sum(per_parameter.values()) * resolved.num_parameters
    kept = activation_bytes(work.shape_object, work.micro_batch, work.seq_len, recipe.precision)
    yield Row(f"{name}: state by formula", state / GIB, "GiB")
    yield Row(f"{name}: activations by formula", kept.total / GIB, "GiB")
    if before is None:
        yield Row(f"{name}: allocated / formula", None)
        return
    held = (torch.cuda.memory_allocated() - before) / state
    peak = (torch.cuda.max_memory_allocated() - before) / (state + kept.total)
    yield Row(f"{name}: held after a step / state", held, "", "0.6 .. 1.2", 0.6 <= held <= 1.2)
    yield Row(f"{name}: peak / (state + activations)", peak, "", "0.8 .. 1.3", 0.8 <= peak <= 1.3)


def utilisation(bench: Bench) -> Iterator[Row]:
    """Measure MFU of 1 billion parameters in bf16: recompute none and full, eager and compiled."""
    size = bench.sized(
        dict(shape=SHAPE_1B, seq_len=4096, micro_batch=4), dict(shape=TINY, seq_len=32)
    )
    work = Workload(precision="bf16", accumulation=1, document_tokens=1024, **size)
    peak = peak_flops(device_name(bench.me.device))
    began = time.perf_counter()
    engine, *_ = bench.engine(work)
    bench.wait()
    parameters = num_parameters(work.shape_object)
    yield Row(f"build of {parameters:,} parameters", time.perf_counter() - began, "s")
    flops = flops_per_token(work.shape_object, work.seq_len)
    for is_compiled in (False, True):
        if is_compiled:
            compile_blocks(engine.model.model.layers, "inductor" if bench.is_cuda else "eager")
        for recompute in ("none", "full"):
            engine.model.recompute = recompute
            allocated(bench)
            began = time.perf_counter()
            take_steps(bench, engine, work, WARM_UP)
            warm = time.perf_counter() - began
            times = take_steps(bench, engine, work, 6).times
            speed = work.tokens * 5 / sum(t.step_s for t in times[1:])
            name = f"recompute={recompute}, {'compiled' if is_compiled else 'eager'}"
            yield Row(f"{name}: speed", speed, "tokens/s")
            used = mfu(speed, flops, peak, 1)
            yield Row(f"{name}: MFU", used)
            yield Row(f"{name}: first {WARM_UP} steps", warm, "s")
            if bench.is_cuda:
                yield Row(f"{name}: peak", torch.cuda.max_memory_allocated() / GIB, "GiB")
