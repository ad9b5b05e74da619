"""launch/hosts/variables.py: what goes along to other hosts, and what never does."""

from __future__ import annotations

import pytest

from base.errors import UserError
from launch.hosts.variables import left_here, passed, watched

ODD = "a b'c\"d\n$(id);é*="


def test_only_what_steers_the_libraries_goes_along():
    environ = {
        "NCCL_DEBUG": ODD,
        "OMP_NUM_THREADS": "4",
        "PATH": "/bin",
        "HOME": "/root",
        "SSH_AUTH_SOCK": "/x",
        "CUDA_VISIBLE_DEVICES": "0",
        "RANK": "3",
        "MASTER_ADDR": "elsewhere",
    }
    assert passed(environ) == {"NCCL_DEBUG": ODD, "OMP_NUM_THREADS": "4"}


def test_a_variable_that_does_not_go_along_although_it_was_set_is_named():
    environ = {"CUDA_VISIBLE_DEVICES": "4,5"}
    assert len(left_here(environ, [])) == 1
    assert left_here(environ, ["CUDA_VISIBLE_DEVICES"]) == left_here({}, []) == []


def test_a_secret_goes_only_when_it_is_named_and_is_never_compared():
    environ = {"HF_TOKEN": "s", "WANDB_API_KEY": "s", "MINE": "m"}
    assert passed(environ) == {}
    assert passed(environ, ["WANDB_API_KEY", "MINE"]) == {"WANDB_API_KEY": "s", "MINE": "m"}
    assert watched(environ) == {}


def test_names_of_interfaces_may_differ_between_hosts():
    environ = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_HCA": "mlx5", "NCCL_ALGO": "Ring"}
    assert watched(environ) == {"NCCL_ALGO": "Ring"}


def test_bad_names_are_refused_all_at_once():
    with pytest.raises(UserError) as caught:
        passed({}, ["A B", "ABSENT", "x;y"])
    assert len(caught.value.problems) == 3
    assert "ABSENT is not set" in caught.value.problems[1]
