"""Rows, shapes, device and training steps that the checks of benchmarks.gpu share.

Rule: every check also runs on a CPU in tiny shapes, where values that only a GPU has are None, so
that everything except the numbers is tested without a GPU. Units: seconds, bytes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.workload import Workload, count_targets, micro_batches, recipe_of, resolved_of
from recipes.schema import Cluster, Recipe
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.engine import Engine
from runtime.monitor.clock import StepClock, StepTimes, cuda_clock
from runtime.process import process
from runtime.resolve import Resolved

TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# 0.35 billion parameters: 6 GB of state are large beside buckets of 100 MB, and three builds fit
# into the time limit.
SHAPE_350M = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=True,
)
# Shape of Llama 3.2 1B, as in recipe 1b.
SHAPE_1B = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
WARM_UP = 3  # steps; the first ones allocate memory and choose kernels


@dataclass(frozen=True)
class Row:
    """One line of the table. `rule` is the bound as text; `is_ok` is None where there is none."""

    name: str
    value: float | str | None
    unit: str = ""
    rule: str = ""
    is_ok: bool | None = None


@dataclass(frozen=True)
class Bench:
    """Device of the checks, and the engines that are built on it."""

    device_type: str  # cuda, or cpu for a dry run in tiny shapes

    @cached_property
    def me(self) -> process.Process:
        """Process group of this one rank, joined once."""
        return process.start(self.cluster)

    @property
    def cluster(self) -> Cluster:
        """Device on which engines are built; a dry run uses one thread, to leave cores free."""
        return Cluster(device=self.device_type, threads=None if self.is_cuda else 1)

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def clock(self) -> StepClock:
        return cuda_clock() if self.is_cuda else StepClock()

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def sized(self, cuda: dict[str, Any], dry: dict[str, Any]) -> dict[str, Any]:
        """Choose the values for this device."""
        return cuda if self.is_cuda else dry

    def engine(self, work: Workload, **knobs: Any) -> tuple[Engine, Resolved, Recipe]:
        """Build this project's engine for a workload."""
        recipe = recipe_of(work, cluster=self.cluster, **knobs)
        resolved = resolved_of(recipe, 1)
        return build(recipe, resolved.layout, resolved.config, self.me), resolved, recipe


@dataclass(frozen=True)
class Taken:
    """Results of some steps; `wall_s` is the time of all of them until the device had finished."""

    losses: list[float]
    norms: list[float]
    times: list[StepTimes]
    wall_s: float


def take_steps(bench: Bench, engine: Engine, work: Workload, steps: int) -> Taken:
    """Train like pretrain.py; device values and times are read after the last step."""
    batches = micro_batches(work, 0, "within")
    targets = count_targets(work, "within")
    clock, results, spans = bench.clock(), [], []
    bench.wait()
    began = time.perf_counter()
    clock.start()
    for _ in range(steps):
        with clock.phase("data"):
            moved = [to_device(batch, engine.process.device) for batch in batches]
        results.append(engine.train_step(moved, targets, work.tokens, clock.phase))
        spans.append(clock.finish())
    bench.wait()
    return Taken(
        wall_s=time.perf_counter() - began,
        losses=[float(result.loss) for result in results],
        norms=[float(result.grad_norm) for result in results],
        times=[span.times() for span in spans],
    )


def allocated(bench: Bench) -> float | None:
    """Bytes that are allocated now; the peak is reset to them. None on a CPU."""
    if not bench.is_cuda:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def timed(bench: Bench, action: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of one call, after three calls that are not counted."""
    for _ in range(WARM_UP):
        action()
    bench.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    bench.wait()
    return (time.perf_counter() - began) / repeats
