"""Statistics and tables of the step benchmark: medians, quartiles, paired ratios, the loss check.

Rule: a ratio is taken within one round, in which both contenders ran within the same minute, and
the median is taken over rounds, so that a machine that becomes slower for a while slows both. Does
not import torch. Units: seconds, tokens/s.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# Largest relative difference of losses of one computation: fp32 adds in another order, bf16 rounds
# activations in other places (Llama's norm rounds twice, ours once).
SAME_LOSS = {"fp32": 1e-4, "bf16": 2e-3}
BASELINES = ("torch", "trainer")
# Document masks give another loss: fewer targets, other positions.
OTHER_LOSS = ("documents",)
TITLES = {
    "torch": "(a) bare torch loop, LlamaForCausalLM",
    "trainer": "(b) Hugging Face Trainer + DeepSpeed ZeRO-1",
    "ours": "(c) this project, zero=1",
    "deepspeed": "(d) bare DeepSpeed ZeRO-1, LlamaForCausalLM",
    "documents": "(c) with document masks",
}


NO_BF16_UNITS = (
    "This CPU has no bf16 units: torch then multiplies bf16 matrices in a scalar loop, which is"
    " what the other contenders get; this project multiplies in fp32 and rounds once. The ratio"
    " shows that, and nothing about CPUs or GPUs that have such units."
)


class NotTheSame(Exception):
    """Two contenders computed different losses, so that their speeds must not be compared."""


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median, third quartile; three times the value where there is only one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def check_same_losses(losses: Mapping[str, Sequence[float]], precision: str) -> None:
    """Raise NotTheSame unless every contender's losses equal those of the first, step by step."""
    same = {name: seen for name, seen in losses.items() if name not in OTHER_LOSS}
    reference = next(iter(same))
    bound = SAME_LOSS[precision]
    for name, seen in same.items():
        for step, (loss, expected) in enumerate(zip(seen, same[reference], strict=True), start=1):
            if not abs(loss - expected) <= bound * abs(expected):  # NaN fails too
                raise NotTheSame(
                    f"step {step}: {name} has loss {loss!r}, {reference} {expected!r}: further"
                    f" apart than {bound:g} ({precision}); they do not train the same thing"
                )


def round_medians(turns: Sequence[Sequence[float]]) -> list[float]:
    """Median of each turn."""
    return [statistics.median(turn) for turn in turns]


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratio theirs / ours of each round, both in seconds: above 1 means that ours is faster."""
    return [their / our for our, their in zip(ours, theirs, strict=True)]


def summary(turns: Mapping[str, Sequence[Mapping[str, Any]]], tokens: int) -> dict[str, Any]:
    """One entry for each contender. `turns` has its replies, one a round, without the warm-up."""
    wall = {name: round_medians([t["seconds"] for t in given]) for name, given in turns.items()}
    cpu = {name: round_medians([t["cpu_s"] for t in given]) for name, given in turns.items()}
    found = {}
    for name, given in turns.items():
        steps = [seconds for turn in given for seconds in turn["seconds"]]
        entry: dict[str, Any] = {
            "steps": len(steps),
            "step_s": quartiles(steps),
            "tokens_per_s": quartiles([tokens / seconds for seconds in steps]),
            "cpu_s_per_step": quartiles([s for turn in given for s in turn["cpu_s"]]),
            "peak_host_gib": max(turn["peak_host_gib"] for turn in given),
            "phases": phase_medians(given),
            "ratios": {},
        }
        for base in BASELINES:
            if base in turns and base != name:
                entry["ratios"][base] = {
                    "wall": quartiles(paired_ratios(wall[name], wall[base])),
                    "cpu": quartiles(paired_ratios(cpu[name], cpu[base])),
                }
        found[name] = entry
    return found


def phase_medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase that ever took time; empty where none was measured."""
    phases = [step for turn in turns for step in turn["phases"]]
    names = [name for name in (phases[0] if phases else {}) if name not in ("step_s", "is_first")]
    medians = {name: statistics.median(step[name] for step in phases) for name in names}
    return {name: seconds for name, seconds in medians.items() if seconds > 0}


def markdown(result: Mapping[str, Any]) -> str:
    """Report of `benchmarks.step` as Markdown."""
    machine = result["machine"]
    lines = ["# Step benchmark", "", f"`{result['command']}` at commit {result['commit']}.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        "",
        "Contenders take turns on the same cores; median [quartiles]. Ratios compare step times"
        " inside a round, above 1 = faster than that baseline; the last number of each compares the"
        " time spent on cores, which other programs on the machine change far less.",
    ]
    for measured in result["measurements"]:
        lines += ["", *precision_table(measured)]
    return "\n".join(lines) + "\n"


def precision_table(measured: Mapping[str, Any]) -> list[str]:
    """Lines of one precision: table, phases of a step, operators."""
    work, found = measured["workload"], measured["contenders"]
    lines = [
        f"## {work['precision']}, {measured['parameters']:,} parameters, {work['world']} ranks x"
        f" {work['threads']} threads, {work['accumulation']} x {work['micro_batch']} x"
        f" {work['seq_len']} tokens per rank and step",
        "",
        f"Load average {measured['load_before']} before, {measured['load_after']} after;"
        f" {measured['rounds']} rounds of {measured['steps_per_turn']} steps. Losses of the first"
        f" {measured['compared_steps']} steps are equal to {SAME_LOSS[work['precision']]:g}.",
        "",
        "| contender | tokens/s | CPU s/step | x (a) wall, CPU | x (b) wall, CPU | peak GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in found.items():
        ratios = [ratio_cell(entry["ratios"].get(base)) for base in BASELINES]
        lines.append(
            f"| {TITLES[name]} | {spread(entry['tokens_per_s'], '.0f')} |"
            f" {spread(entry['cpu_s_per_step'], '.3f')} | {ratios[0]} | {ratios[1]} |"
            f" {entry['peak_host_gib']:.2f} |"
        )
    for name, package in measured["missing"].items():
        lines.append(f"| {TITLES[name]} | not run: `pip install {package}` | | | | |")
    lines += ["", goal_line(found)]
    if work["precision"] == "bf16" and not measured["has_bf16_units"]:
        lines += ["", NO_BF16_UNITS]
    lines += ["", "Where a step goes, median seconds:", ""]
    for name, entry in found.items():
        split = ", ".join(f"{phase[:-2]} {s:.4f}" for phase, s in entry["phases"].items())
        lines.append(f"- {TITLES[name]}: {split or 'not measured'}")
    if measured.get("ops"):
        lines += ["", *ops_table(measured["ops"])]
    return lines


def goal_line(found: Mapping[str, Any]) -> str:
    """Verdict: ours is as fast as every baseline that ran, in wall time and in CPU time, or not."""
    ratios = found.get("ours", {"ratios": {}})["ratios"]
    if not ratios:
        return "Goal (at least 1.0 x each baseline): nothing to compare."
    missed = [
        f"{ratio[kind][1]:.2f} x {TITLES[base][:3]} by {kind} time"
        for base, ratio in ratios.items()
        for kind in ("wall", "cpu")
        if ratio[kind][1] < 1
    ]
    verdict = f"missed, {'; '.join(missed)}" if missed else "met"
    return f"Goal (at least 1.0 x each baseline): {verdict}."


def ops_table(ops: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Lines of a table of milliseconds per step in each costly operator, by contender."""
    totals: dict[str, float] = {}
    for seen in ops.values():
        for op, seconds in seen.items():
            totals[op] = max(totals.get(op, 0.0), seconds)
    names = list(ops)
    lines = [
        "Operators, own milliseconds per step by the clock under the profiler, one turn each, so"
        " only large differences count; blank = not among that contender's costliest:",
        "",
        "| operator | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for op in sorted(totals, key=totals.__getitem__, reverse=True):
        cells = [f"{ops[name][op] * 1e3:.1f}" if op in ops[name] else "" for name in names]
        lines.append(f"| `{op[:60]}` | " + " | ".join(cells) + " |")
    return lines


def spread(values: Sequence[float], form: str) -> str:
    """Text `median [first quartile .. third quartile]`."""
    first, middle, third = (format(value, form) for value in values)
    return f"{middle} [{first} .. {third}]"


def ratio_cell(ratio: Mapping[str, Sequence[float]] | None) -> str:
    """Text `wall [quartiles], CPU`; empty where there is nothing to compare with."""
    if ratio is None:
        return ""
    return f"**{ratio['wall'][1]:.2f}** [{ratio['wall'][0]:.2f} .. {ratio['wall'][2]:.2f}]," + (
        f" {ratio['cpu'][1]:.2f}"
    )
