"""The folder of a comparison: `runs/<comparison>/`, beside the folders of its runs.

    comparison.json   what it compares      outcomes.jsonl   how each run ended
    report.md  *.png  tensorboard/          the report       logs/<run>.log   what each run printed

Rule: comparison.json stores what is compared. The same comparison continues where it was
interrupted; another comparison under the same name is refused, and so is a second process.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.jsonl import append_line
from base.paths import ROOT
from base.values import listed
from record.records import read_lines
from record.run_folder import Lock, hold, refuse_unwritable

RUNS = ROOT / "runs"
WHAT, OUTCOMES = "comparison.json", "outcomes.jsonl"
# Entries that may differ when a comparison continues: more rounds only add to it.
MAY_GROW = ("repeats",)


def stored(folder: Path) -> dict[str, Any] | None:
    """Read comparison.json; None where there is no folder.

    Raises UserError where the folder exists and is not one of a comparison.
    """
    if not folder.exists():
        refuse_unwritable(folder)
        return None
    try:
        found = json.loads((folder / WHAT).read_text(encoding="utf-8"))
        for variant in found.get("variants", ()):  # the name that older versions wrote
            variant["overrides"] = variant.pop("words", variant.get("overrides"))
        return found
    except (OSError, ValueError):
        raise UserError(
            f"NAME={folder.name}: {folder} is not the folder of a comparison (no whole {WHAT});"
            " choose another name with NAME=..., or remove it"
        ) from None


def refuse_another(folder: Path, wanted: dict[str, Any]) -> None:
    """Raise UserError where the folder holds another comparison than `wanted`."""
    there = stored(folder)
    if there is None:
        return
    keys = [key for key in {**there, **wanted} if key not in MAY_GROW]
    differing = [key for key in keys if there.get(key) != wanted.get(key)]
    if differing:
        shown = "; ".join(difference(key, there, wanted) for key in differing[:3])
        raise UserError(
            f"NAME={folder.name}: {folder} holds another comparison ({shown}); choose another name"
            " with NAME=..., or remove that folder and its runs"
        )


def refuse_strangers(folder: Path, runs_by_round: dict[int, list[str]]) -> None:
    """Raise UserError where a folder of a run exists that this comparison did not start.

    `runs_by_round` maps each round to the names of its runs. Rounds that comparison.json already
    counts belong to this comparison.
    """
    there = stored(folder)
    rounds = there["repeats"] if there else 0
    strangers = [
        name
        for number, names in runs_by_round.items()
        for name in names
        if number > rounds and (folder.parent / name).exists()
    ]
    if strangers:
        raise UserError(
            f"NAME={folder.name}: runs of another comparison, whose folder is gone, have these"
            f" names: {listed(strangers, 2)} in {folder.parent}; choose another name with NAME=...,"
            " or remove them"
        )


def difference(key: str, there: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Describe one entry in which two comparisons differ."""
    if key == "variants" and [v["overrides"] for v in there.get(key, [])] == [
        v["overrides"] for v in wanted.get(key, [])
    ]:
        return "the recipe has changed since"
    short = [json.dumps(side.get(key))[:120] for side in (there, wanted)]
    return f"{key} {short[0]} there, {short[1]} now"


def open_comparison(folder: Path, wanted: dict[str, Any]) -> Lock:
    """Create or enter the folder; the returned lock keeps other processes out while it is held."""
    refuse_another(folder, wanted)
    if "repeats" in wanted:  # rounds that were started before stay part of the comparison
        wanted = {
            **wanted,
            "repeats": max(wanted["repeats"], (stored(folder) or wanted)["repeats"]),
        }
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    lock = hold(folder)
    new = folder / f".{WHAT}.new"
    new.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    os.replace(new, folder / WHAT)
    return lock


def record_outcome(folder: Path, run: str, status: str, **facts: Any) -> None:
    """Append one line to outcomes.jsonl: how a run ended, why, its seconds, the load before it."""
    append_line(folder / OUTCOMES, {"run": run, "status": status, **facts})


def loads(folder: Path) -> list[float]:
    """Load averages of the machine, measured before each run that finished."""
    lines = read_lines(folder / OUTCOMES)
    return [line["load"] for line in lines if line["status"] == "finished"]


def reasons(folder: Path) -> dict[str, str]:
    """Map each run whose latest attempt failed to the reason."""
    found: dict[str, str] = {}
    for line in read_lines(folder / OUTCOMES):
        found.pop(line["run"], None)
        if line["status"] != "finished":
            found[line["run"]] = line["reason"]
    return found
