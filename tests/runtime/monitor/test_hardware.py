"""runtime/monitor/hardware.py and its parts: own times, the key-value store, the reader of GPUs,
and all of it in a run.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from clones import SMALL, make_clone
from ranks import PATIENCE, ROOT, run_command
from scripted_cards import HEALTHY, script
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from parallel import collectives
from recipes.output_knobs import Hardware
from record.records import read_events, read_lines, read_metrics
from runtime.monitor import devices, own_time, readings
from runtime.monitor.clock import StepClock
from runtime.monitor.hardware import HardwareWatch
from runtime.monitor.key_value_store import KeyValueStore
from runtime.monitor.own_time import OwnTime
from runtime.monitor.readings import (
    DeviceReading,
    HardwareEvent,
    RankTimes,
    ReadingsCollector,
)
from runtime.process.process import Process


class FakeClock:
    """A clock that moves only by `passes`."""

    def __init__(self):
        self.seconds = 0.0

    def passes(self, seconds: float) -> None:
        self.seconds += seconds


# ---- own time


def test_own_time_is_a_step_without_waits_evaluation_and_saves():
    fake = FakeClock()
    own = OwnTime(lambda: fake.seconds)
    clock = StepClock(lambda: fake.seconds, own=own)
    clock.start()
    with clock.phase("compute"):
        fake.passes(1)
        with own.apart():
            fake.passes(10)
            with own.apart():  # torch's own function around the call of a group
                fake.passes(20)
        fake.passes(2)
    with clock.phase("eval"):
        fake.passes(40)
        with own.apart():
            fake.passes(50)
    fake.passes(4)
    span = clock.finish()
    fake.passes(100)  # read late
    assert span.own_s() == 7
    assert span.times().step_s == 37
    assert clock.finish().own_s() == 100


def test_only_every_so_many_steps_are_measured_where_stamps_cost():
    fake = FakeClock()
    stamps = []
    own = OwnTime(lambda: stamps.append(1) or fake.seconds, every=4)
    own.begin()
    seen = []
    for _ in range(9):
        with own.apart():
            fake.passes(5)
        fake.passes(1)
        seen.append(own.finish()())
    assert seen == [1, None, None, None, 1, None, None, None, 1]
    assert len(stamps) == 3 * 4


def test_waits_of_other_threads_and_of_other_streams_are_not_the_ranks():
    fake = FakeClock()
    is_counted = True
    own = OwnTime(lambda: fake.seconds, is_counted=lambda: is_counted)
    own.begin()

    def save_beside():
        with own.apart():
            fake.passes(3)

    beside = threading.Thread(target=save_beside)
    beside.start()
    beside.join()
    is_counted = False
    with own.apart():
        fake.passes(4)
    assert own.finish()() == 7


def test_calls_of_groups_and_waits_are_heard_under_every_name_that_this_torch_has(monkeypatch):
    for name in own_time.CALLS:
        if hasattr(dist.ProcessGroup, name):
            monkeypatch.setattr(dist.ProcessGroup, name, lambda self: fake.passes(10))
    monkeypatch.setattr(dist.Work, "wait", lambda self: fake.passes(10))
    monkeypatch.setattr(collectives, "_OPS", collectives._OPS)
    fake = FakeClock()
    own = OwnTime(lambda: fake.seconds)
    own.listen()
    own.begin()
    heard = [name for name in own_time.CALLS if hasattr(dist.ProcessGroup, name)]
    for name in heard:
        getattr(dist.ProcessGroup, name)(None)
        fake.passes(1)
    dist.Work.wait(None)
    assert own.finish()() == len(heard)
    assert fake.seconds == 11 * len(heard) + 10
    public = {"allreduce", "broadcast", "barrier", "allgather", "reduce_scatter", "send", "recv"}
    assert public <= set(heard)
    tensor = torch.ones(2)
    assert collectives.wait(tensor) is not None


def test_on_a_gpu_waits_of_the_computations_stream_and_of_the_host_are_apart(monkeypatch):
    fake = FakeClock()

    class Stream:
        """Stands for torch's, on a machine without a GPU."""

        def wait_stream(self, other):
            fake.passes(10)

        wait_event = wait_stream

        def synchronize(self):
            fake.passes(10)

    computing, other = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: computing)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: fake.passes(10))
    own = OwnTime(lambda: fake.seconds)
    own.listen_to_streams()
    own.begin()
    computing.wait_stream(other)
    computing.wait_event(None)
    other.synchronize()
    torch.cuda.synchronize()
    assert (own.finish()(), fake.seconds) == (0, 40)
    other.wait_stream(computing)  # a prefetch that waits holds up nobody
    assert own.finish()() == 10


def test_the_clock_of_a_rank_stands_still_while_others_have_its_core():
    now = own_time.running_clock()
    if now is time.perf_counter:
        pytest.skip("this system does not tell how long a thread waits for a core")
    began, began_own = time.perf_counter(), now()
    time.sleep(0.05)
    # What it waited for a core just before may be charged after.
    assert 0.04 <= now() - began_own <= time.perf_counter() - began + 1e-3


# ---- the key-value store and the collector


def test_the_store_gives_what_is_there_and_never_waits_for_what_is_not():
    store = dist.HashStore()
    one, two = KeyValueStore(store), KeyValueStore(store)
    one.post("own/0", [[4, 0.25]])
    assert two.read(["own/0", "own/1"]) == {"own/0": [[4, 0.25]]}
    two.post("own/1", {"x": None})
    assert one.read(["own/0", "own/1"]) == {"own/0": [[4, 0.25]], "own/1": {"x": None}}
    one.post("own/0", [])
    assert two.read(["own/0"]) == {"own/0": []}


class DictStore:
    """A key-value store that is a dictionary."""

    def __init__(self):
        self.posted = {}

    def post(self, name, value):
        self.posted[name] = json.loads(json.dumps(value))

    def read(self, names):
        return {name: self.posted[name] for name in names if name in self.posted}


@pytest.fixture
def cluster():
    """Four ranks on two hosts that have begun: (collector, store, news)."""
    news = []
    store, collector = DictStore(), ReadingsCollector([0] * 4, lambda *new: news.extend(new))
    for rank in range(4):
        place = {"host": f"node-{rank // 2}", "gpu": str(rank % 2)}
        store.post(f"place/{rank}", place | {"is_first_of_host": rank % 2 == 0})
    collector.collect(store)
    assert news == []
    return collector, store, news


def test_a_slow_rank_is_named_with_its_host_and_gpu_and_its_recovery_too(cluster, monkeypatch):
    collector, store, news = cluster
    fake = FakeClock()
    monkeypatch.setattr(readings.time, "monotonic", lambda: fake.seconds)
    said = []
    for step in range(4, 60, 4):
        fake.passes(4)
        for rank in range(4):
            own_s = 1.5 if rank == 3 and step < 40 else 1.0
            store.post(f"own/{rank}", [[step - 4, 9.0], [step, own_s]])
        collector.collect(store)
        said += [(step, one) for one in news if isinstance(one, HardwareEvent)]
        news.clear()
    [(step, slow), (_, over)] = said
    assert step == 12
    assert (slow.kind, over.kind) == ("slow_rank", "slow_rank_over")
    assert slow.text.startswith("rank 3 on node-1, GPU 1 is slow: its own work takes 1.50 s a step")
    assert slow.facts["host"] == over.facts["host"] == "node-1"
    assert (slow.facts["rank"], slow.facts["gpu"], slow.facts["since_step"]) == (3, "1", 1)


def test_a_rank_that_is_late_is_waited_for_and_one_that_is_gone_is_not(cluster):
    collector, store, news = cluster
    for rank in range(3):
        store.post(f"own/{rank}", [[4, 1.0]])
    collector.collect(store)
    assert news == []
    store.post("own/3", [[4, 1.0]])
    collector.collect(store)
    assert news == [RankTimes(4, [1.0] * 4)]
    for rank in range(3):
        store.post(f"own/{rank}", [[8, 1.0], [12, 1.0], [16, 1.0]])
    collector.collect(store)
    assert news[1:] == [RankTimes(8, [1.0, 1.0, 1.0, None])]


def test_readings_and_alarms_of_every_host_arrive_once_each(cluster):
    collector, store, news = cluster
    gpus = [{"index": 0, "temperature_c": 60}]
    alarm = {"kind": "alarm", "index": 0, "what": "lost", "action": "drain the host"}
    alarm |= {"text": "the GPU is lost", "is_quiet": False}
    said = [[1, {"kind": "notice", "text": "no sensor"}], [2, alarm]]
    store.post("devices/0", {"number": 1, "gpus": gpus, "said": []})
    store.post("devices/2", {"number": 7, "gpus": gpus, "said": said})
    store.post("count/0", 1)
    store.post("count/2", 9)
    collector.collect(store)
    collector.collect(store)
    assert news == [
        DeviceReading("node-0", gpus),
        HardwareEvent("notice", "node-1: no sensor", {"host": "node-1"}),
        HardwareEvent(
            "gpu_alarm",
            "node-1, GPU 0: the GPU is lost; drain the host",
            {"host": "node-1", "gpu": 0, "what": "lost", "action": "drain the host"},
        ),
        DeviceReading("node-1", gpus),
    ]


def test_two_hosts_of_one_name_have_series_of_their_own():
    news = []
    store, collector = DictStore(), ReadingsCollector([0, 0], lambda *new: news.extend(new))
    for rank in range(2):
        place = {"host": "pod", "gpu": None, "is_first_of_host": True}
        store.post(f"place/{rank}", place)
        store.post(f"devices/{rank}", {"number": 1, "gpus": [{"index": 0}], "said": []})
        store.post(f"count/{rank}", 1)
    collector.collect(store)
    assert [one.host for one in news] == ["pod", "pod.1"]


def test_a_store_that_is_gone_ends_the_watch_with_one_notice():
    class Gone:
        def post(self, name, value):
            raise RuntimeError("Broken pipe\nstack")

    layout = SimpleNamespace(world=1, coordinates=lambda rank: SimpleNamespace(pipeline=0))
    me = Process(0, 1, 0, 1, torch.device("cpu"))
    watched = HardwareWatch(Hardware(every_s=100.0), layout, me, 0, Gone)
    deadline = time.monotonic() + 20 * PATIENCE
    news = []
    while not news and time.monotonic() < deadline:
        news += watched.news()
        time.sleep(0.02)
    watched.close()
    assert [one.text for one in news] == ["hardware is no longer watched: Broken pipe"]


# ---- the listener


def test_a_reader_that_hangs_is_killed_and_started_anew_with_one_notice(tmp_path, monkeypatch):
    hangs = {"temperature": [60, 61, "hang"], "throttle": [0x4, 0x44]}
    for name, value in script(tmp_path, hangs).items():
        monkeypatch.setenv(name, value)
    changed = threading.Event()
    listener = devices.Devices(0.05, 2.0, changed.set)
    deadline = time.monotonic() + 60 * PATIENCE
    texts: list[str] = []
    readers = set()
    while len(texts) < 3 and time.monotonic() < deadline:
        changed.wait(5)
        changed.clear()
        readers |= {listener._process} - {None}
        texts = [said.get("text") for _, said in listener.news()["said"]]
    last = listener._process
    listener.close()
    assert [text.partition(":")[0] for text in texts[:3]] == [
        "hardware thermal slowdown (1830 MHz)",
        "GPU readings have stopped",
        "GPU readings have come again",
    ]
    assert "no answer for 2 s" in texts[1]
    assert listener.news()["gpus"][0]["temperature_c"] in (60, 61)
    # None of them stays, and hangs on.
    assert len(readers | {last}) > 1
    assert {reader.wait(10 * PATIENCE) for reader in readers | {last}} == {-signal.SIGKILL}


# ---- the whole, in a run


def test_a_run_records_gpus_names_the_slow_rank_and_outlives_a_driver_that_hangs(tmp_path):
    clone = make_clone(tmp_path / "clone")
    fan_failed = {"temperature": [70, 88, 88, "hang"], "uncorrected": [0, 0, 3]}
    extra = script(tmp_path, fan_failed, HEALTHY)
    extra["PYTHONPATH"] = extra["PYTHONPATH"].replace(str(ROOT), str(clone)) + f":{clone}"
    words = [*SMALL, "zero=3", "steps=16", "eval_every=0", "run=watched"]
    words += ["model.num_hidden_layers=1", "batch_tokens=256"]  # arithmetic is the noisy part
    timeout_s = math.ceil(PATIENCE)
    words += ["hardware.every_s=0.4", f"hardware.timeout_s={timeout_s}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(clone / "tests" / "workers" / "hardware_worker.py"), "1", "1", "1.5", *words]
    done = run_command(command, 120, cwd=clone, **extra)
    assert done.returncode == 0, done.stdout[-4000:]
    run = clone / "runs" / "watched"
    assert read_metrics(run)[-1]["step"] == 16

    [slow] = read_events(run, "slow_rank")
    assert (slow["rank"], slow["gpu"]) == (1, None)
    assert slow["step"] <= 16
    assert slow["ratio"] > 4 / 3
    assert slow["text"] in done.stdout
    alarms = {alarm["what"] for alarm in read_events(run, "gpu_alarm")}
    assert alarms == {"temperature", "ecc 3"}
    notices = [event["text"] for event in read_events(run, "notice")]
    stopped = f"readings have stopped: no answer for {timeout_s} s"
    assert [text for text in notices if stopped in text], notices

    host = slow["host"]
    readings = read_lines(run / "devices.jsonl")
    assert {reading["index"] for reading in readings} == {0, 1}
    assert {reading["host"] for reading in readings} == {host}
    assert readings[0]["throttle_names"] == ["power cap"]
    assert all(len(times["own_s"]) == 2 for times in read_lines(run / "ranks.jsonl"))
    store = EventAccumulator(str(next((run / "tensorboard").iterdir())))
    store.Reload()
    tags = set(store.Tags()["scalars"])
    for index in (0, 1):
        names = ("temperature_c", "power_w", "throttle", "ecc_uncorrected", "utilization_percent")
        assert {f"node/{host}/gpu/{index}/{name}" for name in names} <= tags
    assert {"rank/0/own_s", "rank/1/own_s", "loss/train"} <= tags
