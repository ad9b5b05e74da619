"""`make budget`: the best model for a budget, what over-training costs, and its plan.

    python -m commands.budget --gpu-hours 10000 --cluster h100
    python -m commands.budget --money 50000 --cluster a100 -- cluster.price_per_hour=1.8
    python -m commands.budget --days 14 --nodes 8 --cluster h100

The speed is that of the plan for the model's own size, so size and speed are found together.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence

from base.command_line import Parser, add_overrides, arguments_of, carry_out
from base.errors import UserError
from base.table import scaled, table
from base.values import as_float, read_ranks
from model.cost import num_parameters
from plan.choose import compose_free
from plan.compute_budget import Allocation, best_allocation, shape_with, table_rows
from plan.explanation import explained, is_calibrated
from plan.recipe_jobs import machine_for
from plan.search import Option, confirmed, search

RECIPES = ("125m", "1b", "7b", "70b")
DAYS = 30  # the length that the number of hosts is chosen for where NODES is not given
ROUNDS = 4  # of size -> plan -> speed -> size; the third changes less than 1 %


def main(arguments: Sequence[str]) -> int:
    """Entry of `python -m commands.budget`; returns the exit status."""
    parser = Parser(prog="make budget", description=__doc__)
    for name in ("gpu-hours", "money", "days", "nodes", "cluster"):
        parser.add_argument(f"--{name}", default="")
    add_overrides(parser, "*", "overrides")
    options = parser.parse_args(arguments)

    def act() -> int:
        print("\n".join(answer(options, arguments_of(options))))
        return 0

    return carry_out(act)


def answer(options, words: list[str]) -> list[str]:
    """The lines to print. Raises UserError."""
    words += [f"cluster={options.cluster or 'h100'}"]
    machine, assumed = machine_for(compose_free("7b", words).recipe)
    hours, world = budget(options, machine)
    best, option, name = solve_size(hours, world, words)
    share = num_parameters(option.recipe.model) / best.parameters - 1
    tokens = best.flops / 6 / num_parameters(option.recipe.model)
    lines = [
        f"{hours:,.0f} GPU-hours on {world:,} {machine.gpu}"
        f" = {best.flops:.3g} FLOPs (6 N D) at {option.tokens_per_s / world:,.0f} tokens/s per GPU"
        f"{'' if is_calibrated(option) else ' (not calibrated)'}",
        "",
        f"least loss: {scaled(best.parameters)} parameters, {scaled(best.tokens)} tokens"
        f" ({best.ratio:.3g} per parameter); loss by the fit of Besiroglu et al. 2024, whose values"
        " hold for the text of Hoffmann et al. 2022",
        "",
        table(table_rows(best)),
        "",
        f"a recipe of that size ({share:+.1%} parameters): {name} with",
        f"  {model_words(option.recipe.model)}",
        "",
        *explained(option, assumed, tokens),
    ]
    overrides = f"cluster={options.cluster or 'h100'} tokens={tokens:.4g} {option.knobs}"
    lines += [
        "",
        f'  make pretrain RECIPE={name} OVERRIDES="{model_words(option.recipe.model)} {overrides}"',
    ]
    return lines


def budget(options, machine) -> tuple[float, int]:
    """(GPU-hours, ranks) from what was given. Raises UserError unless it is exactly one budget."""
    given = [name for name in ("gpu_hours", "money", "days") if getattr(options, name)]
    if len(given) != 1:
        raise UserError("give one of GPU_HOURS=10000, MONEY=50000 or DAYS=14 NODES=8")
    try:
        amount = as_float(getattr(options, given[0]))
    except ValueError as error:
        raise UserError(f"{given[0].upper()}={getattr(options, given[0])[:80]} {error}") from None
    if amount <= 0:
        raise UserError(f"{given[0].upper()}={amount:g}: give a number above 0")
    nodes = read_ranks("NODES", options.nodes) if options.nodes else None
    if given[0] == "days":
        if nodes is None:
            raise UserError("DAYS needs NODES: how many hosts train for so long")
        world = nodes * machine.gpus_per_node
        return amount * 24 * world, world
    if given[0] == "money":
        if not machine.price_per_hour:
            raise UserError(
                "MONEY needs a price: set cluster.price_per_hour in the cluster file, or give"
                ' OVERRIDES="cluster.price_per_hour=2.5"'
            )
        amount /= machine.price_per_hour
    if nodes is None:
        hosts = amount / (24 * DAYS) / machine.gpus_per_node
        nodes = max(1, 2 ** math.ceil(math.log2(hosts))) if hosts > 1 else 1
    return amount, nodes * machine.gpus_per_node


def solve_size(hours: float, world: int, words: list[str]) -> tuple[Allocation, Option, str]:
    """The allocation, the planned option of a model of its size, and the recipe beneath it."""
    mfu = 0.4
    for _ in range(ROUNDS):
        machine, _ = machine_for(compose_free("7b", words).recipe)
        best = best_allocation(hours * 3600 * machine.peak_tflops * 1e12 * mfu)
        name = nearest_recipe(best.parameters, words)
        recipe = compose_free(name, words).recipe
        recipe = dataclasses.replace(recipe, model=shape_with(best.parameters, recipe.model))
        found = search(recipe, world, machine)
        option = found.winner
        if option is None:
            raise UserError(
                f"no layout of {world} ranks fits {best.parameters:.3g} parameters; give more NODES"
            )
        # C = 6 N D leaves attention out, so the share of the peak does, too.
        rate = option.tokens_per_s / world * 6 * num_parameters(recipe.model)
        mfu = rate / (machine.peak_tflops * 1e12)
    return best, confirmed(option, world), name


def nearest_recipe(parameters: float, words: list[str]) -> str:
    """The recipe whose size is nearest, by ratio."""
    sizes = {name: num_parameters(compose_free(name, words).recipe.model) for name in RECIPES}
    return min(sizes, key=lambda name: abs(math.log(sizes[name] / parameters)))


def model_words(model) -> str:
    """A shape as overrides."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads")  # fmt: skip
    return " ".join(
        [*(f"model.{name}={getattr(model, name)}" for name in names), "model.head_dim=null"]
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
