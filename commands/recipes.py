"""`make recipes`: lists the recipes with size, length and axes, computed as the run computes them.

python -m commands.recipes
"""

from __future__ import annotations

import sys

from base.errors import UserError
from base.table import scaled, table
from data.stream.schedule import schedule_of
from model.cost import num_parameters
from recipes.compose import compose, locate, recipe_names
from recipes.schema import Recipe
from runtime.resolve import length_in_steps

HEAD = ["recipe", "parameters", "tokens", "steps", "tokens/step", "axes", "zero", "command"]


def main() -> int:
    """Print the table; a recipe that is refused is listed with its first problem."""
    sized = []
    for recipe_name in recipe_names():
        try:
            recipe = compose(recipe_name).recipe
            sized.append((num_parameters(recipe.model), row(recipe_name, recipe)))
        except UserError as error:
            sized.append(
                (0, [recipe_name, *[""] * (len(HEAD) - 2), f"refused: {error.problems[0]}"])
            )
    print(table([HEAD, *(cells for _, cells in sorted(sized))], indent=""))
    return 0


def row(recipe_name: str, recipe: Recipe) -> list[str]:
    """Row of one recipe."""
    parameters = num_parameters(recipe.model)
    schedule = schedule_of(recipe)
    steps = length_in_steps(recipe, schedule, parameters)
    axes = recipe.parallel
    sizes = {"tensor": axes.tensor, "pipeline": axes.pipeline, "context": axes.context}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    return [
        recipe_name,
        scaled(parameters),
        scaled(schedule.tokens_after(steps)),
        f"{steps:,}",
        scaled(schedule.sequences_at(1) * recipe.seq_len),
        " x ".join(f"{name} {size}" for name, size in sizes.items()) or "data only",
        str(recipe.zero),
        command(recipe_name),
    ]


def command(recipe_name: str) -> str:
    """Command that trains a recipe: the first comment of its file."""
    return locate(recipe_name).read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


if __name__ == "__main__":
    sys.exit(main())
