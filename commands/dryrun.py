"""`make dryrun`: builds any rank's part of a run on a machine without its ranks, GPUs or data.

    python -m commands.dryrun --world 1024 --rank 517 [--json] -- 70b parallel.tensor=4

    recipe x world -> layout -> fake process group -> the modules of that rank, on `meta`

Rule: modules, shards and groups are made by the code that makes them in the run; only their memory
does not exist and their collectives send nothing. Parameters are counted on the modules that were
built; activations are the formula of `model.cost` for this rank's share, an upper bound. Starts
nothing, writes nothing. Units: elements, GiB.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from base.command_line import Parser
from base.errors import UserError
from base.table import scaled, table
from base.units import GIB
from data.stream.schedule import schedule_of
from launch.hosts.own_gpus import answer_about_recipe, ranks_or_own
from model.cost import BYTES, activation_bytes, blocks_recomputed, head_dim
from parallel.layout import Coordinates, Layout
from recipes.compose import compose
from recipes.schema import Recipe
from runtime.ds_config.confirm import confirm
from runtime.ds_config.merge import ds_problems
from runtime.ds_config.state_bytes import of_layout
from runtime.resolve import Resolved, resolve


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.dryrun`; returns the exit status."""
    parser = Parser(prog="make dryrun", description=__doc__)
    parser.add_argument("--rank", default="0", help="which of them, from 0")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return answer_about_recipe(parser, arguments, answer)


def answer(name: str, overrides: list[str], world: int | None, options: Namespace) -> str:
    """What is printed. Raises UserError."""
    seen = collect(name, overrides, world, options.rank)
    return json.dumps(seen, indent=2) if options.json else text(seen)


def collect(
    recipe_name: str, overrides: Sequence[str], world: int | None = None, rank: str = "0"
) -> dict[str, Any]:
    """All values of the output, as plain JSON. Raises UserError with every problem."""
    recipe = compose(recipe_name, overrides, ds_problems).recipe
    ranks = ranks_or_own(recipe, world)
    resolved = resolve(recipe, ranks, schedule_of(recipe))
    number = read_rank(rank, ranks)
    confirm(resolved.config)

    from runtime.engine.rank_part import part_of_rank  # torch: only for what is not refused

    with part_of_rank(recipe, resolved, number) as (mesh, model):
        return describe(recipe, resolved, mesh, number, model)


def read_rank(given: str, world: int) -> int:
    """A rank given as text. Raises UserError."""
    if not given.isascii() or not given.isdigit() or int(given) >= world:
        raise UserError(
            f"RANK={given[:80]!r} is not one of the {world} ranks: give 0 to {world - 1}"
        )
    return int(given)


def describe(
    recipe: Recipe, resolved: Resolved, mesh: Mesh, rank: int, model: nn.Module
) -> dict[str, Any]:
    """The weights that the rank holds, the ranks it communicates with, and its memory."""
    from parallel.mesh import members

    layout, per_host = resolved.layout, recipe.cluster.gpus_per_node
    parameters = list(model.named_parameters())
    return {
        "rank": rank,
        "host": rank // per_host,
        "layout": layout.as_dict(),
        "layout_text": layout.describe(),
        "place": mesh.place._asdict(),
        "groups": {axis: members(layout, rank, axis) for axis in AXES},
        "neighbours": neighbours(layout, mesh.place),
        "blocks": list(layout.bounds[mesh.pipeline.index :][:2])
        or [0, recipe.model.num_hidden_layers],
        "parameters": sum(parameter.numel() for _, parameter in parameters),
        "parameters_of_model": resolved.num_parameters,
        "weights": weights(parameters),
        "gib": memory(recipe, resolved, mesh, parameters),
        "ds_config": resolved.config,
    }


if TYPE_CHECKING:
    from torch import nn

    from parallel.mesh import Mesh

AXES = ("tensor", "context", "data", "pipeline")


def neighbours(layout: Layout, place: Coordinates) -> dict[str, int | None]:
    """The ranks that send hidden states to this one and that receive them from it."""

    def at(stage: int) -> int | None:
        exists = 0 <= stage < layout.pipeline
        return layout.rank(place._replace(pipeline=stage)) if exists else None

    return {"before": at(place.pipeline - 1), "after": at(place.pipeline + 1)}


def weights(parameters: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One line per kind of weight: name with N for the block, shapes here and in the model."""
    from parallel import tensor

    kinds: dict[tuple, int] = {}
    for name, parameter in parameters:
        full = getattr(parameter, "shard", tensor.ParameterShard(tuple(parameter.shape))).full
        kind = re.sub(r"\.\d+\.", ".N.", name), tuple(parameter.shape), tuple(full)
        kinds[kind] = kinds.get(kind, 0) + 1
    return [
        {"name": name, "shape": list(here), "of": list(full), "count": count}
        for (name, here, full), count in kinds.items()
    ]


def memory(
    recipe: Recipe, resolved: Resolved, mesh: Mesh, parameters: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, float]:
    """GiB of one rank, by kind."""
    layout, made = resolved.layout, resolved.engine
    own = sum(parameter.numel() for _, parameter in parameters)
    bucket = made.json["zero_optimization"].get("reduce_bucket_size", 0)
    width = {"fp32": 4, "bf16": 2}[made.json["communication_data_type"]]
    found = {name: value * own for name, value in of_layout(recipe, layout, made).items()}
    found["reduction bucket"] = bucket * width
    found |= activations(recipe, layout, mesh.place)
    return {name: value / GIB for name, value in found.items()}


def activations(recipe: Recipe, layout: Layout, place: Coordinates) -> dict[str, float]:
    """Bytes that are kept for backward, and of the loss's working space on the last stage."""
    first, end = layout.bounds[place.pipeline : place.pipeline + 2] or (0, None)
    blocks = (end or recipe.model.num_hidden_layers) - first
    parts, is_sequence = layout.tensor, recipe.parallel.sequence
    shape = dataclasses.replace(
        recipe.model,
        num_hidden_layers=blocks,
        head_dim=head_dim(recipe.model),
        num_attention_heads=recipe.model.num_attention_heads // parts,
        num_key_value_heads=recipe.model.num_key_value_heads // parts,
        intermediate_size=recipe.model.intermediate_size // parts,
        vocab_size=math.ceil(recipe.model.vocab_size / parts),
    )
    if is_sequence:  # every kept element belongs to a part of the tokens or of the heads
        shape = dataclasses.replace(shape, hidden_size=recipe.model.hidden_size // parts)
    length = recipe.seq_len // layout.context
    counted = activation_bytes(
        shape, recipe.micro_batch, length, recipe.precision, recipe.recompute
    )
    is_last = place.pipeline == layout.pipeline - 1
    tokens, width = recipe.micro_batch * length, BYTES[recipe.precision]
    more = 0
    if is_sequence and is_last:  # the head takes all tokens: so does the loss's gradient there
        more += tokens * width * (recipe.model.hidden_size - shape.hidden_size)
    if layout.context > 1:
        # Attention's output before and after its way back, keys and values that several ranks
        # have; tables and ids of all tokens.
        whole = blocks - blocks_recomputed(recipe.recompute, blocks)
        copied = 2 * max(0, layout.context - shape.num_key_value_heads)
        heads = min(whole + 1, blocks) * (shape.num_attention_heads + copied)
        others = layout.context - 1
        more += tokens * (width * shape.head_dim * (heads + 2 * others) + 8 * others)
    # One forward, one backward: stage s of p holds p - s micro-batches at a time.
    count = max(number for _, number in layout.accumulation)
    held = min(layout.pipeline - place.pipeline, count)
    return {
        "activations": (counted.saved + more) * held,
        "loss": counted.workspace if is_last else 0,
    }


def text(seen: dict[str, Any]) -> str:
    """The output for people."""
    place = " ".join(f"{axis} {index}" for axis, index in seen["place"].items())
    before, after = seen["neighbours"]["before"], seen["neighbours"]["after"]
    groups = [[axis, span(ranks), f"{len(ranks)}"] for axis, ranks in seen["groups"].items()]
    if before is not None:
        groups.append(["from", str(before), "hidden states"])
    if after is not None:
        groups.append(["to", str(after), "hidden states"])
    first, end = seen["blocks"]
    shapes = [
        [line["name"], _shape(line["shape"]), _shape(line["of"]), f"x {line['count']}"]
        for line in seen["weights"]
    ]
    sizes = [[name, f"{gib:.3f} GiB"] for name, gib in seen["gib"].items()]
    sizes.append(["sum", f"{sum(seen['gib'].values()):.3f} GiB"])
    return "\n".join(
        [
            f"rank {seen['rank']} on host {seen['host']}: {place}",
            f"  {seen['layout_text']}",
            "",
            "groups: ranks, how many",
            table(groups),
            "",
            f"weights: blocks {first} to {end - 1}, {scaled(seen['parameters'])} of"
            f" {scaled(seen['parameters_of_model'])} parameters; here, in the model",
            table(shapes),
            "",
            "memory of this rank (activations: an upper bound)",
            table(sizes),
            "",
            "DeepSpeed JSON",
            json.dumps(seen["ds_config"], indent=2),
        ]
    )


def span(ranks: Sequence[int]) -> str:
    """Ranks in a short form: all of up to four, else first, second ... last (equal steps)."""
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
