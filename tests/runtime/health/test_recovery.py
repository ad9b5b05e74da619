"""The target of a rewind by policy, and the conclusion from two replays of a step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from base.errors import UserError
from checkpoint.lineage import lineage
from commands import replay
from commands.replay import ComparedStep, ReplayRequest, conclude
from recipes.faults import Health as Knobs
from record.records import record_event
from runtime.health.recovery import RecoveryPlan, Saved, plan, recover
from runtime.health.verdict import HealthState, Judgement, Verdict

KNOBS = Knobs(rewind=100, skip=200)


def saves(*steps: int, sick: tuple[int, ...] = ()) -> list[Saved]:
    return [Saved(step, step + 10, step not in sick) for step in steps]


def test_the_newest_healthy_checkpoint_that_is_old_enough_is_taken():
    """Data steps run 10 ahead of steps here: some were left out before."""
    there = saves(50, 100, 150, 200, 250)
    assert plan(there, onset=255, data_step=270, knobs=KNOBS) == RecoveryPlan(150, (160, 360))
    assert plan(there[::-1], 255, 700, KNOBS) == RecoveryPlan(150, (160, 701))
    assert plan(saves(50, 100, 150, sick=(150,)), 255, 270, KNOBS) == RecoveryPlan(100, (110, 310))


def test_where_none_is_old_enough_the_oldest_healthy_one_before_the_trouble_is():
    assert plan(saves(240, 250, 260), 255, 270, KNOBS) == RecoveryPlan(240, (250, 450))
    assert plan(saves(255, 260), 255, 270, KNOBS) is None
    assert plan(saves(240, sick=(240,)), 255, 270, KNOBS) is None
    assert plan([], 255, 270, KNOBS) is None


def test_without_a_checkpoint_the_run_stops_and_says_what_to_do(tmp_path):
    """As `optim.lr` far too high does within the first steps."""
    reported = []
    record = SimpleNamespace(
        alert=lambda kind, text, **facts: reported.append((kind, text, facts)),
        close=lambda cause, **facts: reported.append((cause,)),
    )
    health = HealthState(bad=((3, 2), (4, 3), (5, 4)), skips_in_a_row=3)
    judged = Judgement(Verdict.ROLL_BACK, health, "not finite in 3 steps in a row", True, onset=3)
    data = SimpleNamespace(step=5, data_step=4)
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    with pytest.raises(UserError, match=r"no healthy checkpoint from before step 3.*data\.skip"):
        recover(run, data, judged, KNOBS, record)
    assert [entry[0] for entry in reported] == ["stop", "gave_up"]
    assert (run / reported[0][2]["bundle"] / "verdict.json").is_file()
    assert not (run / "history.jsonl").exists()


def steps(*losses: float | None, batch: str = "b", norm: float = 0.5) -> list[ComparedStep]:
    return [
        ComparedStep(n, loss, norm, loss is None, batch) for n, loss in enumerate(losses, start=1)
    ]


def test_equal_bits_twice_clear_the_hardware():
    found = conclude(steps(2.0, None), steps(2.0, None), steps(2.0, None), True)
    assert found.kind == "reproducible"


def test_replays_that_part_or_agree_against_the_record_make_it_suspect():
    one, other = steps(2.0, 1.9), steps(2.0, 1.9 + 2**-50)
    assert conclude(one, one, other, False).kind == "hardware-suspect"
    against = conclude(other, one, one, True)
    assert against.kind == "hardware-suspect"
    assert "at step 2" in against.text
    assert conclude(one, steps(2.0, None), steps(2.0, None), True).kind == "hardware-suspect"


def test_another_layout_may_differ_by_rounding_and_another_batch_by_anything():
    one, other = steps(2.0, 1.9), steps(2.0, 1.9 * (1 + 1e-7))
    found = conclude(one, other, other, False)
    assert found.kind == "differs-by-layout"
    assert "1.0e-07, within what" in found.text
    far = steps(2.0, 2.9)
    assert "more than" in conclude(one, far, far, False).text
    changed = steps(2.0, 1.9, batch="c")
    assert conclude(one, changed, changed, True).kind == "another-batch"


def test_a_step_is_repeated_from_the_newest_whole_checkpoint_or_from_the_start(
    tmp_path, monkeypatch, capsys
):
    there = [(step, tmp_path / f"step-{step}") for step in (10, 20, 30)]
    broken: set[int] = set()
    monkeypatch.setattr(replay, "committed", lambda folder, chain: there)
    monkeypatch.setattr(
        replay, "verify", lambda path, depth: ["flipped"] if int(path.name[5:]) in broken else []
    )

    def before(step: int):
        order = SimpleNamespace(folder=tmp_path, lineage=lineage([]), step=step)
        return ReplayRequest.checkpoint_before(order)

    for step, _ in there:
        record_event(tmp_path, "saved", attempt=1, segment=0, step=step)
    assert before(30) == there[1]
    assert before(10) == before(1) == (0, None)
    broken.add(20)
    assert before(25) == there[0]
    assert "step-20 is damaged: flipped" in capsys.readouterr().err
    broken.add(10)
    with pytest.raises(UserError, match="no whole checkpoint from before it"):
        before(25)
