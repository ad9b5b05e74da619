"""launch/hosts/facts.py and launch/hosts/network.py: what a host says about itself."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from pathlib import Path

import psutil
import pytest
from ranks import PATIENCE, ROOT
from scripted_cards import script

from base.errors import UserError
from commands import pretrain
from launch.hosts import facts, network
from launch.hosts.own_gpus import ranks_of_gpus
from launch.trial import Trial
from recipes.compose import compose
from recipes.composed_file import Composed


def test_every_file_that_can_change_a_run_counts_and_tests_do_not():
    found = facts.code(ROOT)
    assert {
        "pretrain.py",
        "runtime/engine/engine.py",
        "recipes/tiny.yaml",
        "ds_configs/zero1.json",
    } <= set(found)
    assert "recipes/model/llama-tiny.yaml" in found or any(
        name.startswith("recipes/model/") for name in found
    )
    assert not [name for name in found if name.startswith(("tests/", "runs/", "benchmarks/"))]


def show_cards(folder: Path, monkeypatch, *cards: dict) -> None:
    """What NVML shows from now on."""
    for name, value in script(folder, *cards).items():
        monkeypatch.setenv(name, value)


def test_cards_are_read_with_what_ails_them(tmp_path, monkeypatch):
    show_cards(tmp_path, monkeypatch, {}, {"remapped": [[0, 1, 1, 0]]})
    first, second = facts.gpus()["cards"]
    assert (first["name"], first["driver"], first["ailments"]) == ("NVIDIA H200", "570.124.06", [])
    [(what, action, _)] = second["ailments"]
    assert (what, action) == ("remap_pending", "reset the GPU")


def test_a_start_on_this_machine_refuses_an_ailing_card_of_its_ranks(tmp_path, monkeypatch):
    show_cards(tmp_path, monkeypatch, {}, {"remapped": [[0, 1, 1, 0]]})
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    recipe = compose("tiny", ["run=a"]).recipe
    monkeypatch.setattr(pretrain, "ROOT", tmp_path)
    monkeypatch.setattr(pretrain, "check", lambda recipe, ranks: 0.0)
    trial = Trial(Composed(recipe, {}, [], Path()), None, [], None, None)
    with pytest.raises(UserError, match=r"GPU 1: a memory row waits for a reset.*reset the GPU"):
        pretrain.start_here(trial, 2, once=False)
    assert not (tmp_path / "runs").exists()


def test_a_start_on_this_machine_takes_all_gpus_and_reports_idle_ones(
    tmp_path, monkeypatch, capsys
):
    show_cards(tmp_path, monkeypatch, *([{}] * 8))
    tiny = compose("tiny", []).recipe
    assert ranks_of_gpus(tiny) == 4
    pretrain.RunHere(tiny, "", 4, None, is_given=False).prepare(None)
    shown = capsys.readouterr().out
    assert shown.startswith("4 of 8 GPUs are used, 4 idle: batch_tokens=2048 is not a multiple of")
    pretrain.RunHere(tiny, "", 2, None, is_given=True).prepare(None)
    assert capsys.readouterr().out == "2 of 8 GPUs are used, 6 idle (NPROC=8 uses all)\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert ranks_of_gpus(tiny) == 2
    pretrain.RunHere(tiny, "", 2, None, is_given=False).prepare(None)
    assert capsys.readouterr().out == ""


def test_a_host_without_a_driver_has_no_cards_unless_there_are_device_files(monkeypatch):
    assert facts.gpus() == {"cards": []}
    monkeypatch.setattr(facts.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert facts.gpus()["problem"].startswith("no GPU readings: NVML")


def test_a_driver_that_fails_or_hangs_is_a_problem_and_not_a_wait(tmp_path, monkeypatch):
    show_cards(tmp_path, monkeypatch, {"power": ["nonsense"]})
    assert facts.gpus()["problem"].startswith(
        "runtime.monitor.device_reader ended with 1: TypeError"
    )
    monkeypatch.setattr(facts, "READER_TIMEOUT_S", 0.5)
    show_cards(tmp_path, monkeypatch, {"power": "hang"})
    assert facts.gpus()["problem"] == "the driver (NVML) gave no answer in 0.5 s"


def test_only_locks_that_nothing_has_touched_for_long_are_removed_and_others_are_told(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        (folder / "lock").touch()
        (folder / "build.ninja").touch()
    long_ago = time.time() - 2 * facts.STALE_S
    for path in old.iterdir():
        os.utime(path, (long_ago, long_ago))
    os.utime(new / "lock", (long_ago, long_ago))  # the build beside it is under route
    young, removed = facts.remove_stale_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert removed == f"removed a lock that a killed build left behind: {old / 'lock'}"
    assert young.endswith(f"a run that needs it waits while this lock is there: {new / 'lock'}")
    assert not (old / "lock").exists()
    assert (new / "lock").exists()


def test_a_shared_folder_must_hold_the_token_and_take_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "SEEN_WITHIN_S", 0.3)
    shared = {"folder": "mark", "token": "t"}
    assert "No such file" in facts.sees_shared(tmp_path, shared, 1)
    (tmp_path / "mark").mkdir()
    (tmp_path / "mark" / "launcher").write_text("another")
    assert "is another one" in facts.sees_shared(tmp_path, shared, 1)
    (tmp_path / "mark" / "launcher").write_text("t")
    assert facts.sees_shared(tmp_path, shared, 1) is None
    assert (tmp_path / "mark" / "node-1").read_text() == "t"
    if os.geteuid():
        (tmp_path / "mark").chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert "Permission denied" in facts.sees_shared(tmp_path, shared, 2)


def test_a_file_that_a_network_shows_late_is_waited_for(tmp_path):
    (tmp_path / "mark").mkdir()
    threading.Timer(0.5, (tmp_path / "mark" / "launcher").write_text, ["t"]).start()
    assert facts.sees_shared(tmp_path, {"folder": "mark", "token": "t"}, 1) is None


def test_the_port_that_was_asked_for_is_looked_at():
    with socket.create_server(("", 0)) as server:
        busy = server.getsockname()[1]
        assert facts.port(busy) == {"number": busy, "is_free": False}
    assert network.LOW_PORT <= facts.port(None)["number"] <= network.HIGH_PORT


def test_an_interface_that_is_not_there_is_named_with_those_that_are():
    for fits in ("GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME==lo", "NCCL_SOCKET_IFNAME=q,l",
                 "NCCL_SOCKET_IFNAME=^lo"):  # fmt: skip
        name, _, value = fits.partition("=")
        assert network.missing_interfaces({name: value}, True) == []
    environ = {"GLOO_SOCKET_IFNAME": "lo,none0", "NCCL_SOCKET_IFNAME": "=l"}
    gloo, nccl = network.missing_interfaces(environ, True)
    assert gloo.startswith("GLOO_SOCKET_IFNAME=lo,none0, but the interfaces are ")
    assert nccl.startswith("NCCL_SOCKET_IFNAME==l, but")
    assert network.missing_interfaces(environ, False) == [gloo]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("^lo", ["eth0", "eth1"]),
        ("^=eth0,lo", ["eth1"]),
        ("^lo,eth", []),
        ("ib", []),
    ],
)
def test_interfaces_are_read_as_nccl_reads_them(wanted, left):
    assert network.nccl_interfaces(wanted, ["eth0", "eth1", "lo"]) == left


def test_what_only_nccl_understands_is_told_apart_from_a_missing_name():
    [line] = network.missing_interfaces({"GLOO_SOCKET_IFNAME": "^lo"}, False)
    assert line.startswith(
        "GLOO_SOCKET_IFNAME=^lo (`^` and `=` are NCCL's), but the interfaces are"
    )
    assert network.missing_interfaces({"NCCL_SOCKET_IFNAME": "^none0"}, True) == []
    every = ",".join(psutil.net_if_stats())
    assert len(network.missing_interfaces({"NCCL_SOCKET_IFNAME": f"^{every}"}, True)) == 1


def test_a_caller_with_the_token_is_answered_and_others_are_not():
    port = network.free_port()
    callers = {}
    waiting = threading.Thread(
        target=lambda: callers.update(network.await_callers(port, "token", 1, 10))
    )
    waiting.start()
    with socket.socket() as stranger:
        deadline = time.monotonic() + 5 * PATIENCE
        while stranger.connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.05)
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
    route = network.call(["no-such-host.invalid", "127.0.0.1"], port, "token", "7", 10)
    waiting.join(10)
    assert route == network.Route("lo", "127.0.0.1", "127.0.0.1")
    assert list(callers) == ["7"]


def test_nobody_there_is_none_and_a_busy_port_is_named():
    port = network.free_port()
    assert network.call(["127.0.0.1"], port, "token", "1", 0.3) is None
    assert network.await_callers(port, "token", 1, 0.3) == {}
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"port {port} on"):
        network.await_callers(port, "token", 1, 0.3)
