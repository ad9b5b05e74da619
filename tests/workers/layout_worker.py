"""Trains one recipe under several layouts of the same number of ranks; run by test_tensor.py and
benchmarks/matrix.py.

    torchrun layout_worker.py OUT.json CORPUS "NAME;NAME;..."         names as in layout_cases.py

For each case: losses, norms, batch hashes, the held-out loss, the norm of a clipped SGD update, the
replicas that differ, and the bytes held.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from autograd_bytes import AutogradBytes
from layout_cases import Case, parse
from parity_worker import BATCH, SEQ_LEN, STEPS, full_weights, start_once, tiny_recipe, train

from checkpoint.comm import RankComm
from checkpoint.save.replicas import differing, summary
from commands import show
from commands.dryrun import activations
from data.stream.schedule import schedule_of
from data.stream.stream import Stream, open_stream
from recipes.schema import Optim, Parallel, Recipe
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.engine import Engine, mean_loss
from runtime.process import process
from runtime.resolve import resolve

RANKS = functools.cache(RankComm)  # one group for all cases
EVAL_TOKENS = 16 * SEQ_LEN
WORDS = 65  # one more than the corpus uses: no even number of ranks divides it
LAYERS = 4  # as many as the most pipeline stages
WARMUP = ((0, SEQ_LEN // 4), (3, SEQ_LEN // 2), (6, SEQ_LEN))


def recipe_of(case: Case, corpus: Path, **knobs: Any) -> Recipe:
    """Recipe of a case."""
    axes = Parallel(
        tensor=case.tensor, pipeline=case.pipeline, context=case.context, sequence=case.sequence
    )
    recipe = tiny_recipe(
        corpus,
        stage=case.stage,
        micro_batch=BATCH // (case.data * case.accumulation),
        precision=case.precision,
        parallel=axes,
        recompute=case.recompute,
        seq_len_warmup=WARMUP if case.tied else None,
        **knobs,
    )
    model = dataclasses.replace(
        recipe.model,
        vocab_size=WORDS,
        num_hidden_layers=LAYERS,
        tie_word_embeddings=case.tied,
        qk_norm=not case.tied,
        qkv_bias=case.tied,
    )
    # A rate at which rounding does not grow: Adam turns noise in tiny gradients into whole steps.
    optim = dataclasses.replace(recipe.optim, lr=3e-3)
    return dataclasses.replace(recipe, model=model, optim=optim)


def engine_of(recipe: Recipe) -> tuple[Engine, Stream, Any]:
    """Build an engine in this launch's process group; returns it with its stream and Resolved."""
    schedule = schedule_of(recipe)
    resolved = resolve(recipe, process.launched_world(), schedule)
    me = start_once(recipe)
    stream = open_stream(recipe.data, recipe.seed, SEQ_LEN, schedule, Path("/"), WORDS)
    return build(recipe, resolved.layout, resolved.config, me), stream, resolved


def run_case(case: Case, corpus: Path) -> dict:
    recipe = recipe_of(case, corpus)
    engine, stream, resolved = engine_of(recipe)
    seen = train(engine, stream, recipe, resolved, STEPS)
    layout, device = resolved.layout, engine.process.device
    held_out = stream.evaluation(
        engine.mesh.place.data, layout.data, layout.micro_batch, EVAL_TOKENS
    )
    batches = (to_device(batch, device) for batch in held_out.batches)
    seen["eval"] = float(mean_loss(engine.evaluate(batches, held_out.sources)))
    seen["replicas"] = replicas_differ(engine)
    seen["drifted"] = differing(RANKS().exchange(summary(engine.replicas()), "replicas"))
    seen["memory"] = memory(engine, stream, recipe, resolved)
    return seen | {"update_norm": sgd_update_norm(recipe)}


def memory(engine: Engine, stream: Stream, recipe: Recipe, resolved: Any) -> list[dict]:
    """Bytes of each rank, counted in one more step: kept by autograd, master weights and moments.

    Also returns the bytes that the dry run and `make show` predict.
    """
    with AutogradBytes(engine.model, recipe.seq_len) as kept:
        train(engine, stream, recipe, resolved, STEPS, first=STEPS)
    states = {}
    for master, moments in engine.ds.optimizer.optimizer.state.items():
        for tensor in (master, *moments.values()):
            if torch.is_tensor(tensor) and tensor.numel() > 1:
                states[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    shown = show.state(recipe, resolved)["gib"]
    mine = {
        "kept": kept.most,
        **activations(recipe, resolved.layout, engine.mesh.place),
        "optimizer": sum(states.values()),
        "shown": (shown["master"] + shown["moments"]) * 2**30,
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def own_weights(engine: Engine) -> dict[str, torch.Tensor]:
    """Weights that this rank saves: shards, and replicas on the first tensor rank."""
    place, named = engine.mesh.place, dict(engine.model.named_parameters())
    if place.data or place.context:
        full_weights(engine)  # a collective under ZeRO-3
        return {}
    return {
        name: weight
        for name, weight in full_weights(engine).items()
        if (place.tensor == 0 or getattr(named[name], "tensor_model_parallel", False))
        and not getattr(named[name], "is_copy", False)
    }


def sgd_update_norm(recipe: Recipe) -> float:
    """Norm of the full model's change in one SGD step with rate 1 and clip 0.1."""
    optim = Optim(name="sgd", lr=1.0, clip=0.1, weight_decay=0.0, schedule="constant")
    recipe = dataclasses.replace(recipe, optim=optim, warmup=0)
    engine, stream, resolved = engine_of(recipe)
    before = own_weights(engine)
    train(engine, stream, recipe, resolved, 1)
    after = own_weights(engine)
    changes = [(after[name] - before[name]).double().square().sum() for name in after]
    total = torch.stack([torch.zeros((), dtype=torch.float64), *changes]).sum()
    dist.all_reduce(total)
    return float(total.sqrt())


def replicas_differ(engine: Engine) -> list[str]:
    """Names of replicated weights that differ in a bit within the tensor group."""
    axis = engine.mesh.tensor
    if axis.size == 1:
        return []
    named = dict(engine.model.named_parameters())
    differ = []
    for name, weight in full_weights(engine).items():
        if getattr(named[name], "tensor_model_parallel", False):
            continue
        copies = [torch.empty_like(weight) for _ in range(axis.size)]
        dist.all_gather(copies, weight, group=axis.group)
        if not all(torch.equal(copy, weight) for copy in copies):
            differ.append(name)
    return differ


def main(out: Path, corpus: Path, names: str) -> None:
    cases = {}
    for name in names.split(";"):
        cases[name] = run_case(parse(name), corpus)
        if process.launched_rank() == 0:
            out.write_text(json.dumps(cases))  # each time: what was seen survives a later failure
    process.finish()
    process.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
