"""Alerts: an event, a line, and a command that can neither harm the run nor see a secret."""

from __future__ import annotations

import stat
import sys
import threading
import time
from pathlib import Path

import pytest
from clones import background
from ranks import PATIENCE, ROOT

from base.errors import UserError
from recipes.compose import compose
from recipes.faults import Alerts as Knobs
from record.alerts import AlertSender


def program(folder, text: str) -> str:
    path = folder / "tell"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def alerts(command: list[str], timeout_s: int = 60):
    events, lines = [], []
    knobs = Knobs(command=tuple(command), timeout_s=timeout_s)
    made = AlertSender(
        "a", knobs, lambda kind, **fields: events.append((kind, fields)), lines.append
    )
    return made, events, lines


def test_the_command_gets_the_text_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t-Planted-91")
    out = tmp_path / "out"
    command = [
        program(tmp_path, f'env > "{out}"; echo "$@" >> "{out}"; cat >> "{out}"'),
        "$(id)",
        ";x",
    ]
    alert, events, lines = alerts(command)
    alert("stop", "a: stopped; key s3cr3t-Planted-91 $(id)", step=7, token="abc")
    alert.close()
    reported = out.read_text()
    assert "s3cr3t" not in reported + str(events) + str(lines)
    assert "ALERT_KIND=stop" in reported
    assert "ALERT_RUN=a" in reported
    assert "step: 7" in reported
    assert "$(id) ;x" in reported  # words arrive as they were written: there is no shell
    assert events == [("stop", {"text": "a: stopped; key *** $(id)", "step": 7, "token": "***"})]
    assert lines == ["alert: a: stopped; key *** $(id)"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [("exit 3", "ended with status 3"), ("sleep 600 & sleep 600", "within 1 s and was killed")],
)
def test_a_command_that_fails_or_hangs_is_an_event_and_no_more(tmp_path, text, reason):
    alert, events, _ = alerts([program(tmp_path, text)], timeout_s=1)
    alert("roll_back", "x")
    alert.close()
    assert events[0][0] == "roll_back"
    assert events[1][0] == "alert_failed"
    assert reason in events[1][1]["reason"]


def test_no_command_outlives_the_run_however_many_alerts_wait(tmp_path):
    pids = tmp_path / "pids"
    alert, events, _ = alerts([program(tmp_path, f'echo $$ >> "{pids}"; sleep 600')], timeout_s=1)
    for _ in range(4):
        alert("roll_back", "x")
    alert.close()
    for pid in pids.read_text().split():
        assert eventually(lambda pid=pid: not Path("/proc", pid).exists())
    failed = [fields["reason"] for kind, fields in events if kind == "alert_failed"]
    assert len(failed) == 4
    assert failed[-1] == "the run ended before it was sent"


def test_no_command_outlives_a_run_that_was_killed(tmp_path):
    pids = tmp_path / "pids"
    command = program(tmp_path, f'sleep 600 &\necho $$ $! > "{pids}.new"; mv "{pids}.new" "{pids}"'
                                "\nsleep 600; exit")  # fmt: skip
    code = (
        "import time; from recipes.faults import Alerts as Knobs;"
        "from record.alerts import AlertSender;"
        f"AlertSender('a', Knobs(command=({command!r},)), lambda *a, **k: 0, print)('x', 'y');"
        "time.sleep(600)"
    )
    run = background(ROOT, [sys.executable, "-c", code])
    assert eventually(pids.exists)
    run.kill()
    run.wait()
    for pid in pids.read_text().split():
        assert eventually(lambda pid=pid: not Path("/proc", pid).exists())


def eventually(is_so, within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s * PATIENCE
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_so()


def test_a_command_that_is_not_there_is_an_event():
    alert, events, _ = alerts(["/nowhere/tell"])
    alert("roll_back", "x")
    alert.close()
    assert "No such file" in events[1][1]["reason"]


def test_without_a_command_nothing_is_started():
    before = threading.active_count()
    alert, events, _ = alerts([])
    alert("roll_back", "x")
    alert.close()
    assert threading.active_count() == before
    assert len(events) == 1


def test_a_command_that_is_no_list_or_holds_a_secret_is_refused():
    with pytest.raises(UserError) as refused:
        compose("tiny", ["alerts.command=mail", "alerts.timeout_s=0"])
    assert "a list has brackets; write alerts.command=[mail]" in str(refused.value)
    assert "alerts.timeout_s=0" in str(refused.value)
    for words in (
        "--token,abcdefgh",
        "-u,me:abcdefgh",
        "'https://hooks.slack.com/services/T012AB3CD/B01/abcdefgh'",
    ):
        with pytest.raises(UserError, match="looks like a secret"):
            compose("tiny", [f"alerts.command=[curl,{words}]"])
    with pytest.raises(UserError, match=r"health.tolerant=200 is more than health.window=100"):
        compose("tiny", ["health.tolerant=200", "health.window=100"])
