"""runtime.log.console: the live line on a terminal, plain lines in a pipe."""

import io

import pytest

from base.units import duration
from runtime.log.console import Console, fit, live_fields, plain_text


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self, text: str | None = None) -> list[str]:
        """The lines that a person sees, after carriage returns and erasures."""
        lines = [""]
        for part in (self.getvalue() if text is None else text).split("\n"):
            lines[-1] = part.split("\r\x1b[2K")[-1]
            lines.append("")
        return [line for line in lines if line]


def line(step, **changes):
    fields = dict(
        step=step,
        loss=5.0,
        grad_norm=1.25,
        lr=3e-4,
        tokens_per_s=12345.0,
        tokens_per_s_per_rank=12345.0,
        mfu=None,
        step_s=0.5,
        targets=100,
        skipped=False,
        skipped_steps=0,
    )
    return fields | changes


@pytest.fixture
def seconds():
    return [0.0]


@pytest.fixture
def console(seconds, monkeypatch):
    """A factory of consoles on a fake clock; returns (console, stream)."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def make(stream, total=10, columns=120, **options):
        return Console(
            "tiny", total, stream=stream, now=lambda: seconds[0], columns=lambda: columns, **options
        )

    return make


def test_a_terminal_shows_one_line_that_stays_in_place(console, seconds):
    terminal = Terminal()
    shown = console(terminal)
    for step in range(1, 11):
        seconds[0] += 1.0
        shown.step(line(step, loss=5.0 - step / 10))
    shown.close()
    shown.close()
    [last] = terminal.screen()
    assert "10/10" in last
    assert "loss 4.0000" in last
    assert "12,345 tokens/s" in last
    assert terminal.getvalue().count("\n") == 1


def test_time_left_comes_from_the_steps_after_the_first(console, seconds):
    terminal = Terminal()
    shown = console(terminal)
    seconds[0] = 60.0  # a long first step is no estimate
    shown.step(line(1))
    assert "left" not in terminal.getvalue()
    seconds[0] = 62.0
    shown.step(line(2))
    assert "16 s left" in terminal.screen()[-1]
    shown.step(line(10))
    assert "left" not in terminal.screen()[-1]


def test_the_validation_loss_stays_on_the_live_line(console, seconds):
    terminal = Terminal()
    shown = console(terminal)
    shown.step(line(1, val_loss=5.5))
    seconds[0] = 1.0
    shown.step(line(2))
    assert "val 5.5000" in terminal.screen()[-1]


def test_the_live_line_is_not_redrawn_more_often_than_anyone_can_read(console, seconds):
    terminal = Terminal()
    shown = console(terminal, total=1000)
    for step in range(1, 501):
        seconds[0] += 0.001
        shown.step(line(step))
    assert terminal.getvalue().count("\r") <= 6
    shown.step(line(1000))
    assert "1000/1000" in terminal.screen()[-1]


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 100, 200])
def test_a_narrow_terminal_loses_whole_fields_never_half_a_name(columns):
    fields = live_fields("tiny", line(120, mfu=0.4), 400, (120, 3.5), 151.0)
    text = fit(fields, columns - 1)
    assert len(text) < columns
    assert set(text.split("  ")) <= {field for _, field in fields}
    assert "120/400" in text


def test_colour_is_used_on_a_terminal_and_not_with_no_color(console, monkeypatch):
    terminal = Terminal()
    console(terminal).step(line(1))
    assert "\x1b[32m[" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    console(plain).step(line(1))
    assert "\x1b[3" not in plain.getvalue()


def test_a_message_stands_above_the_live_line(console):
    terminal = Terminal()
    shown = console(terminal)
    shown.step(line(1))
    shown.log("step 1: a warning")
    assert terminal.screen()[0] == "step 1: a warning"
    assert "1/10" in terminal.screen()[1]


def test_a_pipe_gets_plain_lines_first_last_every_nth_evaluations_and_skips(console, seconds):
    pipe = io.StringIO()
    shown = console(pipe, every=4)
    for step in range(1, 11):
        seconds[0] += 1.0
        changes = {"val_loss": 4.5} if step == 6 else {}
        if step == 7:
            changes = dict(skipped=True, skipped_steps=1, grad_norm=None)
        if step == 8:
            nothing = dict.fromkeys(("loss", "grad_norm", "tokens_per_s"))
            changes = dict(skipped=True, skipped_steps=2, targets=0, **nothing)
        shown.step(line(step, **changes))
    shown.log("done")
    shown.close()
    text = pipe.getvalue()
    assert "\x1b" not in text
    assert "\r" not in text
    *steps, done = text.splitlines()
    assert [int(row.split()[1].split("/")[0]) for row in steps] == [1, 4, 6, 7, 8, 10]
    assert "val 4.5000" in steps[2]
    assert "grad norm not finite" in steps[3]
    assert steps[3].endswith("SKIPPED: gradients not finite")
    assert steps[4] == "step  8/10  SKIPPED: nothing to train on (data.skip)"
    assert done == "done"


def test_the_first_step_of_a_resumed_run_is_printed(console):
    pipe = io.StringIO()
    shown = console(pipe, every=100, after_step=5)
    for step in (6, 7):
        shown.step(line(step))
    assert [row.split()[1] for row in pipe.getvalue().splitlines()] == ["6/10"]


def test_plain_lines_are_aligned_and_name_their_scope():
    text = plain_text(line(7, tokens_per_s_per_rank=6172.5, mfu=0.4123), 100, 3600.0)
    assert text == (
        "step   7/100  loss 5.0000  grad norm 1.250  lr 3.00e-04  12,345 tokens/s (6,172 per rank)"
        "  MFU 41.2%  0.50 s/step  1 h 00 min left"
    )


def test_a_dumb_terminal_is_treated_as_a_pipe(console, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    console(terminal).step(line(1))
    assert terminal.getvalue().startswith("step  1/10  loss 5.0000")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (45, "45 s"),
        (59.6, "1 min 00 s"),
        (151, "2 min 31 s"),
        (11100, "3 h 05 min"),
        (187200, "2 d 04 h"),
    ],
)
def test_durations_have_two_units(seconds, text):
    assert duration(seconds) == text


def test_a_validation_loss_of_an_earlier_step_names_its_step():
    fields = [text for _, text in live_fields("tiny", line(114), 400, (100, 3.5), None)]
    assert "val 3.5000 (step 100)" in fields
    fields = [text for _, text in live_fields("tiny", line(100), 400, (100, 3.5), None)]
    assert "val 3.5000" in fields


def test_no_time_left_is_never_printed_while_steps_are_left():
    assert "under 1 s left" in plain_text(line(398), 400, 0.3)
    assert "0 s left" not in plain_text(line(398), 400, 0.3)
    assert "2 s left" in plain_text(line(398), 400, 1.6)
