"""runtime.monitor.clock and runtime.monitor.speed: where the time of a step goes, and the speeds
made of it.

The clock is fake: seconds pass only when told to.
"""

import re

import pytest
import torch
from metric_lines import make_writer, write_step

from runtime.log.console import plain_text, summary_text
from runtime.monitor import speed
from runtime.monitor.clock import StepClock, StepTimes, cuda_clock


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def passes(self, seconds: float) -> None:
        self.seconds += seconds


# ---- time


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_per_s_equals_the_hand_count(tmp_path, accumulation, ranks):
    """1 s per micro-batch of 2 x 8 tokens: 16 tokens/s and rank, whatever the accumulation."""
    fake = FakeClock()
    clock = StepClock(fake.now)
    writer = make_writer(tmp_path / "run", world=ranks)
    tokens_per_step = 16 * accumulation * ranks
    clock.start()
    lines = []
    for step in (1, 2, 3):
        if step == 1:
            fake.passes(100)  # the first step compiles
        with clock.phase("compute"):
            for _ in range(accumulation):
                fake.passes(1)
        if step == 2:
            with clock.phase("eval"):
                fake.passes(50)
            with clock.phase("save"):
                fake.passes(70)
        times = clock.finish().times()
        lines.append(
            write_step(
                writer,
                step,
                times=times,
                tokens=step * tokens_per_step,
                tokens_per_step=tokens_per_step,
                accumulation=accumulation,
            )
        )
    result = writer.finish()
    assert [line["tokens_per_s"] for line in lines[1:]] == [16 * ranks] * 2
    assert [line["tokens_per_s_per_rank"] for line in lines[1:]] == [16] * 2
    assert [line["step_s"] for line in lines] == [100 + accumulation, accumulation, accumulation]
    assert lines[1]["eval_s"] == 50
    assert [line["first_of_attempt"] for line in lines] == [True, False, False]
    assert result["tokens_per_s"] == 16 * ranks  # without the first step, evaluation and save
    assert result["num_steady_steps"] == 2


def test_the_parts_of_a_step_add_up_to_it():
    fake = FakeClock()
    clock = StepClock(fake.now)
    fake.passes(5)  # before start: belongs to no step
    clock.start()
    for phase, seconds in [("data", 1), ("compute", 2), ("data", 3), ("optimizer", 4), ("save", 8)]:
        with clock.phase(phase):
            fake.passes(seconds)
    fake.passes(0.5)
    times = clock.finish().times()
    assert times == StepTimes(10.5, 4, 2, 4, eval_s=0, save_s=8, other_s=0.5, is_first=True)
    parts = times.data_s + times.compute_s + times.optimizer_s + times.other_s
    assert times.step_s == parts
    fake.passes(2)
    assert clock.finish().times() == StepTimes(2, other_s=2)  # begins where the first one ended


def test_stamps_are_not_read_before_the_times_are_asked_for():
    """A stamp may be an event on a device: reading it early would be a synchronisation."""
    reads = []

    def seconds(begin, end):
        reads.append((begin, end))
        return 1.0

    stamps = iter(range(100))
    clock = StepClock(lambda: next(stamps), seconds)
    clock.start()
    with clock.phase("compute"):
        pass
    span = clock.finish()
    with clock.phase("compute"):
        pass
    assert reads == []
    assert span.times().compute_s == 1.0
    assert reads == [(0, 1), (1, 2), (2, 3)]


def test_an_unknown_or_nested_phase_is_a_mistake_of_ours():
    clock = StepClock()
    clock.start()
    with pytest.raises(AssertionError, match="'forward' is not one of"):
        with clock.phase("forward"):
            pass
    with pytest.raises(AssertionError, match="phase eval begins inside of phase compute"):
        with clock.phase("compute"), clock.phase("eval"):
            pass
    with clock.phase("save"):  # usable after an exception
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_time_is_the_devices_own():
    clock = cuda_clock()
    clock.start()
    with clock.phase("compute"):
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s on any current device
    span = clock.finish()
    times = span.times()
    assert 0.03 < times.compute_s < 1.0
    assert times.other_s < 0.01


# ---- speeds


def test_mfu_equals_a_hand_worked_example():
    """1000 tokens/s over 4 ranks x 6e9 FLOP per token = 6e12; 4 x 10e12 possible: 15 per cent."""
    assert speed.tokens_per_s(2000, 2.0) == 1000.0
    assert speed.mfu(1000.0, 6e9, 10e12, ranks=4) == pytest.approx(0.15)


def test_mfu_of_the_7b_of_the_palm_convention():
    """6 x 7e9 FLOP per token (attention aside), 1e4 tokens/s on 1 x 989.4e12: 42.4 per cent."""
    peak = speed.peak_flops("NVIDIA H100 80GB HBM3")
    assert speed.mfu(1e4, 6 * 7e9, peak, ranks=1) == pytest.approx(0.4245, abs=1e-4)


def test_there_is_no_utilisation_where_a_number_is_not_known():
    assert speed.mfu(1000.0, 6e9, None, 1) is None
    assert speed.mfu(1000.0, None, 1e12, 1) is None
    assert speed.mfu(None, 6e9, 1e12, 1) is None
    assert speed.tokens_per_s(100, 0.0) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla T4", None),
        ("NVIDIA RTX A4000", None),
        (None, None),
    ],
)
def test_the_peak_is_looked_up_by_device_name_and_never_guessed(name, tflops):
    assert speed.peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_a_peak_given_in_the_recipe_wins():
    assert speed.peak_flops("NVIDIA H100 80GB HBM3", peak_tflops=400.0) == 400e12
    assert speed.peak_flops(None, peak_tflops=0.5) == 0.5e12


def test_all_printed_speeds_of_a_run_agree_and_name_their_unit_and_scope(tmp_path):
    writer = make_writer(tmp_path / "run", world=4, flops_per_token=1e6, peak_flops=1e9)
    lines = [
        write_step(writer, step, tokens_per_step=80_000, times=StepTimes(2.0, is_first=step == 1))
        for step in (1, 2, 3)
    ]
    result = writer.finish()
    printed = plain_text(lines[-1], total=3, left_s=None) + "\n" + summary_text(result)
    assert "40,000 tokens/s (10,000 per rank)" in printed
    assert "speed 40,000 tokens/s over all ranks, median of 2 steps" in printed
    speeds = [int(text.replace(",", "")) for text in re.findall(r"([\d,]+) tokens/s", printed)]
    assert speeds == [40_000, 40_000]
    assert set(re.findall(r"MFU ([\d.]+)%", printed)) == {"1000.0"}
    assert lines[-1]["step_s"] * lines[-1]["tokens_per_s"] == lines[-1]["tokens_per_step"]
