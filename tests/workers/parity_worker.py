"""Trains the same tiny recipe under many layouts in one launch; run by test_parity.py on N ranks.

    torchrun parity_worker.py OUT.json CORPUS PRECISION

Writes for each case: losses, norms, batch hashes, the optimizer class, hashes of the initial
weights, the bytes of allocated state, and the norm of one clipped SGD update.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch

from data.stream.ledger import batch_hash, in_batch_order
from data.stream.schedule import schedule_of
from data.stream.stream import Stream, open_stream
from parallel.layout import Coordinates
from recipes.schema import Data, Model, Optim, Recipe, Source
from runtime.engine.batches import gather_hashes, to_device
from runtime.engine.build_engine import build
from runtime.engine.engine import Engine
from runtime.engine.learning_rate import learning_rate
from runtime.process import process
from runtime.resolve import Resolved, resolve

STEPS = 10
BATCH = 16  # sequences
SEQ_LEN = 32
STAGES = (1, 2, 3)
PERSIST_NOTHING = {"stage3_param_persistence_threshold": 0}
ACCUMULATIONS = (1, 4)
# Knobs that must not change a number, tried on two ranks: (name, stage, accumulation, knobs).
VARIANTS = (
    *(
        (f"bucket {size}", stage, 1, {"ds": {"zero_optimization": {"reduce_bucket_size": size}}})
        for stage in (1, 2)
        for size in (1, 1000, 500_000_000)
    ),
    ("recompute", 1, 4, {"recompute": "full"}),
    ("recompute", 3, 4, {"recompute": "full"}),
    ("nothing gathered", 3, 1, {"ds": {"zero_optimization": PERSIST_NOTHING}}),
)


def tiny_recipe(corpus: Path, *, stage: int, micro_batch: int, precision: str, **knobs) -> Recipe:
    """Recipe of two layers on short documents, so that masks differ between ranks."""
    model = Model(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    values: dict[str, Any] = dict(
        run="parity",
        seed=7,
        model=model,
        data=Data(sources={"a": Source(corpus=str(corpus))}),
        optim=Optim(lr=1e-2, clip=0.2),
        seq_len=SEQ_LEN,
        batch_tokens=BATCH * SEQ_LEN,
        micro_batch=micro_batch,
        steps=STEPS,
        warmup=2,
        precision=precision,
        zero=stage,
    )
    return Recipe(**(values | knobs))


def train(
    engine: Engine, stream: Stream, recipe: Recipe, resolved: Resolved, steps: int, first: int = 1
) -> dict:
    """Train updates `first` to `steps`; returns losses, norms and batch hashes."""
    layout, me = resolved.layout, engine.process
    data_rank = layout.coordinates(me.rank).data
    seen: dict[str, list] = {"loss": [], "norm": [], "hash": []}
    for step in range(first, steps + 1):
        data = stream.step(step, data_rank, layout.data, layout.micro_batch)
        engine.set_lr(
            learning_rate(step, recipe.optim, resolved.warmup_steps, resolved.total_steps)
        )
        batches = [to_device(batch, me.device) for batch in data.micro_batches]
        result = engine.train_step(batches, data.num_targets, data.num_tokens)
        own = np.concatenate([batch.sample_hashes for batch in data.micro_batches])
        first = [layout.rank(Coordinates(0, data, 0, 0)) for data in range(layout.data)]
        everyone = gather_hashes(own, me.device)[first]
        shape = (len(everyone), len(data.micro_batches), -1)
        seen["loss"].append(float(result.loss))
        seen["norm"].append(float(result.grad_norm))
        seen["hash"].append(batch_hash(in_batch_order(everyone.reshape(shape))))
    return seen


def full_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Copies of all parameters, gathered under ZeRO-3. A collective call."""
    weights = {}
    for name, parameter in engine.model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=engine.layout.stage == 3):
            weights[name] = parameter.detach().float().clone()
    return weights


def digest(weights: dict[str, torch.Tensor]) -> str:
    """SHA-256 over all weights in name order."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(weights[name].numpy().tobytes())
    return total.hexdigest()


def main(out: Path, corpus: Path, precision: str) -> None:
    world = process.launched_world()
    cases = {}
    for stage in STAGES:
        for accumulation in ACCUMULATIONS:
            if BATCH % (world * accumulation):
                continue
            micro_batch = BATCH // (world * accumulation)
            recipe = tiny_recipe(corpus, stage=stage, micro_batch=micro_batch, precision=precision)
            cases[f"zero{stage} acc{accumulation}"] = run_case(recipe, world)
    for name, stage, accumulation, knobs in VARIANTS if world == 2 else ():
        micro_batch = BATCH // (world * accumulation)
        recipe = tiny_recipe(
            corpus, stage=stage, micro_batch=micro_batch, precision=precision, **knobs
        )
        cases[f"zero{stage} acc{accumulation} {name}"] = run_case(recipe, world)
    if process.launched_rank() == 0:
        out.write_text(json.dumps(cases))
    process.finish()
    process.leave(0)


def run_case(recipe: Recipe, world: int) -> dict:
    """Train one case, then one SGD step with rate 1 whose update has the norm of the clip."""
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, world, schedule)
    me = start_once(recipe)
    stream = open_stream(recipe.data, recipe.seed, SEQ_LEN, schedule, Path("/"), 64)
    engine = build(recipe, resolved.layout, resolved.config, me)
    initial = digest(full_weights(engine))
    seen = train(engine, stream, recipe, resolved, STEPS)
    return seen | {
        "initial": initial,
        "optimizer": type(engine.ds.optimizer).__name__,
        "update_norm": sgd_update_norm(recipe, world, stream),
    }


def sgd_update_norm(recipe: Recipe, world: int, stream: Stream) -> float:
    """Norm of the change of the weights in one SGD step with rate 1 and clip 0.1."""
    import dataclasses

    optim = Optim(name="sgd", lr=1.0, clip=0.1, weight_decay=0.0, schedule="constant")
    recipe = dataclasses.replace(recipe, optim=optim, warmup=0)
    resolved = resolve(recipe, world, stream.schedule)
    engine = build(recipe, resolved.layout, resolved.config, start_once(recipe))
    before = full_weights(engine)
    train(engine, stream, recipe, resolved, 1)
    after = full_weights(engine)
    return float(sum((after[name] - before[name]).double().square().sum() for name in after).sqrt())


_STARTED: list[process.Process] = []


def start_once(recipe: Recipe) -> process.Process:
    """Join the process group of this launch; its engines are built one after the other."""
    if not _STARTED:
        _STARTED.append(process.start(recipe.cluster))
    return _STARTED[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
