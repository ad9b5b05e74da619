"""`make compare` and `make profile` as a user starts them, in a clone; TensorBoard's pages in a
browser. Three launches on two ranks are shared by most of the tests.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from browser import Browser, chromium
from clones import SMALL, background, make_clone
from ranks import PATIENCE, ROOT, run_command

from model.cost import num_parameters
from recipes.compose import compose
from record.records import read_events, read_metrics

# Six launches and a browser, a minute and a half where nobody else works.
pytestmark = pytest.mark.timeout(900)
STEPS, STAGES = 4, (1, 2, 3)
PARAMETERS = num_parameters(compose("tiny", SMALL[1:]).recipe.model)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    clone = make_clone(tmp_path_factory.mktemp("sweep"))
    if (ROOT / "corpora").is_dir():  # what was built before is not built anew
        shutil.copytree(ROOT / "corpora", clone / "corpora")
    return clone


def make(clone: Path, name: str, *words: str, timeout_s: float = 400):
    """`make name words...`, for `compare` with the overrides of a small model."""
    small = " ".join(word for word in SMALL[1:] if not word.startswith("eval_"))
    command = ["make", name, f"PYTHON={sys.executable}", *words]
    if name == "compare" and not any(word.startswith("RUNS=") for word in words):
        command.append(f"OVERRIDES={small}")
    return run_command(command, timeout_s, cwd=clone, PYTHONPATH=str(clone))


SWEEP = ("RECIPE=tiny", "NPROC=2", "SWEEP=zero=1,2,3", f"STEPS={STEPS}", "REPEATS=1", "NAME=by")


@pytest.fixture(scope="module")
def compared(clone) -> Path:
    """A sweep that was ended in its second run, then given again."""
    small = " ".join(word for word in SMALL[1:] if not word.startswith("eval_"))
    process = background(
        clone, ["make", "compare", f"PYTHON={sys.executable}", *SWEEP, f"OVERRIDES={small}"]
    )
    second = clone / "runs" / "by.zero-2.r1"
    deadline = time.monotonic() + 300 * PATIENCE
    while not second.is_dir() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)  # make and the comparison; the run has its own session
    assert process.wait(timeout=60 * PATIENCE) != 0
    assert second.is_dir()
    time.sleep(1)
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"{clone}/pretrain.py" not in listed.stdout  # no rank outlives it
    done = make(clone, "compare", *SWEEP)
    assert done.returncode == 0, done.stdout
    assert "3 variants x 1 round = 3 runs of 4 steps on 2 ranks" in done.stdout
    assert "1/3 zero=1: finished before" in done.stdout
    assert "Losses agree" in done.stdout
    return clone / "runs" / "by"


def runs_of(compared: Path) -> dict[int, Path]:
    return {zero: compared.parent / f"by.zero-{zero}.r1" for zero in STAGES}


def test_an_interrupted_comparison_goes_on_where_it_was(compared):
    attempts = {zero: len(read_events(run, "attempt")) for zero, run in runs_of(compared).items()}
    assert attempts[1] == 1  # finished before, and not started again
    assert attempts[3] == 1
    for run in runs_of(compared).values():
        assert [line["step"] for line in read_metrics(run)] == list(range(1, STEPS + 1))
        assert not (run / "checkpoints").exists()


def test_the_report_has_the_runs_own_numbers_to_the_digit(compared):
    report = (compared / "report.md").read_text()
    for zero, run in runs_of(compared).items():
        lines = [line for line in read_metrics(run) if not line["first_of_attempt"]]
        low, middle, high = statistics.quantiles(
            [line["tokens_per_s"] for line in lines], n=4, method="inclusive"
        )
        assert f"| `zero={zero}` | {middle:,.0f} [{low:,.0f} to {high:,.0f}] |" in report
    assert f"{PARAMETERS:,} parameters, fp32, steps 1 to 4 of 512 tokens, 2 ranks" in report
    assert {path.name for path in compared.iterdir()} >= {"report.md", "speed.png", "losses.png"}


def test_tokens_per_second_equal_a_hand_count_under_accumulation_and_data_parallelism(compared):
    """2 ranks x accumulation 2 x micro-batch 2 x 64 tokens."""
    for run in runs_of(compared).values():
        for line in read_metrics(run):
            assert line["accumulation"] == 2
            assert line["tokens_per_s"] == pytest.approx(2 * 2 * 2 * 64 / line["step_s"])
            assert line["tokens_per_s_per_rank"] == pytest.approx(line["tokens_per_s"] / 2)


def test_losses_of_the_stages_agree_to_a_millionth(compared):
    losses = [[line["loss"] for line in read_metrics(run)] for run in runs_of(compared).values()]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-6)


def test_communication_is_counted_and_equals_the_formula_of_each_stage(compared):
    """fp32, 2 ranks, accumulation 2: gradients once per step in stage 1, per micro-batch above."""
    whole, loss = 4 * PARAMETERS, 4
    seen = {zero: read_metrics(run)[-1] for zero, run in runs_of(compared).items()}
    counted = {zero: line["communication_bytes"] for zero, line in seen.items()}
    assert counted[1]["all_gather"] == counted[2]["all_gather"] == whole
    assert 0 <= counted[1]["all_reduce"] - whole - loss <= 32  # norms and flags
    assert 0 <= counted[2]["all_reduce"] - 2 * whole - loss <= 32
    assert counted[3]["reduce_scatter"] == 2 * whole
    for line in seen.values():
        assert line["communication_mib"] == sum(line["communication_bytes"].values()) / 2**20


def test_peak_memory_of_every_rank_is_on_record(compared):
    for run in runs_of(compared).values():
        [finished] = read_events(run, "finished")
        assert len(finished["peak_memory_gib"]) == 2
        assert all(0.05 < peak < 8 for peak in finished["peak_memory_gib"])


def test_the_same_name_for_another_comparison_is_refused(compared, clone):
    done = make(clone, "compare", *SWEEP[:-2], "REPEATS=1", "NAME=by", "SWEEP=zero=1,2")
    assert done.returncode != 0
    assert "NAME=by:" in done.stdout
    assert "holds another comparison (sweep" in done.stdout


def test_runs_that_exist_are_put_side_by_side(compared, clone):
    done = make(clone, "compare", "RUNS=by.zero-1.r1 by.zero-3.r1", "NAME=two")
    assert done.returncode == 0, done.stdout
    report = (clone / "runs" / "two" / "report.md").read_text()
    assert "| `by.zero-3.r1` |" in report
    assert "Losses agree" in report
    assert "| zero | 1 | 3 |" in report


def test_a_variant_that_fails_is_a_row_and_the_sweep_goes_on(clone):
    """No check before the start can see whether there is a GPU: only the run finds out."""
    words = ("RECIPE=tiny", "SWEEP=cluster.device=cuda,cpu", "STEPS=3", "REPEATS=2", "NAME=devices")
    done = make(clone, "compare", *words)
    assert done.returncode == 0, done.stdout
    report = (clone / "runs" / "devices" / "report.md").read_text()
    assert re.search(r"\| `cluster.device=cuda` \| failed: cluster.device=cuda but torch", report)
    assert "| `cluster.device=cpu` |" in report
    outcomes = (clone / "runs" / "devices" / "outcomes.jsonl").read_text().splitlines()
    # a variant that failed is left out of the second round
    assert [json.loads(line)["status"] for line in outcomes] == ["failed", "finished", "finished"]


def test_a_sweep_is_ranked_by_the_validation_losses_that_its_runs_recorded(clone):
    words = ("RECIPE=tiny", "SWEEP=optim.lr=1e-5,1e-2", "STEPS=4", "RANK=val_loss", "SEEDS=2")
    done = make(clone, "compare", *words, "NAME=learned")
    assert done.returncode == 0, done.stdout
    assert "2 variants x 2 seeds = 4 runs of 4 steps" in done.stdout
    report = (clone / "runs" / "learned" / "report.md").read_text()
    means = {}
    for rate in ("1e-05", "0.01"):
        finals = []
        for number in (1, 2):
            run = clone / "runs" / f"learned.lr-{rate}.r{number}"
            assert f"seed: {1233 + number}\n" in (run / "recipe.yaml").read_text()
            finals.append(read_metrics(run)[-1]["val_loss"])
        assert finals[0] != finals[1]
        means[rate] = sum(finals) / 2
        shown = f"{means[rate]:.4f} | {min(finals):.4f} to {max(finals):.4f} |"
        assert f" | {shown}" in report
    order = sorted(means, key=means.get)
    assert re.search(rf"\| `optim.lr={order[0]}` \| 1 \|", report)
    assert re.search(rf"\| `optim.lr={order[1]}` \| 2 \|", report)
    assert (clone / "runs" / "learned" / "validation.png").is_file()


def test_all_problems_are_told_before_anything_starts(clone):
    before = set((clone / "runs").iterdir()) if (clone / "runs").is_dir() else set()
    done = make(clone, "compare", "RECIPE=tiny", "NPROC=2", "SWEEP=zero=1,5 optim.lr=1e-3,-1")
    assert done.returncode != 0
    assert "zero=5 (override) is not a ZeRO stage" in done.stdout
    assert re.search(r"optim\.lr=-1\S* \(override\) must be at least", done.stdout)
    after = set((clone / "runs").iterdir()) if (clone / "runs").is_dir() else set()
    assert after == before


def test_a_profile_says_where_the_time_goes_and_leaves_the_run_alone(compared, clone):
    source = runs_of(compared)[2]
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    done = make(clone, "profile", "RUN=by.zero-2.r1", "STEPS=2:4")
    assert done.returncode == 0, done.stdout
    assert re.search(r"forward and backward +\d+\.\d\d +\d+\.\d%", done.stdout)
    assert re.search(r"matrix products +\d+\.\d\d +\d+\.\d%", done.stdout)
    assert "aten::mm" in done.stdout
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    place = clone / "runs" / "by.zero-2.r1-profile" / "profile"
    traces = [place / f"rank-{rank}.trace.json.gz" for rank in (0, 1)]
    for rank in (0, 1):
        events = json.loads(gzip.decompress(traces[rank].read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert {"step 2", "step 3", "phase compute", "phase optimizer"} <= names
        assert not {"step 1", "step 4"} & names
    losses = [line["loss"] for line in read_metrics(place.parent)]
    assert losses == [line["loss"] for line in read_metrics(source)][:3]
    assert "| operator | calls | CPU ms | share |" in (place / "report.md").read_text()


# ---- the pages


@pytest.fixture(scope="module")
def store(compared, clone, tmp_path_factory):
    """(address of TensorBoard on the comparison, a browser)."""
    if chromium() is None:
        pytest.skip("no chromium on this machine: install it to test what pages look like")
    port = 6000 + time.time_ns() % 3000
    server = background(
        clone, ["make", "tensorboard", f"PYTHON={sys.executable}", f"PORT={port}", "RUN=by"]
    )
    browser = None
    try:
        for _ in range(int(120 * PATIENCE)):
            time.sleep(0.5)
            try:
                page = urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5)
                if len(json.loads(page.read())) == 4:
                    break
            except OSError:
                assert server.poll() is None
        browser = Browser(tmp_path_factory.mktemp("chromium"))
        yield f"http://127.0.0.1:{port}/", browser
    finally:
        if browser:
            browser.close()
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=20 * PATIENCE)


LABELS = [f"zero={zero}" for zero in STAGES]
PAGES = {
    "timeseries": ["/losses", "/speed", "/train"],  # the others wait further down
    "custom_scalars": ["Throughput, tokens/s over all ranks", "Training loss, nats per token",
                       "Gradient norm before clipping", "Communication of rank 0, MiB per step"],
    "hparams": ["tokens/s, all ranks", "peak memory of a rank, GiB", "zero"],
    "text": ["by/report", "Losses agree", "What differs"],
    "images": ["by/speed", "by/losses"],
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_tensorboard_is_full_and_its_names_are_whole(store, page):
    address, browser = store
    labels = {"images": ["report"], "hparams": [f"{each} (by)" for each in LABELS]}.get(
        page, LABELS
    )
    text = browser.open(f"{address}#{page}", [*PAGES[page], *labels])
    assert not re.search(r"(?i)no \w+ data was found|no dashboards are active", text)
    assert "Model FLOP utilisation" not in text  # the peak of a CPU is not known: no empty chart
    assert browser.cut([*labels, *PAGES[page]]) == []
    assert len(browser.picture()) > 20_000  # an empty page compresses to less
