"""runtime/device_*.py: readings, tables and alarms of GPUs, from scripted cards."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PATIENCE, ROOT, environment, run_command
from scripted_cards import HEALTHY, script

from base.exits import DO_NOT_RETRY
from runtime.monitor import device_alarms, device_table
from runtime.monitor.device_alarms import CLEAR_S, CardWatch
from runtime.monitor.device_table import DRAIN, IGNORE, RESET, RESTART, RMA, ailments, xid


def read(folder: Path, *changes: dict, words=(), script_it=True, **options):
    """What one call of the reader prints."""
    extra = script(folder, *changes) if script_it else {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "runtime.monitor.device_reader", *words],
        cwd=ROOT,
        env=environment(**extra),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30 * PATIENCE,
        check=False,
        **options,
    )
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


# ---- the reader


def test_every_sensor_of_every_card_is_read_and_what_a_card_lacks_is_absent(tmp_path):
    lacking = dict.fromkeys(("temperature", "uncorrected", "corrected", "remapped", "replays"))
    status, [reading] = read(tmp_path, {}, lacking | {"slowdown": 0}, {"margin": 26, "slowdown": 0})
    assert status == 0
    first, second, third = reading["gpus"]
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "bus": "00000000:3B:00.0",
        "temperature_c": 61,
        "memory_temperature_c": 70,
        "slowdown_c": 87,
        "power_w": 640.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1830,
        "memory_clock_mhz": 3201,
        "utilization_percent": 98,
        "memory_used_gib": pytest.approx(90_000 / 1024),
        "memory_total_gib": pytest.approx(143_771 / 1024),
        "throttle": 4,
        "ecc_corrected": 2,
        "ecc_uncorrected": 0,
        "remapped_rows": 1,
        "remap_pending": False,
        "remap_failed": False,
        "sram_uncorrected_lifetime": 0,
        "recovery_action": 0,
        "pcie_replays": 3,
        "ailments": [],
    }
    assert set(first) - set(second) == {
        "temperature_c",
        "slowdown_c",
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows",
        "remap_pending",
        "remap_failed",
        "pcie_replays",
    }
    assert third["slowdown_c"] == 61 + 26  # newer cards tell the distance


def test_without_a_driver_there_is_one_notice_and_no_zeros(tmp_path):
    status, lines = read(tmp_path, script_it=False)
    assert status == 3
    [line] = lines
    assert line["notice"].startswith("no GPU readings: NVML")


def test_a_lost_card_is_told_and_the_others_go_on_being_read(tmp_path):
    _, [reading] = read(tmp_path, {"power": "lost"}, {})
    lost, other = reading["gpus"]
    assert lost["is_lost"]
    assert "power_w" not in lost
    assert lost["ailments"] == [["lost", DRAIN, "the GPU is lost: it has fallen off the bus"]]
    assert other["power_w"] == 640.0


def test_xid_errors_come_from_nvml_and_from_the_kernels_log(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("6,1,1,-;NVRM: Xid (PCI:0000:3b:00): 48, old\n")
    command = [sys.executable, "-m", "runtime.monitor.device_reader", "--every", "0.05"]
    reader = subprocess.Popen(
        [*command, "--kernel-log", str(log)],
        cwd=ROOT,
        env=environment(**script(tmp_path, {"xid_events": [[0, 94]]}, {})),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = iter(reader.stdout.readline, "")
    first = json.loads(next(lines))
    assert first["xids"] == [{"index": 0, "code": 94, "ailment": list(xid(94))}]
    with log.open("a") as file:
        file.write("6,2,2,-;usb 1-1: new device\n4,3,3,-;NVRM: Xid (PCI:0000:3c:00): 79, pid=7\n")
        file.write("4,4,4,-;NVRM: Xid (PCI:0000:ff:00): 154, GPU recovery action changed to Reboot")
    seen = []
    while len(seen) < 1:
        seen += json.loads(next(lines))["xids"]
    with log.open("a") as file:
        file.write("\n")
    while len(seen) < 2:
        seen += json.loads(next(lines))["xids"]
    reader.stdin.close()  # who listened has gone
    assert reader.wait(20 * PATIENCE) == 0
    assert [(one["index"], one["code"]) for one in seen] == [(1, 79), (None, 154)]
    assert "action changed to Reboot" in seen[1]["ailment"][2]


def test_a_card_that_falls_off_the_bus_is_known_by_its_last_address_and_its_error_is_told(tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    # The first card cannot be registered for errors, which keeps the other one from nothing.
    falls = {"bus": [0, "lost"], "power": [640, "lost"], "xid_events": [[1, 79]]}
    reader = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "runtime.monitor.device_reader",
            "--every",
            "0.5",
            "--kernel-log",
            str(log),
        ],
        cwd=ROOT,
        env=environment(**script(tmp_path, {"xid_events": None}, falls)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    first = json.loads(reader.stdout.readline())
    with log.open("a") as file:
        file.write("4,3,3,-;NVRM: Xid (PCI:0000:3c:00): 119, pid=7\n")
    second = json.loads(reader.stdout.readline())
    reader.kill()
    assert [gpu.get("is_lost") for gpu in first["gpus"] + second["gpus"]] == [
        None,
        None,
        None,
        True,
    ]
    assert [(one["index"], one["code"]) for one in second["xids"]] == [(None, 79), (1, 119)]


# ---- tables


def test_throttle_bits_have_names():
    assert device_table.throttle_names(0x44) == ["power cap", "hardware thermal slowdown"]
    assert device_table.throttle_names(0) == []
    assert device_table.throttle_names(0x1000) == ["unknown 0x1000"]


@pytest.mark.parametrize(
    ("code", "action"),
    [(48, RESET), (63, RESET), (64, RMA), (79, DRAIN), (94, RESTART), (95, RESET), (45, IGNORE)],
)
def test_an_xid_leads_to_an_action(code, action):
    assert xid(code).action == action
    assert xid(code).text.startswith(f"Xid {code}: ")


def test_an_xid_that_nobody_knows_is_told_all_the_same():
    assert "catalog" in xid(9999).text


@pytest.mark.parametrize(
    ("card", "what", "action"),
    [
        ({"remap_pending": True}, "remap_pending", RESET),
        ({"remap_failed": True}, "remap_failed", RMA),
        ({"ecc_uncorrected": 1}, "ecc", RESET),
        ({"sram_uncorrected_lifetime": 5}, "sram", RMA),
        ({"is_lost": True}, "lost", DRAIN),
        ({"recovery_action": 2}, "recovery", DRAIN),
        ({"recovery_action": 77}, "recovery", DRAIN),
    ],
)
def test_states_that_need_somebody(card, what, action):
    assert [(each.what, each.action) for each in ailments(card)] == [(what, action)]


def test_a_card_that_says_nothing_is_not_ill():
    assert ailments({}) == []
    assert ailments({"remap_pending": False, "sram_uncorrected_lifetime": 4}) == []


def test_the_kernel_and_nvml_write_an_address_differently():
    assert device_table.bus_key("0000:3b:00") == device_table.bus_key("00000000:3B:00.0")


# ---- alarms


def watch(readings, every_s=10.0):
    """[(number of the reading, what)] of the alarms for a card."""
    card, found = CardWatch(), []
    for number, reading in enumerate(readings):
        base = {"index": 3, "utilization_percent": 99, "slowdown_c": 87}
        found += [(number, alarm) for alarm in card.add(base | reading, number * every_s)]
    return found


def whats(readings, every_s=10.0):
    return [(number, alarm.what) for number, alarm in watch(readings, every_s)]


def temperatures(values):
    return [{"temperature_c": round(value)} for value in values]


def test_a_card_that_warms_up_and_stays_below_its_limit_raises_no_alarm():
    for final, constant_s in ((84, 30), (84, 60), (84, 90), (84, 120), (60, 10)):
        curve = [final - (final - 30) * math.exp(-10 * n / constant_s) for n in range(400)]
        assert whats(temperatures(curve)) == []


def test_a_steady_warm_card_with_noise_raises_no_alarm_for_hours():
    source = random.Random(1)
    assert whats(temperatures(source.gauss(80, 0.8) for _ in range(2500))) == []


def test_a_ramp_to_the_limit_is_told_before_it_gets_there_and_once():
    ramp = [60 + n * 0.5 for n in range(60)]  # 3 C a minute
    found = watch(temperatures(ramp))
    [(number, first), *rest] = found
    assert first.what == "temperature trend"
    assert ramp[number] < 86
    assert "go down at 87 C, in " in first.text
    assert (first.index, first.action) == (3, DRAIN)
    assert [alarm.what for _, alarm in rest] == ["temperature"]


def test_a_slow_creep_over_hours_is_told_by_the_half_hour():
    creep = [60 + n * 20 / 360 for n in range(450)]  # 20 C in an hour
    [(number, alarm), *_] = watch(temperatures(creep))
    assert 84 > creep[number] > 75
    assert alarm.what == "temperature trend"


def test_limits_are_the_cards_own():
    assert whats([{"temperature_c": 86, "slowdown_c": 95}] * 50) == []
    assert whats([{"temperature_c": 86, "slowdown_c": None}] * 50) == []
    assert whats([{"temperature_c": 86}]) == [(0, "temperature")]


def test_a_throttle_that_flaps_is_one_trouble_and_the_power_cap_none():
    flap = [{"throttle": 0x40 if n % 3 == 0 else 0x4} for n in range(90)]
    assert whats(flap) == [(0, "throttle hardware thermal slowdown")]
    quiet = [{"throttle": 0x4}] * (int(CLEAR_S / 10) + 2)
    again = [{"throttle": 0x8}] + quiet + [{"throttle": 0x8}]
    assert whats(again) == [
        (0, "throttle hardware slowdown"),
        (len(again) - 1, "throttle hardware slowdown"),
    ]
    assert whats([{"throttle": 0x80, "utilization_percent": 0}] * 9) == []  # it idles
    assert [what for _, what in whats([{"throttle": 0xA0, "utilization_percent": None}])] == [
        "throttle software thermal slowdown",
        "throttle power brake",
    ]


def test_uncorrected_errors_are_told_at_each_jump_and_corrected_ones_never():
    counts = [0, 0, 2, 2, 2, 5, 5]
    found = watch([{"ecc_uncorrected": n, "ecc_corrected": 50 * i} for i, n in enumerate(counts)])
    assert [(number, alarm.what) for number, alarm in found] == [(2, "ecc 2"), (5, "ecc 5")]
    assert "3 more than before" in found[1][1].text
    assert whats([{"ecc_uncorrected": 4}] * 3) == [(0, "ecc 4")]  # from before the start


def test_a_remapping_failure_and_a_lost_card_are_told_once():
    readings = [{}, {"remap_failed": True}, {"remap_failed": True}, {"is_lost": True}]
    assert whats(readings + [{"is_lost": True}] * 100) == [(1, "remap_failed"), (3, "lost")]


def test_a_healthy_card_raises_no_alarm():
    assert whats([{"temperature_c": 61, "throttle": 0x4, "ecc_uncorrected": 0}] * 1000) == []
    assert HEALTHY["utilization"] > device_alarms.LOADED_PERCENT


def test_the_doctor_refuses_a_host_by_the_same_table(tmp_path):
    extra = script(tmp_path, {"remapped": [[0, 1, 1, 0]]}, {"power": "lost"}, {"temperature": 80})
    done = run_command([sys.executable, "-m", "commands.doctor", "--nproc", "4"], 60, **extra)
    assert done.returncode == DO_NOT_RETRY
    for line in (
        "GPUs 3, but NPROC=4",
        "GPU 0: a memory row waits for a reset to be remapped; reset the GPU",
        "GPU 1: the GPU is lost: it has fallen off the bus; drain the host",
    ):
        assert f"refused: localhost: {line}" in done.stdout
    assert "warning: localhost: GPU 2: 80 C before the start; its clocks go down at 87 C" in (
        done.stdout
    )
