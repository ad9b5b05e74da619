"""Records what DeepSpeed does for each JSON on two ranks; run by test_engine.py.

    torchrun engine_worker.py OUT.json CORPUS

For each case: the optimizer class, the keys of the JSON that were read while the engine was built
and while it trained, each collective of one update with its bytes and whether it started before the
last backward ended, and how the weights change in steps that are poisoned, not finite on one rank,
or refused by the update gate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from parity_worker import full_weights, start_once, tiny_recipe

from data.stream.schedule import schedule_of
from data.stream.stream import Stream, open_stream
from model import loss as loss_module
from parallel import sharded_modules
from recipes.schema import Recipe
from runtime.ds_config.merge import load_preset
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.communication import Counter
from runtime.engine.engine import Engine, StepResult
from runtime.process import process
from runtime.resolve import Resolved, resolve

FILES = ("zero1", "zero2", "zero3", "zero3_offload", "pipeline")
BATCH = 8
SMALL_BUCKET = 4096  # elements: a fifth of the model, so that a step fills several


class Reads:
    """Names of the fields of DeepSpeed's typed blocks that are read."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        zero = "zero_optimization"
        for cls, block in (
            (DeepSpeedZeroConfig, zero),
            (DeepSpeedZeroLeafModuleConfig, f"{zero}.leaf_module"),
            (DeepSpeedZeroOffloadOptimizerConfig, f"{zero}.offload_optimizer"),
            (DeepSpeedZeroOffloadParamConfig, f"{zero}.offload_param"),
            (DeepSpeedBF16Config, "bf16"),
        ):
            names = {
                name: f"{block}.{field.alias or name}" for name, field in cls.model_fields.items()
            }
            cls.__getattribute__ = self._noting(cls.__getattribute__, names)

    def _noting(self, plain, names: dict[str, str]):
        def noting(config, name):
            if name in names:
                self.seen.add(names[name])
            return plain(config, name)

        return noting


def recipe_of(corpus: Path, name: str, accumulation: int, precision: str, **knobs) -> Recipe:
    """Tiny recipe with a file of ds_configs/ on a batch of BATCH sequences.

    The plain engine has no pipeline, so pipeline.json is taken without its pipeline block.
    """
    zero = name
    if name == "pipeline":
        content = load_preset(name).json
        zero = f"{corpus}-{process.launched_rank()}.json"
        Path(zero).write_text(json.dumps({k: v for k, v in content.items() if k != "pipeline"}))
    recipe = tiny_recipe(
        corpus,
        stage=zero,
        micro_batch=BATCH // (process.launched_world() * accumulation),
        precision=precision,
        **knobs,
    )
    return dataclasses.replace(recipe, batch_tokens=BATCH * recipe.seq_len)


def one_step(
    engine: Engine, stream: Stream, resolved: Resolved, step: int, targets=None, judge=None
):
    """Train update number `step`; `targets=0` makes every gradient inf or NaN."""
    me, layout = engine.process, resolved.layout
    data = stream.step(step, me.rank, layout.data, layout.micro_batch)
    batches = [to_device(batch, me.device) for batch in data.micro_batches]
    engine.set_lr(1e-2)
    count = data.num_targets if targets is None else targets
    return engine.train_step(batches, count, data.num_tokens, may_update=judge)


def run_case(recipe: Recipe, counter: Counter, reads: Reads) -> dict[str, Any]:
    reads.seen.clear()
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, process.launched_world(), schedule)
    me = start_once(recipe)
    stream = open_stream(recipe.data, recipe.seed, recipe.seq_len, schedule, Path("/"), 64)
    engine = build(recipe, resolved.layout, resolved.config, me)
    one_step(engine, stream, resolved, 1)
    counter.take()
    one_step(engine, stream, resolved, 2)
    collectives = [(c.function, c.bytes, c.in_backward) for c in counter.take()]
    before = full_weights(engine)
    poisoned = one_step(engine, stream, resolved, 3, targets=0)
    after = full_weights(engine)
    healed = one_step(engine, stream, resolved, 4)
    moved = full_weights(engine)
    return {
        "expected_class": resolved.engine.optimizer_class,
        "class": type(engine.ds.optimizer).__name__,
        "read": sorted(reads.seen),
        "parameters": resolved.num_parameters,
        "collectives": collectives,
        "poisoned": facts(poisoned),
        "healed": facts(healed),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "moved": not all(torch.equal(moved[name], after[name]) for name in after),
        "gate": gate_facts(engine, lambda step, judge: one_step(
            engine, stream, resolved, step, judge=judge
        )),
    }  # fmt: skip


def gate_facts(engine: Engine, take_step) -> dict[str, Any]:
    """Train three steps with an update gate: not finite on the last rank alone, refused, accepted.

    Returns what the gate of each rank was asked, whether its state was unchanged to the bit, and
    what it counted.
    """
    last = dist.get_world_size() - 1
    asked: list[tuple[float, float]] = []

    def answering(answer: bool):
        def judge(loss, norm):
            asked.append((loss, norm))
            return answer

        return judge

    seen = {}
    for number, (name, answer) in enumerate([("sick", True), ("refused", False), ("let", True)]):
        asked.clear()
        before = [fragment.tensor.clone() for fragment in engine.fragments()]
        counted = engine.optimizer_step()
        with losses_times(float("nan") if name == "sick" and dist.get_rank() == last else 1.0):
            result = take_step(5 + number, answering(answer))
        same = all(
            torch.equal(one, fragment.tensor)
            for one, fragment in zip(before, engine.fragments(), strict=True)
        )
        facts = (result.skipped, same, engine.optimizer_step() - counted, list(map(str, asked)))
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, facts)
        seen[name] = everyone
    return seen


@contextlib.contextmanager
def losses_times(factor: float):
    """Multiply every loss of this rank, and its gradient, by `factor`."""
    plain = loss_module.cross_entropy
    for module in (loss_module, sharded_modules):
        module.cross_entropy = lambda *given, **named: plain(*given, **named) * factor
    try:
        yield
    finally:
        for module in (loss_module, sharded_modules):
            module.cross_entropy = plain


def facts(result: StepResult) -> dict[str, Any]:
    return {
        "skipped": result.skipped,
        "finite_norm": bool(torch.isfinite(torch.as_tensor(float(result.grad_norm)))),
        "finite_loss": bool(torch.isfinite(result.loss)),
    }


def main(out: Path, corpus: Path) -> None:
    counter = Counter()
    reads = Reads()
    cases = {}
    for precision in ("fp32", "bf16"):
        for name in FILES:
            for accumulation in (1, 2):
                recipe = recipe_of(corpus, name, accumulation, precision)
                cases[f"{precision} {name} acc{accumulation}"] = run_case(recipe, counter, reads)
        for name in FILES[:3]:
            for overlap in (False, True):
                zero = {"reduce_bucket_size": SMALL_BUCKET, "overlap_comm": overlap}
                recipe = recipe_of(corpus, name, 1, precision, ds={"zero_optimization": zero})
                case = f"{precision} {name} buckets {'overlap' if overlap else 'plain'}"
                cases[case] = run_case(recipe, counter, reads)
    # Without a JSON of their own, for the keys that they read.
    for name, block in (("zero2", "offload_optimizer"), ("zero3", "offload_param")):
        zero = {block: {"device": "cpu", "pin_memory": False}}
        recipe = recipe_of(corpus, name, 1, "bf16", ds={"zero_optimization": zero})
        cases[f"bf16 {name} {block}"] = run_case(recipe, counter, reads)
    if process.launched_rank() == 0:
        out.write_text(json.dumps(cases))
    process.finish()
    process.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
