"""Plans a comparison: the variants of a sweep, the names of their runs, and the order of the runs.

    SWEEP="zero=1,2,3 micro_batch=1,2"  ->  6 variants x REPEATS rounds:  A B C ... A B C ...

Rule: pure functions of the command line. Rounds are interleaved, so that a machine that becomes
slower slows all variants alike. Every run has its own name and therefore its own folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from base.errors import UserError
from compare.ranking import LEARNED, SPEED
from recipes.check import LONGEST_NAME, folder_name
from recipes.compose import compose_command
from recipes.overrides import sweep_values
from recipes.schema import Recipe
from runtime.resolve import Resolved

# Knobs that the comparison sets itself, because they must be the same for all variants.
OURS = {
    "run": "the comparison names its runs (NAME=...)",
    "stop_after": "the comparison ends its runs (STEPS=...)",
    "resume": "the comparison starts its runs",
    "log.communication": "a comparison counts communication",
    "log.profile": "a profile slows a run (make profile RUN=...)",
    "checkpoint.at_end": "the runs of a comparison are trials and save nothing",
    "checkpoint.interval": "the runs of a comparison are trials and save nothing",
}
# Set unless OVERRIDES or SWEEP set them: evaluation takes time and is part of no speed.
UNLESS_GIVEN = {"eval_tokens": "0", "eval_every": "0"}
EVALUATIONS = 10  # of a run that is ranked by validation loss
# The first step of a run is warm-up; quartiles need two more steps.
FEWEST_STEPS, MOST_STEPS, MOST_REPEATS, MOST_RUNS = 3, 10**6, 100, 1000


@dataclass(frozen=True)
class Variant:
    """One point of the sweep. `label` is its overrides as one text, for people."""

    label: str
    slug: str  # part of the names of its runs
    overrides: tuple[str, ...]
    digest: str  # of the whole composed recipe: it changes when a file under recipes/ changes


@dataclass(frozen=True)
class Turn:
    """One run of the comparison: a variant in a round (counted from 1)."""

    variant: Variant
    round: int
    run: str


@dataclass(frozen=True)
class ComparisonPlan:
    """A whole comparison, as comparison.json stores it."""

    name: str
    recipe: str
    ranks: int
    overrides: tuple[str, ...]
    sweep: tuple[str, ...]
    steps: int
    repeats: int
    variants: tuple[Variant, ...]
    rank: str = SPEED
    first_seed: int | None = None  # of round 1, where each round has a seed of its own
    place: tuple[str, ...] = ()  # variables of make that name the hosts, such as HOSTFILE=hosts

    def turns(self) -> list[Turn]:
        """All runs, in the order in which they are started."""
        return [
            Turn(variant, number, run_name(self.name, variant.slug, number))
            for number in range(1, self.repeats + 1)
            for variant in self.variants
        ]

    def by_round(self) -> dict[int, list[str]]:
        """Map each round to the names of its runs."""
        found: dict[int, list[str]] = {}
        for turn in self.turns():
            found.setdefault(turn.round, []).append(turn.run)
        return found

    def arguments(self, turn: Turn) -> list[str]:
        """Arguments of `commands.pretrain` for one run."""
        overrides, seeds = list(self.overrides), []
        if self.first_seed is not None:
            overrides = [one for one in overrides if not one.startswith("seed=")]
            seeds = [f"seed={self.first_seed + turn.round - 1}"]
        own = command(self.recipe, overrides, turn.variant.overrides, self.steps, self.rank)
        return [*own, *seeds, f"run={turn.run}"]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for comparison.json; those of older versions lack rank, seed and place."""
        fields = json.loads(json.dumps(dataclasses.asdict(self)))
        for name, usual in (("rank", SPEED), ("first_seed", None), ("place", [])):
            if fields[name] == usual:
                del fields[name]
        return {"kind": "sweep", **fields}


def plan(
    name: str | None,
    recipe: str,
    ranks: int,
    overrides: list[str],
    sweep: list[str],
    steps: int,
    repeats: int,
    resolve: Any,
    rank: str = SPEED,
    has_seeds: bool = False,
    place: tuple[str, ...] = (),
) -> ComparisonPlan:
    """Plan the comparison that a command line asks for.

    With `has_seeds` each of the `repeats` rounds has another seed. `resolve(recipe)` returns the
    Resolved of a recipe on `ranks` ranks; `place` names the hosts of the runs. Raises UserError
    with every problem of every variant.
    """
    # Refuse what is wrong with the sweep itself.
    values = sweep_values(sweep)
    problems = refusals(values, overrides, has_seeds)
    choices = list(itertools.product(*values.values()))
    if len(choices) * repeats > MOST_RUNS:
        problems.append(
            f"SWEEP has {len(choices)} variants x {repeats} repeats, more than {MOST_RUNS} runs;"
            " give fewer values, or several comparisons"
        )
    if problems:
        raise UserError(*problems)
    # Compose and resolve every variant, and collect the problems of all of them.
    variants, stem, found, seed = [], None, [], None
    for choice, slug in zip(choices, slugs(choices, list(values)), strict=True):
        label = " ".join(choice)
        try:
            composed = compose_command(command(recipe, overrides, choice, steps, rank)).recipe
            resolved: Resolved = resolve(composed)
            check_length(resolved, composed, steps)
            check_evaluation(composed, rank)
        except UserError as error:
            found += [(label, line) for line in error.problems]
            continue
        stem, seed = stem or composed.run, composed.seed
        variants.append(Variant(label, slug, choice, digest(composed)))
    if found:
        raise UserError(*problem_lines(found, len(choices)))
    # Choose names that fit into a folder name.
    name = checked_name(name or f"{stem}-by-{'-'.join(last_parts(values))}", repeats)
    widest = LONGEST_NAME - len(run_name(name, "", repeats))
    if any(len(variant.slug) > widest for variant in variants):
        variants = [
            dataclasses.replace(variant, slug=f"v{number:03d}")
            for number, variant in enumerate(variants, start=1)
        ]
    return ComparisonPlan(
        name, recipe, ranks, tuple(overrides), tuple(sweep), steps, repeats, tuple(variants), rank,
        seed if has_seeds else None, place,
    )  # fmt: skip


def refusals(
    values: dict[str, list[str]], overrides: list[str], has_seeds: bool = False
) -> list[str]:
    """Problems of SWEEP and OVERRIDES themselves: forbidden knobs, and a sweep of one variant."""
    given = [(key, "SWEEP") for key in values]
    given += [(one.partition("=")[0].lstrip("+~"), "OVERRIDES") for one in overrides]
    problems = [f"{where} sets {key}: {OURS[key]}" for key, where in given if key in OURS]
    problems += [
        f"{key} stands in SWEEP and in OVERRIDES; keep one of them"
        for key, where in given
        if where == "OVERRIDES" and key in values
    ]
    if has_seeds and "seed" in values:
        problems.append("SEEDS and SWEEP both set seed; keep one of them")
    if "recipe" in values:
        problems.append("SWEEP sets recipe: one recipe is compared; sweep model=, data= or a knob")
    if not any(len(options) > 1 for options in values.values()):
        problems.append('SWEEP has one variant, nothing to compare; for example SWEEP="zero=1,2,3"')
    return problems


def command(recipe: str, overrides: Any, choice: Any, steps: int, rank: str = SPEED) -> list[str]:
    """Arguments of a run without its name: recipe=NAME, and all overrides."""
    given = {one.partition("=")[0] for one in (*overrides, *choice)}
    unless_given = UNLESS_GIVEN
    if rank in LEARNED:  # the recipe's own held-out tokens, and enough points for a curve
        unless_given = {"eval_every": str(max(1, steps // EVALUATIONS))}
    defaults = [f"{key}={value}" for key, value in unless_given.items() if key not in given]
    return [
        f"recipe={recipe}", *defaults, *overrides, *choice, f"stop_after={steps}",
        "log.communication=true", "checkpoint.interval=0", "checkpoint.at_end=false",
    ]  # fmt: skip


def check_length(resolved: Resolved, recipe: Recipe, steps: int) -> None:
    """Raise UserError where the recipe ends before the comparison's last step."""
    if resolved.total_steps < steps:
        raise UserError(
            f"STEPS={steps} is more than the {resolved.total_steps} steps of {recipe.run}; give"
            f" fewer, or OVERRIDES=steps={steps}"
        )


def check_evaluation(recipe: Recipe, rank: str) -> None:
    """Raise UserError where runs are ranked by validation loss and evaluate nothing."""
    if rank in LEARNED and recipe.eval_tokens == 0:
        raise UserError(f"RANK={rank}: eval_tokens=0 evaluates nothing; leave it out, or raise it")


def read_count(variable: str, text: str, low: int, high: int) -> int:
    """Read a count from a variable of make. Raises UserError that names the variable."""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not low <= int(text) <= high:
        raise UserError(f"{variable}={text[:80]!r} is not a number from {low} to {high:,}")
    return int(text)


def checked_name(name: str, repeats: int) -> str:
    """Return `name`. Raises UserError where it is no folder name, or too long for its runs."""
    try:
        folder_name(name)
    except ValueError as error:
        raise UserError(f"NAME={name!r} {error}") from None
    if len(run_name(name, "v000", repeats)) > LONGEST_NAME:
        raise UserError(f"NAME={name} is too long for its runs' names; give a shorter one")
    if "=" in name:
        raise UserError(f"NAME={name}: a name has no '=', which separates a knob and its value")
    return name


def run_name(comparison: str, slug: str, number: int) -> str:
    """Name of a variant's run in a round. Names sort by comparison, variant, round."""
    return f"{comparison}.{slug}.r{number}"


def slugs(choices: list[tuple[str, ...]], keys: list[str]) -> list[str]:
    """Short name of each variant for folder names; numbers where two names would be equal."""
    short = dict(zip(keys, last_parts(keys), strict=True))
    made = []
    for choice in choices:
        parts = []
        for key, override in zip(keys, choice, strict=True):
            value = re.sub(r"[^A-Za-z0-9_.+-]+", "-", override.partition("=")[2]).strip("-.")
            parts.append(f"{short[key]}-{value}")
        made.append(".".join(parts))
    if len(set(made)) < len(made):
        return [f"v{number:03d}" for number in range(1, len(made) + 1)]
    return made


def last_parts(keys: Any) -> list[str]:
    """Last part of each dotted key (`optim.lr` -> `lr`), where no other key ends in the same."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        last if lasts.count(last) == 1 else key.replace(".", "-")
        for key, last in zip(keys, lasts, strict=True)
    ]


def problem_lines(problems: list[tuple[str, str]], num_variants: int) -> list[str]:
    """Lines for (label, problem) pairs. A problem that all variants have is printed once."""
    having: dict[str, list[str]] = {}
    for label, line in problems:
        having.setdefault(line, []).append(label)
    return [
        line if len(labels) == num_variants else f"{', '.join(labels)}: {line}"
        for line, labels in having.items()
    ]


def digest(recipe: Recipe) -> str:
    """Fingerprint of all knobs of a recipe except its name and its last step."""
    bare = dataclasses.replace(recipe, run=None, stop_after=None)
    text = json.dumps(dataclasses.asdict(bare), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
