"""What the checks of benchmarks.gpu share: rows, shapes, the device, and steps as a run takes them.

The one rule: a check runs whole on a CPU too, in tiny shapes, where what only a GPU has is reported
as None; so everything but the numbers is tested without one. Units: seconds, bytes.
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
# A third of a billion: state of 6 GB dwarfs buckets of 100 MB, and three builds fit the budget.
SHAPE_350M = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=True,
)
# Llama 3.2 1B, the shape of recipe 1b.
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
WARM_UP = 3  # first steps allocate and choose kernels


@dataclass(frozen=True)
class Row:
    """One line of the table. `is_ok` is None where there is no bound, `rule` says the bound."""

    name: str
    value: float | str | None
    unit: str = ""
    rule: str = ""
    is_ok: bool | None = None


@dataclass(frozen=True)
class Bench:
    """Where the checks run."""

    device_type: str  # cuda, or cpu = dry run in tiny shapes

    @cached_property
    def me(self) -> process.Process:
        """The process group, joined once."""
        return process.start(self.cluster)

    @property
    def cluster(self) -> Cluster:
        """Where engines are built; a dry run shares its machine with others: one thread."""
        return Cluster(device=self.device_type, threads=None if self.is_cuda else 1)

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def clock(self) -> StepClock:
        return cuda_clock() if self.is_cuda else StepClock()

    def wait(self) -> None:
        """Until the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def sized(self, cuda: dict[str, Any], dry: dict[str, Any]) -> dict[str, Any]:
        """The values for this device."""
        return cuda if self.is_cuda else dry

    def engine(self, work: Workload, **knobs: Any) -> tuple[Engine, Resolved, Recipe]:
        """This project's engine for a workload."""
        recipe = recipe_of(work, cluster=self.cluster, **knobs)
        resolved = resolved_of(recipe, 1)
        return build(recipe, resolved.layout, resolved.config, self.me), resolved, recipe


@dataclass(frozen=True)
class Taken:
    """What some steps gave; `wall_s` is the time of all of them until the device was done."""

    losses: list[float]
    norms: list[float]
    times: list[StepTimes]
    wall_s: float


def take_steps(bench: Bench, engine: Engine, work: Workload, steps: int) -> Taken:
    """Train as pretrain.py does; device values and times are read after the last step."""
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
    """Bytes allocated now, the peak reset to them; None on a CPU."""
    if not bench.is_cuda:
        return None
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def timed(bench: Bench, action: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of one call, after three that do not count."""
    for _ in range(WARM_UP):
        action()
    bench.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    bench.wait()
    return (time.perf_counter() - began) / repeats
