"""compare/: reports of hand-made records, their pictures and their TensorBoard pages.

Nothing is trained here; tests/commands/test_compare.py starts real runs.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import statistics

import pytest
from matplotlib.text import Text
from run_records import write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams

from base.units import MIB
from commands import compare
from compare import pictures, report, results, runner, tensorboard_pages
from compare.report import Comparison, markdown, terminal
from compare.results import Side, read_run
from record.records import read_metrics
from runtime.log.metrics import summary

# ---- why a run failed


@pytest.mark.parametrize(
    ("log", "status", "said"),
    [
        ("$ x\nrefused: cluster.device=cuda but\n", 93, "cluster.device=cuda but"),
        (
            "$ x\n[rank1]: Traceback\n[rank1]:   File\n"
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n"
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n",
            1,
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
        ),
        ("$ x\n exitcode : -9 (pid: 3)\n Signal 9 (SIGKILL) received by PID 3\n", 1, "SIGKILL"),
        ("$ x\nstep 1\n", -15, "signal 15 (SIGTERM)"),
        ("$ x\nValueError: old\n\n$ x\nstep 1\n", 7, "exit status 7"),
    ],
)
def test_the_reason_of_a_failure_is_one_line_from_the_log(tmp_path, monkeypatch, log, status, said):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    path = tmp_path / "run.log"
    path.write_text(log)
    reason = runner.why(tmp_path / "none", path, status)
    assert said in reason
    assert reason.endswith("; see run.log")
    assert "\n" not in reason


# ---- reports of hand-made runs


@pytest.fixture
def make_run(tmp_path):
    """Writes the record of a run below `tmp_path`."""
    return functools.partial(write_run, tmp_path)


@pytest.fixture
def two_sides(make_run):
    """Two variants, two rounds; the second round ran on a machine half as fast."""
    gather = {"all_gather": 4 * MIB, "all_reduce": 8}
    a = Side("zero=1")
    b = Side("zero=2")
    for side, word, seconds in ((a, "zero=1", [1.0, 1.5, 2.0]), (b, "zero=2", [2.0, 2.5, 4.0])):
        for number, slower in ((1, 1), (2, 2)):
            times = [60.0, *(slower * each for each in seconds)]
            made = make_run(f"{word.replace('=', '-')}.r{number}", times, word, sent=gather)
            side.runs.append(read_run(made, number))
    return Comparison("cmp", "make compare ...", [a, b], True)


def row(text: str, label: str) -> list[str]:
    """Cells of the first table row of `label`."""
    [line, *_] = [line for line in text.splitlines() if line.startswith(f"| `{label}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_agrees_with_the_runs_own_metrics_to_the_digit(two_sides, tmp_path):
    text = markdown(two_sides)
    for side in two_sides.sides:
        lines = [
            line
            for run in side.runs
            for line in read_metrics(tmp_path / run.name)
            if line["step"] > 1
        ]
        low, middle, high = statistics.quantiles(
            [line["tokens_per_s"] for line in lines], n=4, method="inclusive"
        )
        cells = row(text, side.label)
        assert cells[1] == f"{middle:,.0f} [{low:,.0f} to {high:,.0f}]"
        assert cells[3] == f"{statistics.median(line['step_s'] for line in lines):.4g}"
        assert cells[4] == "1.500 (lowest 1.250)"
        assert cells[5] == f"{4 + 8 / MIB:,.4g}"
        for run in side.runs:
            own = summary(tmp_path / run.name)
            own_cells = [c.strip() for line in text.splitlines() if f"| {run.name} |" in line
                         for c in line.strip("|").split("|")]  # fmt: skip
            assert own_cells[1].startswith(f"{own['tokens_per_s']:,.0f} [")
    # the warm-up step of 60 s is in no number; rounds are paired: both gave 0.6 or so, not 0.3
    assert row(text, "zero=2")[2] == f"{1.5 / 2.5:.3f}"
    assert "Losses agree" in text
    assert "MFU: not known" in text


def test_training_state_of_a_rank_stands_beside_the_peak_where_it_is_on_record(two_sides, make_run):
    assert "state GiB" not in markdown(two_sides)
    for side, gib in zip(two_sides.sides, (0.066, 0.056), strict=True):
        side.runs = [read_run(make_run(f"with-{gib}", [60.0, 1.0, 1.0], state_gib=gib))]
    header, *rows = report.main_rows(two_sides)
    place = header.index("state GiB of a rank")
    assert header[place + 1].startswith("peak ")
    assert [cells[place] for cells in rows] == ["0.066", "0.056"]


def test_a_busy_machine_is_said(two_sides):
    busy = dataclasses.replace(two_sides, loads=[0.5, 20.25])
    assert "load average before the runs 0.5 to 20.2" in markdown(busy)
    assert "**THE MACHINE WAS BUSY: load average up to 20.2 on 2 cores" in markdown(busy)
    quiet = dataclasses.replace(two_sides, loads=[0.5, 2.5])
    assert "BUSY" not in markdown(quiet)


def test_communication_is_reported_by_kind(two_sides):
    section = markdown(two_sides).partition("## Communication")[2]
    assert "|  | all_gather | all_reduce |" in section
    assert row(section, "zero=1")[1:] == ["4", "8 bytes"]


def test_losses_that_differ_are_said_loudly(two_sides, make_run, monkeypatch, tmp_path, capsys):
    made = make_run("z3", [9, 1, 1, 1], "zero=3", losses=[8.0, 7.0, 6.0 * (1 + 2e-6), 5.0])
    two_sides.sides.append(Side("zero=3", [read_run(made)]))
    result = two_sides.agreement()
    assert result.is_broken
    assert result.at == (3, "z3")
    assert result.largest == pytest.approx(2e-6)
    assert result.by_side["zero=2"] == 0
    assert "**LOSSES DO NOT AGREE: 2e-06 apart at step 3 in z3" in markdown(two_sides)
    assert "WARNING: LOSSES DO NOT AGREE" in terminal(two_sides)
    monkeypatch.setattr(compare.pictures, "draw", lambda shown, folder: ())
    assert compare.report(two_sides, tmp_path) == 1
    # within the bound, and a loss that is not finite
    base, near, bad = ({1: 8.0}, {1: 8.0 * (1 + 9e-7)}, {1: None})
    assert results.difference(base[1], near[1]) < results.SAME_LOSS
    assert results.difference(base[1], bad[1]) == float("inf")


def test_runs_that_do_other_work_are_noted_not_judged(make_run):
    sides = [
        Side("a", [read_run(make_run("a", [9, 1, 1]))]),
        Side("b", [read_run(make_run("b", [9, 1, 1], "batch_tokens=4096", "seed=5",
                                     losses=[7.0, 7.0, 7.0], surroundings={"torch": "2.12"}))]),
    ]  # fmt: skip
    text = markdown(Comparison("a-vs-b", "make compare", sides, False))
    assert "NOT THE SAME WORK: batch_tokens differ" in text
    assert "NOT THE SAME SURROUNDINGS: torch differs" in text
    assert "Losses are not compared: the runs differ in seed, batch_tokens" in text
    assert "DO NOT AGREE" not in text
    assert "| batch_tokens | 2048 | 4096 |" in text


def test_other_batches_under_the_same_recipe_are_found_by_the_ledger(make_run):
    one, two = (read_run(make_run(name, [9, 1, 1])) for name in ("one", "two"))
    two = dataclasses.replace(two, batches=dict.fromkeys(two.batches, "other"))
    result = results.agreement([Side("one", [one]), Side("two", [two])])
    assert not result.same_data
    assert "not trained on the same batches" in result.reason


def test_a_bf16_comparison_has_no_bound(make_run):
    sides = [Side(name, [read_run(make_run(name, [9, 1, 1], "precision=bf16", f"zero={zero}",
                                           losses=[8.0, 7.0, 6.0 + zero / 1000]))])
             for name, zero in (("one", 1), ("two", 2))]  # fmt: skip
    assert not results.agreement(sides).is_broken
    assert "no bound outside fp32" in markdown(Comparison("c", "", sides, True))


def test_a_failed_variant_is_a_row_with_its_reason(two_sides, tmp_path):
    two_sides.sides.insert(0, Side("zero=3", reason="out | of memory; see a.log"))
    text = markdown(two_sides)
    assert "| `zero=3` | failed: out \\| of memory; see a.log |" in text
    assert row(text, "zero=1")[2] == "1"  # the first that ran is the base
    pictures.draw(two_sides, tmp_path)
    tensorboard_pages.write(two_sides, tmp_path)
    assert not (tmp_path / "tensorboard" / "zero=3").exists()


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ("a", "names 1 run; give two or more"),
        ("a a b", "a is given twice"),
        ("a none", "none: no record of a run"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(make_run, monkeypatch, capsys, runs, said):
    for name in ("a", "b"):
        made = make_run(name, [9, 1, 1])
    monkeypatch.setattr(compare, "RUNS", made.parent)
    assert compare.main(["--runs", runs]) == 93
    assert said in capsys.readouterr().err
    assert compare.main(["--runs", "a b", "--sweep", "zero=1,2"]) == 93
    assert "RUNS takes runs that exist, SWEEP makes new ones" in capsys.readouterr().err


# ---- ranked by loss


@pytest.fixture
def learned(make_run):
    """Three learning rates x two seeds; the best two are closer than their seeds."""
    sides = []
    for rate, finals in (("1e-3", (3.5, 3.6)), ("2e-3", (3.0, 3.2)), ("4e-3", (3.1, 3.15))):
        side = Side(f"optim.lr={rate}")
        for number, final in enumerate(finals, start=1):
            words = (f"optim.lr={rate}", f"seed={number}")
            val = {2: 5.0, 4: final}
            made = make_run(f"{rate}.r{number}", [9, 1, 1, 1], *words, val=val)
            side.runs.append(read_run(made, number))
        sides.append(side)
    return Comparison("lr", "make compare ...", sides, True, rank="val_loss")


def test_a_comparison_ranked_by_loss_shows_order_spread_and_what_is_not_told_apart(learned):
    text = markdown(learned)
    assert "2 seeds, the same for every variant: 1, 2" in text
    winner = "Best: `optim.lr=2e-3` with a validation loss of 3.1000 nats per token."
    assert f"{winner} NOT DISTINGUISHABLE" in text
    assert "over seeds: `optim.lr=4e-3`." in text
    assert row(text, "optim.lr=2e-3") == [
        "`optim.lr=2e-3`", "1", "3.1000", "3.0000 to 3.2000", "-", "-",
    ]  # fmt: skip
    assert row(text, "optim.lr=4e-3")[1:] == ["2", "3.1250", "3.1000 to 3.1500", "+0.0250", "NO"]
    assert row(text, "optim.lr=1e-3")[1:] == ["3", "3.5500", "3.5000 to 3.6000", "+0.4500", "yes"]
    shown = terminal(learned)
    assert shown.index("optim.lr=2e-3  1 ") < shown.index("optim.lr=4e-3  2 ")
    assert "NOT DISTINGUISHABLE from it" in shown
    learned.sides.append(Side("optim.lr=9", reason="out of memory"))
    assert "| `optim.lr=9` | - | failed: out of memory | - | - | - |" in markdown(learned)
    alone = dataclasses.replace(learned, sides=[Side(s.label, s.runs[:1]) for s in learned.sides])
    assert "1 seed: another seed could change the order (SEEDS=3)" in markdown(alone)
    assert "One seed: it is not known whether" in markdown(alone)


def test_the_picture_of_a_sweep_by_loss_has_every_variant_and_the_swept_value(learned, tmp_path):
    assert pictures.draw(learned, tmp_path)[0] == "validation.png"
    figure = pictures.validation(learned)
    left, right = figure.axes
    assert [line.get_ydata()[-1] for line in left.lines] == pytest.approx([3.55, 3.1, 3.125])
    assert right.get_xscale() == "log"
    assert right.get_xlabel() == "optim.lr"
    dots = [list(line.get_ydata()) for line in right.lines[:3]]
    assert dots == [[3.5, 3.6], [3.0, 3.2], [3.1, 3.15]]
    assert list(right.lines[3].get_xdata()) == [1e-3, 2e-3, 4e-3]
    tensorboard_pages.write(learned, tmp_path)
    seen = EventAccumulator(str(tmp_path / "tensorboard" / "optim.lr=2e-3")).Reload()
    assert [event.value for event in seen.Scalars("result/val_loss")] == pytest.approx([3.1])


def test_runs_that_exist_can_be_ranked_by_loss(make_run, monkeypatch, capsys):
    for name, final in (("a", 3.5), ("b", 3.1)):
        place = make_run(name, [9, 1, 1], val={3: final}).parent
    monkeypatch.setattr(compare, "RUNS", place)
    assert compare.main(["--runs", "a b", "--rank", "val_loss"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("b        1      3.1000") < shown.index("a        2      3.5000")
    assert "+0.4000" in shown
    assert 'RUNS="a b" NAME=a-vs-b RANK=val_loss' in (place / "a-vs-b" / "report.md").read_text()


def test_losses_of_layouts_agree_seed_by_seed(make_run):
    """Two seeds give other losses; each run is held against the base of its own seed."""
    sides = []
    for zero in (1, 2):
        side = Side(f"zero={zero}")
        for number, losses in enumerate(([8.0, 7.0, 6.0], [8.5, 7.5, 6.5]), start=1):
            words = (f"zero={zero}", f"seed={number}")
            made = make_run(f"z{zero}.r{number}", [9, 1, 1], *words, losses=losses)
            side.runs.append(read_run(made, number))
        sides.append(side)
    result = results.agreement(sides)
    assert (result.largest, result.reason, result.same_data) == (0.0, None, True)
    sides[1].runs[1].lines[2]["loss"] *= 1 + 1e-5
    assert results.agreement(sides).is_broken
    assert results.agreement(sides).at == (3, "z2.r2")


# ---- what is looked at


def beyond_their_axis(figure) -> set[Text]:
    """Labels of ticks that are not drawn because their axis ends before."""
    found = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                if not low <= tick.get_loc() <= high:
                    found |= {tick.label1, tick.label2}
    return found


def test_pictures_show_every_name_whole(two_sides):
    two_sides.sides.append(Side("zero=3 ds.zero_optimization.overlap_comm=true micro_batch=16",
                                reason="no"))  # fmt: skip
    for figure in (pictures.speed(two_sides), pictures.losses(two_sides)):
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        seen = set()
        for text in set(figure.findobj(Text)) - beyond_their_axis(figure):
            if not text.get_text().strip() or not text.get_visible():
                continue
            box = text.get_window_extent()
            seen.add(text.get_text())
            assert box.x0 >= -1, text.get_text()
            assert box.x1 <= width + 1, text.get_text()
            assert box.y0 >= -1, text.get_text()
            assert box.y1 <= height + 1, text.get_text()
        assert {"zero=1", "zero=2"} <= seen


def test_tensorboard_gets_one_run_per_variant_with_the_tables_numbers(two_sides, tmp_path):
    pictures_of = pictures.draw(two_sides, tmp_path)
    shown = dataclasses.replace(two_sides, pictures=pictures_of)
    tensorboard_pages.write(shown, tmp_path)
    tensorboard_pages.write(shown, tmp_path)  # written anew, not beside
    place = tmp_path / "tensorboard"
    assert sorted(path.name for path in place.iterdir()) == ["report", "zero=1", "zero=2"]
    for side in shown.sides:
        seen = EventAccumulator(str(place / side.label)).Reload()
        speeds = {event.step: event.value for event in seen.Scalars("throughput/tokens_per_s")}
        assert sorted(speeds) == [2, 3, 4]  # without the warm-up step
        assert [event.step for event in seen.Scalars("loss/train")] == [1, 2, 3, 4]
        [result] = seen.Scalars("result/tokens_per_s")
        assert result.value == pytest.approx(side.median("tokens_per_s"), rel=1e-6)
        content = seen.PluginTagToContent("hparams")
        session = hparams.parse_session_start_info_plugin_data(
            content[hparams.SESSION_START_INFO_TAG]
        )
        assert dict(session.hparams).keys() == {"zero"}
        assert session.group_name == f"{side.label} (cmp)"
        experiment = hparams.parse_experiment_plugin_data(content[hparams.EXPERIMENT_TAG])
        titles = [info.display_name for info in experiment.metric_infos]
        assert titles[:2] == ["tokens/s, all ranks (median)", "peak memory of a rank, GiB"]
        assert not any("MFU" in title for title in titles)  # not known: no empty column
    seen = EventAccumulator(str(place / "report")).Reload()
    assert sorted(seen.Tags()["images"]) == ["cmp/losses", "cmp/speed"]
    [picture] = seen.Images("cmp/speed")
    assert picture.width > 1000
    assert re.search(r"# cmp", seen.Tensors("cmp/report")[0].tensor_proto.string_val[0].decode())


def test_columns_of_a_report_have_as_many_cells_as_its_header(two_sides):
    two_sides.sides.append(Side("zero=3", reason="no"))
    for rows in (report.main_rows(two_sides), report.run_rows(two_sides)):
        assert {len(cells) for cells in rows} == {len(rows[0])}


def test_extra_scalars_of_the_engine_reach_curves_and_report_of_a_comparison(two_sides):
    assert "Numbers that the engine adds" not in report.markdown(two_sides)
    for number, run in enumerate(two_sides.sides[0].runs):
        for line in run.lines:
            line["scalars"] = {"router/z_loss": line["step"] + number, "gone": None}
    drawn = tensorboard_pages.curves(two_sides.sides[0])
    middle = (len(two_sides.sides[0].runs) - 1) / 2
    assert [line["scalars"] for line in drawn.values()] == [
        {"router/z_loss": step + middle} for step in drawn
    ]
    assert all(
        "scalars" not in line for line in tensorboard_pages.curves(two_sides.sides[1]).values()
    )
    steady = [line["step"] + n for n, r in enumerate(two_sides.sides[0].runs) for line in r.steady]
    assert report.scalar_rows(two_sides) == [
        ["", "router/z_loss"],
        [f"`{two_sides.sides[0].label}`", f"{statistics.median(steady):.6g}"],
    ]
    page = report.markdown(two_sides)
    assert "## Numbers that the engine adds, medians over steps\n\n|  | router/z_loss |" in page
