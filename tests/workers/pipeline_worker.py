"""Trains tiny recipes as pipelines on four ranks in one launch; run by test_pipeline.py.

    torchrun pipeline_worker.py OUT.json CORPUS

Writes the results of rank 0 for each case. Then one rank raises in the middle of a step, and the
launch must still end.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from engine_worker import gate_facts
from parity_worker import SEQ_LEN, start_once, tiny_recipe
from patience import patience

from base.errors import UserError
from data.stream.schedule import schedule_of
from data.stream.stream import Stream, open_stream
from parallel.communication_volume import pipeline_bytes
from recipes.schema import Parallel, Recipe
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.engine import Engine, mean_loss
from runtime.engine.learning_rate import learning_rate
from runtime.process import process
from runtime.resolve import Resolved, resolve

STEPS, EVAL_TOKENS = 6, 12 * SEQ_LEN
RAMP = ((0, 8 * SEQ_LEN), (3, 16 * SEQ_LEN))
WARMUP = ((0, SEQ_LEN // 4), (2, SEQ_LEN // 2), (4, SEQ_LEN))
# name: (blocks, tied, axes, knobs)
CASES: dict[str, tuple[int, bool, dict, dict]] = {
    "2 stages x 2 data, tied, the batch grows": (
        3, True, {"pipeline": 2}, {"batch_tokens": RAMP, "micro_batch": 2, "recompute": "every-2"},
    ),
    "4 stages, one micro-batch": (
        6, False, {"pipeline": 4, "bounds": (1, 3, 5)}, {"micro_batch": 8, "recompute": "full"},
    ),
    "2 stages x 2 tensor, tied, sequences grow": (
        2, True, {"pipeline": 2, "tensor": 2}, {"micro_batch": 2, "seq_len_warmup": WARMUP},
    ),
    "2 stages x 2 tensor, whole sequences": (
        2, False, {"pipeline": 2, "tensor": 2, "sequence": False}, {"micro_batch": 4},
    ),
    "4 stages, tied, bf16": (4, True, {"pipeline": 4}, {"micro_batch": 1, "precision": "bf16"}),
}  # fmt: skip
SLEEP_S = 0.1 * patience()  # long beside what a busy machine adds to each message


def recipe_of(name: str, corpus: Path) -> Recipe:
    """Recipe of a case."""
    blocks, tied, axes, knobs = CASES[name]
    values = {"precision": "fp32", "batch_tokens": 8 * SEQ_LEN, "steps": STEPS} | knobs
    recipe = tiny_recipe(corpus, stage=1, parallel=Parallel(**axes), **values)
    model = dataclasses.replace(
        recipe.model, num_hidden_layers=blocks, tie_word_embeddings=tied, qk_norm=not tied
    )
    return dataclasses.replace(recipe, model=model)


class Run:
    """One engine and its data."""

    def __init__(self, recipe: Recipe):
        self.recipe = recipe
        schedule = schedule_of(recipe)
        self.resolved: Resolved = resolve(recipe, process.launched_world(), schedule)
        self.me = start_once(recipe)
        self.stream: Stream = open_stream(
            recipe.data, recipe.seed, recipe.seq_len, schedule, Path("/"), recipe.model.vocab_size
        )
        self.engine: Engine = build(recipe, self.resolved.layout, self.resolved.config, self.me)
        self.data_rank = self.engine.mesh.place.data

    def batches(self, step: int) -> tuple[Any, list[dict[str, Any]]]:
        layout = self.resolved.layout
        data = self.stream.step(step, self.data_rank, layout.data, layout.micro_batch)
        return data, [to_device(batch, self.me.device) for batch in data.micro_batches]

    def step(self, step: int, targets: int | None = None, judge=None):
        """Train update number `step`; `targets=0` makes every gradient inf or NaN."""
        resolved = self.resolved
        rate = learning_rate(step, self.recipe.optim, resolved.warmup_steps, resolved.total_steps)
        self.engine.set_lr(rate)
        data, micro_batches = self.batches(step)
        count = data.num_targets if targets is None else targets
        return self.engine.train_step(micro_batches, count, data.num_tokens, may_update=judge)

    def evaluate(self) -> float:
        """Held-out loss, in micro-batches of another size and number than in training."""
        rows = 3 if self.resolved.layout.data == 1 else 2
        held_out = self.stream.evaluation(
            self.data_rank, self.resolved.layout.data, rows, EVAL_TOKENS
        )
        batches = (to_device(batch, self.me.device) for batch in held_out.batches)
        return float(mean_loss(self.engine.evaluate(batches, held_out.sources)))


def everyone(value: Any) -> list[Any]:
    """Gather the values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_case(recipe: Recipe, sent: list[int]) -> dict[str, Any]:
    """Train, evaluate in the middle, poison one step; returns the results of the ranks."""
    run = Run(recipe)
    stage, layout = run.engine.model, run.resolved.layout
    names = {
        name: tuple(parameter.shard.full if layout.tensor > 1 else parameter.shape)
        for name, parameter in stage.named_parameters()
        if not hasattr(parameter, "is_copy")
    }
    seen: dict[str, Any] = {"loss": [], "norm": []}
    for step in range(1, STEPS + 1):
        sent.clear()
        result = run.step(step)
        seen["loss"].append(float(result.loss))
        seen["norm"].append(float(result.grad_norm))
    count = dict(layout.accumulation)[max(dict(layout.accumulation))]
    # The first stage sends hidden states, the last one their gradients, the others both.
    is_end = run.engine.mesh.pipeline.index in (0, layout.pipeline - 1)
    seen["sent"] = everyone((sum(sent), pipeline_bytes(recipe, layout, count) * (2 - is_end)))
    seen["eval"] = run.evaluate()
    before = {name: p.detach().clone() for name, p in stage.named_parameters()}
    poisoned = run.step(STEPS, targets=0)
    is_same = all(torch.equal(before[name], p) for name, p in stage.named_parameters())
    healed = run.step(STEPS)
    seen["poisoned"] = everyone((poisoned.skipped, is_same, healed.skipped))
    seen["gate"] = gate_facts(run.engine, lambda step, judge: run.step(STEPS, judge=judge))
    seen["results"] = everyone((float(healed.loss), float(healed.grad_norm)))
    seen["names"] = everyone(names)
    embeddings = [p for name, p in stage.named_parameters() if "embed_tokens" in name]
    seen["copies"] = everyone([p.detach().float().tolist() for p in embeddings])
    seen["class"] = type(run.engine.ds.optimizer).__name__
    return seen


class Sleep(torch.autograd.Function):
    """A block that sleeps SLEEP_S in forward and twice as long in backward."""

    @staticmethod
    def forward(ctx, hidden):
        time.sleep(SLEEP_S)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * SLEEP_S)
        return grad


def bubble(recipe: Recipe) -> dict[str, float]:
    """Share of a step in which a stage with such blocks is idle."""
    run = Run(recipe)
    for block in run.engine.model.blocks:
        block.forward = lambda hidden, attend: Sleep.apply(hidden) + 0 * attend.cos.sum()
    run.step(1)
    took = []
    for step in (2, 3):
        data, micro_batches = run.batches(step)
        dist.barrier()
        begin = time.perf_counter()
        run.engine.train_step(micro_batches, data.num_targets, data.num_tokens)
        took.append(time.perf_counter() - begin)
    count, stages = len(micro_batches), run.resolved.layout.pipeline
    return {
        "measured": 1 - 3 * SLEEP_S * count / min(took),
        "formula": (stages - 1) / (count + stages - 1),
    }


def refusals(corpus: Path) -> dict[str, Any]:
    """Settings that must end in one message on every rank instead of a wait."""
    from runtime.engine.pipeline_engine import refuse_unequal_groups

    run = Run(recipe_of("4 stages, one micro-batch", corpus))
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.1}]
    if run.engine.mesh.pipeline.index < 3:  # the last stage has matrices only
        groups += [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups)
    return {
        "groups": everyone(_message(lambda: refuse_unequal_groups(optimizer, run.engine.mesh))),
    }


def _message(action) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no refusal"


def count_sends(sent: list[int]) -> None:
    """Append the bytes of every tensor that is sent from rank to rank."""
    send = dist.send

    def counted(tensor, *arguments, **keywords):
        sent.append(tensor.numel() * tensor.element_size())
        return send(tensor, *arguments, **keywords)

    dist.send = counted


def main(out: Path, corpus: Path) -> None:
    sent: list[int] = []
    count_sends(sent)
    seen: dict[str, Any] = {
        "cases": {name: run_case(recipe_of(name, corpus), sent) for name in CASES},
        "refusals": refusals(corpus),
        "bubbles": {},
    }
    for stages in (2, 4):
        knobs = {"micro_batch": 1, "batch_tokens": 16 // stages * SEQ_LEN, "precision": "fp32"}
        axes = Parallel(pipeline=stages)
        recipe = tiny_recipe(corpus, stage=1, parallel=axes, **knobs)
        model = dataclasses.replace(recipe.model, num_hidden_layers=stages)
        seen["bubbles"][stages] = bubble(dataclasses.replace(recipe, model=model))
    if process.launched_rank() == 0:
        out.write_text(json.dumps(seen))
    run = Run(recipe_of("4 stages, one micro-batch", corpus))
    dist.barrier()
    if run.me.rank == 2:
        raise RuntimeError("rank 2 gives up")
    run.step(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
