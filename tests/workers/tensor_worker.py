"""Measures communication and memory of two tensor ranks, and compares with the full model.

    torchrun tensor_worker.py OUT.json CORPUS

Run by test_tensor.py. At the end one rank raises in the middle of a step, and the launch must still
end.
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
from layout_cases import Case
from layout_worker import engine_of, recipe_of, replicas_differ
from parity_worker import PERSIST_NOTHING, full_weights, start_once
from torch.utils._python_dispatch import TorchDispatchMode

from base.errors import UserError
from data.stream.stream import Stream
from model.decoder import Decoder, compile_blocks
from model.init import fill, initial_weight
from parallel import tensor
from parallel.communication_volume import (
    ALL_REDUCE,
    EXCHANGE,
    GATHER,
    SCATTER,
    context_bytes,
    gathers,
    tensor_bytes,
)
from parallel.layout import most_parameters, parameters_of
from parallel.mesh import make_mesh
from recipes.schema import Recipe
from runtime.engine.batches import to_device
from runtime.engine.communication import FUNCTIONAL, Counter, bytes_by_kind
from runtime.engine.engine import Engine, decoder_config
from runtime.process import process
from runtime.resolve import Resolved, resolve

NAMES = {
    "all_reduce": ALL_REDUCE,
    "all_gather": GATHER,
    "reduce_scatter": SCATTER,
    "all_to_all": EXCHANGE,
}
COUNTED = [
    Case(tensor=2, sequence=True),
    Case(tensor=2, sequence=False, accumulation=4),
    Case(tensor=2, sequence=True, recompute="full", accumulation=4, tied=True, stage=3),
    Case(tensor=2, sequence=False, recompute="full"),
    Case(tensor=2, sequence=True, recompute="every-3", precision="bf16"),
    Case(context=2, accumulation=4),
    Case(context=2, recompute="full", stage=2),
]
LONG = 100


class Order(TorchDispatchMode):
    """Records the names of operators in the order in which they run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.name().partition(".")[0])
        return function(*arguments, **(keywords or {}))


def one_step(engine: Engine, stream: Stream, resolved: Resolved, step: int):
    """Train update number `step`."""
    layout, me = resolved.layout, engine.process
    data = stream.step(step, engine.mesh.place.data, layout.data, layout.micro_batch)
    batches = [to_device(batch, me.device) for batch in data.micro_batches]
    engine.set_lr(1e-3)
    return engine.train_step(batches, data.num_targets, data.num_tokens)


def counts(case: Case, corpus: Path, counter: Counter) -> dict:
    """Bytes that one step sends and parameters that are held, beside those of the formulas."""
    recipe = recipe_of(case, corpus)
    engine, stream, resolved = engine_of(recipe)
    is_initial = has_initial_weights(engine, recipe)
    one_step(engine, stream, resolved, 1)
    counter.take()
    one_step(engine, stream, resolved, 2)
    said = [call for call in counter.take() if call.function.startswith(FUNCTIONAL)]
    heard = {NAMES[kind]: size for kind, size in bytes_by_kind(said).items()}
    layout = resolved.layout
    foretold = tensor_bytes(recipe, layout, case.accumulation)
    foretold += context_bytes(recipe, layout, case.accumulation)
    held = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
    return {
        "heard": heard,
        "foretold": dict(foretold),
        "is_initial": is_initial,
        "held": held,
        "parameters": parameters_of(recipe.model, layout, engine.mesh.place),
        "most": most_parameters(recipe.model, layout),
    }


def has_initial_weights(engine: Engine, recipe: Recipe) -> bool:
    """True where every weight is its shard of the full initial weight, to the bit."""
    named, config = dict(engine.model.named_parameters()), decoder_config(recipe)
    dtype = next(iter(named.values())).dtype
    return all(
        torch.equal(
            weight,
            part(
                initial_weight(name, named[name].shard.full, recipe.seed, config).to(dtype),
                named[name],
                weight.shape,
            ).float(),
        )
        for name, weight in full_weights(engine).items()
    )


def whole_and_cut(case: Case, corpus: Path, compiled: bool) -> float:
    """Largest difference of loss and gradients between the sharded and the full decoder."""
    recipe = recipe_of(case, corpus)
    config = decoder_config(recipe)
    layout = resolve_layout(recipe)
    mesh = make_mesh(layout, dist.get_rank())
    whole, sharded = Decoder(config), Decoder(tensor.local_config(config, mesh.tensor))
    tensor.apply(sharded, mesh, config, case.sequence)
    fill(whole, 3)
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            drawn = initial_weight(name, parameter.shard.full, 3, config)
            parameter.copy_(part(drawn, parameter, parameter.shape))
    if compiled:
        compile_blocks(sharded.model.layers, backend="aot_eager")
    torch.manual_seed(1)
    words = torch.randint(0, config.vocab_size, (2, recipe.seq_len))
    segments = torch.zeros(2, recipe.seq_len, dtype=torch.int32)
    segments[0, 5:], segments[1, 17:] = 1, 1
    labels = words.roll(-1, 1)
    labels[:, ::3] = -100
    labels[0, 1] = config.vocab_size - 1  # the last row of the last rank
    losses = [
        m(words, segments, labels=labels, num_items_in_batch=40).loss for m in (whole, sharded)
    ]
    for loss in losses:
        loss.backward()
    worst = abs(losses[0].item() - losses[1].item())
    gradients = {name: p.grad for name, p in whole.named_parameters()}
    for name, parameter in sharded.named_parameters():
        difference = part(gradients[name], parameter, parameter.shape) - parameter.grad
        worst = max(worst, float(difference.abs().max()))
    return worst


def resolve_layout(recipe):
    from data.stream.schedule import schedule_of

    schedule = schedule_of(recipe)
    return resolve(recipe, dist.get_world_size(), schedule).layout


def part(full: torch.Tensor, parameter: torch.nn.Parameter, shape) -> torch.Tensor:
    """Shard of a full tensor on this rank, of `shape`."""
    shard = parameter.shard
    if shard.dim is None:
        return full
    return full.narrow(shard.dim, shard.offset, shape[shard.dim])


def overlap(corpus: Path) -> list[str]:
    """Operators of the backward pass of one block, in order."""
    recipe = recipe_of(Case(tensor=2), corpus)
    config = decoder_config(recipe)
    mesh = make_mesh(resolve_layout(recipe), dist.get_rank())
    model = Decoder(tensor.local_config(config, mesh.tensor))
    tensor.apply(model, mesh, config)
    fill(model, 3)
    words = torch.zeros(1, recipe.seq_len, dtype=torch.long)
    loss = model(words, labels=words).loss
    with Order() as order:
        loss.backward()
    return order.names


def listen_to_gathers() -> list[int]:
    """Record the bytes of each gather; DeepSpeed keeps the function that it finds first."""
    gather = dist.all_gather_into_tensor
    heard: list[int] = []

    def said(*arguments, **keywords):
        output = arguments[0] if arguments else keywords["output_tensor"]
        heard.append(output.numel() * output.element_size())
        return gather(*arguments, **keywords)

    dist.all_gather_into_tensor = dist.distributed_c10d.all_gather_into_tensor = said
    return heard


def stage_3_gathers(corpus: Path, heard: list[int]) -> dict:
    """Bytes gathered in a step of one and of two micro-batches under ZeRO-3, beside the formula.

    With a threshold of 0, so that no weight stays; the step itself gathers nothing then.
    """
    found: dict[str, Any] = {"heard": []}
    for accumulation in (1, 2):
        case = Case(data=2, stage=3, accumulation=accumulation)
        recipe = recipe_of(case, corpus, ds={"zero_optimization": PERSIST_NOTHING})
        engine, stream, resolved = engine_of(recipe)
        one_step(engine, stream, resolved, 1)
        heard.clear()
        one_step(engine, stream, resolved, 2)
        found["heard"].append([len(heard), sum(heard)])
    found["foretold"] = gathers(recipe, resolved.layout, resolved.config)
    return found


def selective_says_nothing_more(corpus: Path) -> list[int]:
    """Collectives of a step in the tensor group, without and with selective recomputation.

    Counted by the group itself: kept results are not sent again.
    """
    numbers = []
    for recompute in ("none", "selective"):
        engine, stream, resolved = engine_of(recipe_of(Case(tensor=2, recompute=recompute), corpus))
        group = engine.mesh.tensor.group
        before = group._get_sequence_number_for_group()
        one_step(engine, stream, resolved, 1)
        numbers.append(group._get_sequence_number_for_group() - before)
    return numbers


def replicas(corpus: Path) -> dict:
    """Train LONG steps; returns the replicated weights that differ, first and last loss."""
    recipe = recipe_of(Case(tensor=2, accumulation=1), corpus)
    recipe = dataclasses.replace(recipe, steps=LONG, batch_tokens=4 * 32, micro_batch=4)
    engine, stream, resolved = engine_of(recipe)
    losses = [float(one_step(engine, stream, resolved, step).loss) for step in range(1, LONG + 1)]
    return {"differ": replicas_differ(engine), "first": losses[0], "last": losses[-1]}


def main(out: Path, corpus: Path) -> None:
    heard = listen_to_gathers()
    start_once(recipe_of(Case(tensor=2), corpus))
    seen: dict[str, Any] = {"differences": {}, "counts": {}}
    for tied in (False, True):
        for sequence in (True, False):
            case = Case(tensor=2, sequence=sequence, tied=tied)
            seen["differences"][case.name] = whole_and_cut(case, corpus, compiled=False)
    case = Case(tensor=2)
    seen["differences"]["compiled"] = whole_and_cut(case, corpus, compiled=True)
    seen["backward"] = overlap(corpus)
    counter = Counter()
    for case in COUNTED:
        found: list = [None] * 2
        dist.all_gather_object(found, counts(case, corpus, counter))
        seen["counts"][case.name] = found
    seen["gathers"] = stage_3_gathers(corpus, heard)
    seen["selective"] = selective_says_nothing_more(corpus)
    seen["replicas"] = replicas(corpus)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(seen))
    fail_in_a_step(corpus)


def fail_in_a_step(corpus: Path) -> None:
    """Rank 1 raises where rank 0 waits for it inside a block."""
    engine, stream, resolved = engine_of(recipe_of(Case(tensor=2), corpus))
    if dist.get_rank() == 1:
        raise UserError("rank 1 gives up in the middle of a step")
    began = time.monotonic()
    try:
        one_step(engine, stream, resolved, 1)
    finally:
        print(f"rank 0 was released after {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    process.finish()
    process.leave(0)
