"""The progress display of a run: one live line in a terminal, plain lines in a pipe.

    terminal   tiny  120/400  [#######-----------------]  loss 3.4120  val 3.5010  9,876 tokens/s
    pipe       step 120/400  loss 3.4120  grad norm 0.912  lr 3.00e-04  9,876 tokens/s  0.41 s/step

Rule: it prints the numbers of metrics lines; the only number of its own is the time left. A line
that does not fit the terminal loses whole fields, the least important first. In a pipe every
`log.every`-th step is printed, and also the first, the last, each step with an evaluation and each
skipped step.

Units: tokens/s over all ranks; the time left is wall-clock time with evaluation and saves.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from base.units import duration
from base.values import counted

REDRAW_S = 0.1  # nobody reads a faster line, and it costs time over a slow connection
BAR_WIDTH = 24
GREEN, YELLOW, PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[0m"
TO_LINE_START_AND_CLEAR = "\r\x1b[2K"


class Console:
    """The progress display of one run, on the rank that writes the metrics.

    `total_steps` is the last step that this process will reach, `after_step` the step from which it
    goes on. `now` gives seconds, `columns` the width of the terminal; tests replace both.
    """

    def __init__(
        self,
        name: str,
        total_steps: int,
        *,
        after_step: int = 0,
        every: int = 1,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] = lambda: shutil.get_terminal_size().columns,
    ):
        self._name, self._total, self._every = name, total_steps, every
        self._after_step, self._now, self._columns = after_step, now, columns
        self._stream = sys.stdout if stream is None else stream
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_color = self._is_live and not os.environ.get("NO_COLOR")
        self._first: tuple[int, float] | None = None  # step and time where the estimate begins
        self._val: tuple[int, float | None] | None = None  # newest evaluation: step, loss
        self._shown = ""
        self._drawn_at = float("-inf")
        self._lock = threading.Lock()

    def step(self, line: Mapping[str, Any]) -> None:
        """Show one line of the metrics."""
        step, now = line["step"], self._now()
        if self._first is None:
            self._first = (step, now)
        left_s = self._left_s(step, now)
        is_evaluated = "val_loss" in line
        if is_evaluated:
            self._val = (step, line["val_loss"])
        is_last = step >= self._total
        if self._is_live:
            if is_last or is_evaluated or now - self._drawn_at >= REDRAW_S:
                self._drawn_at = now
                fields = live_fields(self._name, line, self._total, self._val, left_s)
                self._draw(fit(fields, self._columns() - 1), line["skipped"])
            return
        is_due = step % self._every == 0 or step == self._after_step + 1
        if is_due or is_last or is_evaluated or line["skipped"]:
            self._put(plain_text(line, self._total, left_s) + "\n")

    def log(self, text: str) -> None:
        """Print a message on a line of its own; the live line stays below it."""
        clear = TO_LINE_START_AND_CLEAR if self._shown else ""
        self._put(f"{clear}{text}\n{self._shown}")

    def busy(self, text: str, is_due: bool) -> None:
        """Show where a long step is: in the live line, or in a pipe where a line is due."""
        if self._is_live:
            self._draw(text[: max(1, self._columns() - 1)], is_skipped=False)
        elif is_due:
            self._put(f"{text}\n")

    def close(self) -> None:
        """End the live line, so that later output starts on a new one; may be called twice."""
        if self._shown:
            self._put("\n")
            self._shown = ""

    def _put(self, text: str) -> None:
        with self._lock:  # a thread shows long steps (runtime.log.long_step)
            self._stream.write(text)
            self._stream.flush()

    def _draw(self, text: str, is_skipped: bool) -> None:
        color = YELLOW if is_skipped else GREEN
        if self._has_color and (end := text.find("]")) > 0:  # only the bar, numbers stay readable
            begin = text.find("[")
            text = f"{text[:begin]}{color}{text[begin : end + 1]}{PLAIN}{text[end + 1 :]}"
        self._shown = text
        self._put(TO_LINE_START_AND_CLEAR + text)

    def _left_s(self, step: int, now: float) -> float | None:
        first_step, first_now = self._first
        # The first step compiles and allocates: no estimate is made from it.
        if step == first_step or step >= self._total:
            return None
        return (now - first_now) / (step - first_step) * (self._total - step)


def live_fields(
    name: str,
    line: Mapping[str, Any],
    total: int,
    val: tuple[int, float | None] | None,
    left_s: float | None,
) -> list[tuple[int, str]]:
    """(importance, text) of each field of the live line, in display order; 0 is never dropped."""
    done = min(1.0, line["step"] / total)
    filled = int(done * BAR_WIDTH)
    bar = f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}]"
    fields = [
        (3, name),
        (0, f"{line['step']}/{total}"),
        (6, bar),
        (1, f"loss {number(line['loss'], '.4f')}"),
        (4, "" if val is None else f"val {number(val[1], '.4f')}{at_step(val[0], line['step'])}"),
        (2, f"{number(line['tokens_per_s'], ',.0f')} tokens/s"),
        (7, "" if line["mfu"] is None else f"MFU {line['mfu']:.1%}"),
        (5, left_text(left_s)),
        (0, f"{line['skipped_steps']} skipped" if line["skipped_steps"] else ""),
    ]
    return [(importance, text) for importance, text in fields if text]


def fit(fields: list[tuple[int, str]], width: int) -> str:
    """The fields joined by two blanks; the least important ones are dropped to fit `width`."""
    fields = list(fields)
    while True:
        text = "  ".join(text for _, text in fields)
        least = max(fields)
        if len(text) <= width or least[0] == 0:
            return text
        fields.remove(least)


def plain_text(line: Mapping[str, Any], total: int, left_s: float | None) -> str:
    """One metrics line for a log file."""
    if line["skipped"] and not line["targets"]:
        return f"step {line['step']:>{len(str(total))}}/{total}  {skipped_text(line)}"
    speed = f"{number(line['tokens_per_s'], ',.0f')} tokens/s"
    if line["tokens_per_s_per_rank"] != line["tokens_per_s"]:
        speed += f" ({number(line['tokens_per_s_per_rank'], ',.0f')} per rank)"
    fields = [
        f"step {line['step']:>{len(str(total))}}/{total}",
        f"loss {number(line['loss'], '.4f')}",
        validation_text(line),
        f"grad norm {number(line['grad_norm'], '.3f')}",
        f"lr {line['lr']:.2e}",
        speed,
        "" if line["mfu"] is None else f"MFU {line['mfu']:.1%}",
        f"{line['step_s']:.2f} s/step",
        left_text(left_s),
        skipped_text(line),
    ]
    return "  ".join(field for field in fields if field)


def left_text(left_s: float | None) -> str:
    """The time left; never 0 s, because steps are left; empty where it is not known."""
    if left_s is None:
        return ""
    return "under 1 s left" if left_s < 1 else f"{duration(left_s)} left"


def at_step(step: int, now: int) -> str:
    """` (step 100)` for a number that was measured at another step than `now`."""
    return "" if step == now else f" (step {step})"


def skipped_text(line: Mapping[str, Any]) -> str:
    """The reason why a step did not move the weights; empty where it did."""
    if not line["skipped"]:
        return ""
    if not line["targets"]:
        return "SKIPPED: nothing to train on (data.skip)"
    if line["grad_norm"] is None:
        return "SKIPPED: gradients not finite"
    return "SKIPPED: an outlier" if line["loss"] is not None else "SKIPPED: loss not finite"


def number(value: float | None, spec: str) -> str:
    """`value` in the given format; None in a metrics line means not finite."""
    return "not finite" if value is None else format(value, spec)


def validation_text(line: Mapping[str, Any]) -> str:
    """The validation loss of a line, in nats per token and in bits per byte where it is known."""
    if "val_loss" not in line:
        return ""
    in_bits = line.get("bits_per_byte")
    text = f"val {number(line['val_loss'], '.4f')}"
    return text if in_bits is None else f"{text} ({in_bits:.4f} bits per byte)"


def summary_text(summary: Mapping[str, Any]) -> str:
    """The summary of a run (runtime.log.metrics.summary) in a few lines, for the end of a run."""
    if summary["last_step"] is None:
        return "no step was recorded"
    lines = [
        f"loss  {number(summary['first_loss'], '.4f')} (step {summary['first_step']}) -> "
        f"{number(summary['last_loss'], '.4f')} (step {summary['last_step']})"
    ]
    if summary["val_loss"] is not None:
        at = at_step(summary["val_step"], summary["last_step"])
        in_bits = summary["bits_per_byte"]
        in_bits = "" if in_bits is None else f" ({in_bits:.4f} bits per byte)"
        lines[0] += f"; validation {summary['val_loss']:.4f}{in_bits}{at}"
        if summary["best_val_loss"] != summary["val_loss"]:
            lines[0] += f", best {summary['best_val_loss']:.4f} at step {summary['best_val_step']}"
    if summary["tokens_per_s"] is None:
        lines.append("speed only the first step was timed, and that one is warm-up")
    else:
        text = (
            f"speed {summary['tokens_per_s']:,.0f} tokens/s over all ranks, median of "
            f"{counted(summary['num_steady_steps'], 'step')} (quartiles"
            f" {summary['tokens_per_s_p25']:,.0f} to "
            f"{summary['tokens_per_s_p75']:,.0f}); first step, evaluation and saves excluded"
        )
        if summary["other_ranks"]:
            text += f"; only the steps on {counted(summary['ranks'], 'rank')}"
        lines.append(text + ("" if summary["mfu"] is None else f"; MFU {summary['mfu']:.1%}"))
    if summary["peak_memory_gib"] is not None:
        lines.append(
            f"peak  {summary['peak_memory_gib']:.2f} GiB {summary['memory_of']} memory of rank 0"
        )
    if summary["skipped_steps"]:
        lines.append(
            f"      {counted(summary['skipped_steps'], 'step')} skipped (without an update)"
        )
    return "\n".join(lines)
