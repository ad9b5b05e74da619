"""Tasks on several processes, with one progress bar.

Rule: the error raised is that of the first failing task in order, for any number of workers: tasks
before it are waited for, tasks after it are stopped. No worker outlives the process that started
it.

Progress is counted in bytes. Workers are started afresh (spawn), each with its own tokenizer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from tqdm import tqdm

from base.errors import UserError
from data.corpus.tokenizer import TextTokenizer
from data.text.encoding import Encoder

POLL_S = 0.25

_encoder: Encoder | None = None
_advance: Callable[[int], None] | None = None


def run_tasks(
    work: Callable,
    tasks: Sequence,
    workers: int,
    *,
    title: str,
    total_bytes: int,
    done_bytes: int = 0,
    tokenizer: TextTokenizer | None = None,
    engine: str = "tokenizers",
    on_done: Callable[[int, Any], None] = lambda number, result: None,
) -> None:
    """Call work(task, encoder, advance) for every task; with one worker in order of the tasks.

    on_done(number of the task, result) is called in this process after each task. Raises the error
    of the first failing task; UserError where a worker was killed.
    """
    if not tasks:
        return
    with progress_bar(title, total_bytes, done_bytes) as bar:
        if workers == 1:
            encoder = Encoder(tokenizer, engine) if tokenizer else None
            for number, task in enumerate(tasks):
                on_done(number, work(task, encoder, bar.update))
            return
        _run_pool(work, tasks, min(workers, len(tasks)), bar, tokenizer, engine, on_done)


def progress_bar(title: str, total: int | None, done: int = 0, unit: str = "B") -> tqdm:
    """A bar with rate and time left on stderr; few lines where that is no terminal."""
    interval_s = 0.5 if sys.stderr.isatty() else 10
    return tqdm(
        total=total,
        initial=done,
        desc=title,
        unit=unit,
        unit_scale=True,
        mininterval=interval_s,
        maxinterval=interval_s,
        smoothing=0.1,
        file=sys.stderr,
    )


def _run_pool(work, tasks, workers, bar, tokenizer, engine, on_done) -> None:
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Event()
    given = tokenizer and (tokenizer.definition, tokenizer.config, tokenizer.eod_token)
    pool = ProcessPoolExecutor(workers, context, _start, (given, engine, counter, stop))
    waiting: dict[Future, int] = {}
    failures: dict[int, BaseException] = {}
    next_task = shown = 0
    try:
        while waiting or next_task < len(tasks):
            if failures and (not waiting or min(waiting.values()) > min(failures)):
                break
            # Few tasks are submitted at once, so that few are begun in vain before a failure.
            while next_task < len(tasks) and len(waiting) <= workers and not failures:
                waiting[pool.submit(_work, work, tasks[next_task])] = next_task
                next_task += 1
            finished, _ = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            with counter.get_lock():
                count = counter.value
            bar.update(count - shown)
            shown = count
            for future in finished:
                number, error = waiting.pop(future), future.exception()
                if error is None:
                    on_done(number, future.result())
                else:
                    failures[number] = error
    except BrokenProcessPool as error:  # raised by submit
        failures[next_task] = error
    finally:
        if waiting:
            stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
    if failures:
        first = failures[min(failures)]
        raise _killed(workers) if isinstance(first, BrokenProcessPool) else first


def _killed(workers: int) -> UserError:
    return UserError(
        f"a worker process was killed, perhaps out of memory (WORKERS={workers}); give the "
        "command again with fewer: finished work is kept"
    )


def _work(work: Callable, task):
    return work(task, _encoder, _advance)


def _start(given, engine: str, counter, stop) -> None:
    """Prepare a worker: its tokenizer, its progress counter, and its end with the parent."""
    global _encoder, _advance
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C for all
    threading.Thread(target=_end_with_parent, args=(stop,), daemon=True).start()
    if given:
        _encoder = Encoder(TextTokenizer(*given), engine)

    def advance(count: int) -> None:
        with counter.get_lock():
            counter.value += count

    _advance = advance


def _end_with_parent(stop) -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive() and not stop.is_set():
        time.sleep(POLL_S)
    os._exit(1)
