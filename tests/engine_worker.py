"""What DeepSpeed really does for each JSON, seen from two ranks; run by test_engine.py.

    torchrun engine_worker.py OUT.json CORPUS

Per case: the optimizer class, each collective of one update with its bytes and whether it started
before the last backward ended, and what a poisoned step does to the weights.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from parity_worker import full_weights, start_once, tiny_recipe

from data.schedule import read_schedule
from data.stream import Stream, open_stream
from recipes.schema import Recipe
from runtime import process
from runtime.batches import to_device
from runtime.communication import Counter
from runtime.engine import Engine, StepResult, build
from runtime.settle import Settled, settle

BATCH = 8
SMALL_BUCKET = 4096  # elements: a fifth of the model, so that a step fills several


def one_step(engine: Engine, stream: Stream, settled: Settled, step: int, targets=None):
    """Update number `step`; `targets=0` poisons it: every gradient becomes inf or NaN."""
    me, layout = engine.process, settled.layout
    data = stream.step(step, me.rank, layout.data, layout.micro_batch)
    batches = [to_device(batch, me.device) for batch in data.micro_batches]
    engine.set_lr(1e-2)
    count = data.num_targets if targets is None else targets
    return engine.train_step(batches, count, data.num_tokens)


def run_case(recipe: Recipe, counter: Counter) -> dict[str, Any]:
    schedule = read_schedule(recipe.batch_tokens, recipe.seq_len)
    settled = settle(recipe, process.launched_world(), schedule)
    me = start_once(recipe)
    stream = open_stream(recipe.data, recipe.seed, recipe.seq_len, schedule, Path("/"), 64)
    engine = build(recipe, settled.layout, settled.config, me)
    one_step(engine, stream, settled, 1)
    counter.take()
    one_step(engine, stream, settled, 2)
    collectives = [(c.function, c.bytes, c.in_backward) for c in counter.take()]
    before = full_weights(engine)
    poisoned = one_step(engine, stream, settled, 3, targets=0)
    after = full_weights(engine)
    healed = one_step(engine, stream, settled, 4)
    moved = full_weights(engine)
    return {
        "expected_class": settled.engine.optimizer_class,
        "class": type(engine.ds.optimizer).__name__,
        "parameters": settled.num_parameters,
        "collectives": collectives,
        "poisoned": facts(poisoned),
        "healed": facts(healed),
        "unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "moved": not all(torch.equal(moved[name], after[name]) for name in after),
    }


def facts(result: StepResult) -> dict[str, Any]:
    return {
        "skipped": result.skipped,
        "finite_norm": bool(torch.isfinite(torch.as_tensor(float(result.grad_norm)))),
        "finite_loss": bool(torch.isfinite(result.loss)),
    }


def main(out: Path, corpus: Path) -> None:
    counter = Counter()
    cases = {}
    for precision in ("fp32", "bf16"):
        for stage in (1, 2, 3):
            for accumulation in (1, 2):
                micro_batch = BATCH // (process.launched_world() * accumulation)
                recipe = tiny_recipe(
                    corpus, stage=stage, micro_batch=micro_batch, precision=precision
                )
                recipe = dataclasses.replace(recipe, batch_tokens=BATCH * recipe.seq_len)
                name = f"{precision} zero{stage} acc{accumulation}"
                cases[name] = run_case(recipe, counter)
        for stage in (1, 2, 3):
            recipe = tiny_recipe(corpus, stage=stage, micro_batch=4, precision=precision)
            for overlap in (False, True):
                zero = {"reduce_bucket_size": SMALL_BUCKET, "overlap_comm": overlap}
                recipe = dataclasses.replace(
                    recipe, batch_tokens=BATCH * recipe.seq_len, ds={"zero_optimization": zero}
                )
                name = f"{precision} zero{stage} buckets {'overlap' if overlap else 'plain'}"
                cases[name] = run_case(recipe, counter)
    if process.launched_rank() == 0:
        out.write_text(json.dumps(cases))
    process.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
