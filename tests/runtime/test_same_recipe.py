"""runtime/same_recipe.py: ranks with different recipes refuse, with knobs, values and hosts."""

from __future__ import annotations

from rank_threads import run_threads

from base.errors import Shared
from recipes.compose import compose
from runtime.same_recipe import by_place, same_recipe


def outcome(recipes, configs, hosts):
    found = []

    def one(comm):
        def exchange(value, what):
            found.append(what)
            if isinstance(value, tuple) and isinstance(value[0], str) and what == "recipe":
                value = (hosts[comm.rank], value[1])
            return real(value, what)

        real, comm.exchange = comm.exchange, exchange
        return same_recipe(recipes[comm.rank], configs[comm.rank], comm)

    return run_threads(len(recipes), one), found


def test_equal_recipes_exchange_digests_alone():
    tiny = compose("tiny", []).recipe
    results, found = outcome([tiny] * 3, [{"a": 1}] * 3, "xyz")
    assert results == [None] * 3
    assert set(found) == {"digest of the recipe"}


def test_a_difference_names_knob_values_and_hosts():
    """A learning rate from each host's own environment: `${oc.env:LR,1e-3}`."""
    one, other = (compose("tiny", [f"optim.lr={lr}"]).recipe for lr in (0.001, 0.002))
    results, _ = outcome([one, one, other], [{}] * 3, ["a", "a", "b"])
    for error in results:
        assert isinstance(error, Shared)
        assert error.problems[0].endswith("optim.lr=0.001 on a, 0.002 on b")
        assert "with make pretrain" in error.problems[-1]
        assert len(error.problems) == 2


def test_a_difference_of_the_deepspeed_json_is_found_too():
    tiny = compose("tiny", []).recipe
    configs = [{"zero_optimization": {"stage": 1}}, {"zero_optimization": {"stage": 2}}]
    results, _ = outcome([tiny] * 2, configs, ["a", "a"])
    line = "ds.zero_optimization.stage=1 on rank 0 (a), 2 on rank 1 (a)"
    assert results[0].problems[0].endswith(line)


def test_an_instruction_of_one_start_must_be_the_same_on_all_ranks():
    auto, fresh = (compose("tiny", [f"resume={how}"]).recipe for how in ("auto", "fresh"))
    results, _ = outcome([auto, fresh], [{}] * 2, ["a", "b"])
    assert results[0].problems[0].endswith("resume='auto' on a, 'fresh' on b")


def test_secrets_are_masked(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "hunter2hunter2")
    one, other = (
        compose("tiny", [f"alerts.command=[send,{key}]"]).recipe
        for key in ("hunter2hunter2", "none")
    )
    results, _ = outcome([one, other], [{}] * 2, ["a", "b"])
    assert "hunter2" not in str(results[0])


def test_ranks_of_a_host_that_agree_are_one_place():
    same, odd = {"x": 1}, {"x": 2}
    assert by_place([("a", same), ("a", same), ("b", odd)]) == {"a": same, "b": odd}
    assert by_place([("a", same), ("a", odd)]) == {"rank 0 (a)": same, "rank 1 (a)": odd}
