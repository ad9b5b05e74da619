"""plan/validation.py: the bar that the planner is held to, on published runs that it was not fitted
on, and the same table for a file of other rows."""

from __future__ import annotations

import csv
import itertools

import pytest

from base.errors import UserError
from plan.machine import PUBLISHED
from plan.published_rows import read, usable
from plan.validation import (
    bubble_errors,
    memory_lines,
    ordered_pairs,
    predict_blind,
    quantiles,
    usual_mfu,
    validation_report,
)


@pytest.fixture(scope="module")
def predictions():
    return predict_blind(usable(read(PUBLISHED / "throughput.csv"))[0])


def test_speed_of_families_left_out_is_within_4_percent_and_11_at_the_90th(predictions):
    main = [test for test in predictions if test.is_main]
    assert len(main) >= 350
    median, high = quantiles(test.error for test in main)
    assert median <= 0.04
    assert high <= 0.11
    baseline = quantiles(test.baseline / test.run.tokens_per_s - 1 for test in main)
    assert baseline[0] > 4 * median  # a constant MFU per GPU


def test_ranges_hold_what_was_measured_four_times_in_five(predictions):
    covered = sum(test.is_covered for test in predictions) / len(predictions)
    assert 0.72 <= covered <= 0.88
    unknown = [test for test in predictions if not test.run.is_calibrated]
    assert sum(test.is_covered for test in unknown) / len(unknown) >= 0.8


def test_layouts_more_than_5_percent_apart_are_ordered_right(predictions):
    right, total = ordered_pairs(predictions)
    assert total > 100
    assert right / total >= 0.93


def test_bubbles_are_within_two_and_a_half_points():
    errors = [error for schedule, error in bubble_errors() if not schedule.startswith("ZB")]
    assert len(errors) == 24
    assert max(map(abs, errors)) <= 0.025


def test_memory_that_an_allocator_measured_is_within_4_percent_and_10_at_the_90th(predictions):
    lines = memory_lines([test.run for test in predictions])
    assert "runs that are declared impossible: 0" in "\n".join(lines)
    total = next(line for line in lines[0].splitlines() if line.strip().startswith("all"))
    rows, median, high = total.split()[1:4]
    assert int(rows) == 76
    assert float(median.rstrip("%")) <= 4
    assert float(high.rstrip("%")) <= 10


def test_a_family_that_is_left_out_does_not_inform_its_own_baseline(predictions):
    runs = [test.run for test in predictions]
    one = next(test for test in predictions if test.run.family == "llm-foundry")
    others = usual_mfu(run for run in runs if run.family != "llm-foundry")
    share = others[one.run.machine.gpu]
    flops = one.run.job.shape.flops_per_token(one.run.job.seq_len)
    assert one.baseline == pytest.approx(share * one.run.machine.peak_tflops * 1e12 / flops)


def test_a_file_of_other_rows_gives_the_same_table(tmp_path):
    rows = read(PUBLISHED / "throughput.csv")
    chosen = [row for row in rows if "torchtitan" in row["source"]]
    for row in chosen:
        row["source"] = "somebody else"
    next(r for r in chosen if r["complete"] == "1" and r["precision"] == "bf16")["gpu"] = "Abacus"
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(chosen[0]))
        writer.writeheader()
        writer.writerows(chosen)
    lines, found = validation_report(path)
    text = "\n".join(lines)
    assert 8 <= len(found) < len(chosen)
    assert "gpu=Abacus is not in gpus.csv" in text
    assert "precision=fp8: no rates" in text
    assert "in range" in text
    assert "ordered right" in text
    assert "constant MFU" in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "no column gpu, hidden, layers"),
        ("", "no column"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(tmp_path, content, message):
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message):
        validation_report(path)


def test_rows_with_nonsense_are_counted_as_unusable_and_never_stop_the_table(tmp_path):
    base = next(row for row in read(PUBLISHED / "throughput.csv") if row["complete"] == "1")
    spoiled = []
    for column, value in itertools.product(
        ("layers", "heads", "n_gpus", "tp", "micro_batch", "global_batch", "seq", "vocab", "params",
         "tokens_per_s_per_gpu", "gpus_per_node", "zero_stage", "interconnect", "kv_heads", "year"),
        ("", "x", "-3", "0", "1e400", "7"),
    ):  # fmt: skip
        spoiled.append(base | {column: value})
    runs, refused = usable(spoiled)
    assert len(runs) + sum(refused.values()) == len(spoiled)
    path = tmp_path / "rows.csv"
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(base))
        writer.writeheader()
        writer.writerows(spoiled)
    lines, _ = validation_report(path)
    assert any("not used" in line for line in lines)
