"""The small state: random states survive to the bit, and the rules of what may change on resume."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from checkpoint.format.blocks import Damaged
from checkpoint.format.state import RunState, fingerprint, random_states, restore_random_states
from checkpoint.load.allowed_changes import FIXED, FREE, check_resume, flatten, treatment
from recipes import schema


def draws():
    """One draw of everything that a restored generator must repeat."""
    return [
        torch.randn(3).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(1).tolist(),  # draws in pairs: the second one is part of the state
        random.random(),
        random.gauss(0, 1),
    ]


def test_random_states_go_through_json_and_repeat_every_draw():
    for _ in range(3):
        draws()
    stored = json.dumps(random_states())
    expected = [draws() for _ in range(3)]
    draws()
    restore_random_states(json.loads(stored))
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("torch"),
        lambda s: s.pop("numpy"),
        lambda s: s.update(torch=s["torch"][:-8]),
        lambda s: s.update(torch="!" + s["torch"][1:]),
        lambda s: s.update(python=[3, s["python"][1][:-8], None]),
        lambda s: s.update(numpy=["MT19937", 5, 0, 0, "0x0p+0"]),
        lambda s: s.update(numpy=["PCG64", *s["numpy"][1:]]),
        lambda s: s.update(numpy=None),
    ],
)
def test_a_damaged_random_state_is_an_error_and_touches_no_generator(change):
    """CKP-22."""
    states = json.loads(json.dumps(random_states()))
    change(states)
    before = random_states()
    with pytest.raises(Damaged, match="random state"):
        restore_random_states(states)
    assert random_states() == before


def state(**changes):
    values = dict(step=5, tokens=640, optimizer_step=4, seed=1)
    recipe = {"model": {}, "data": {}, "optim": {"lr": 1}, "seq_len": 8}
    data = {"order_version": 1, "corpora": {}, "window_tokens": 8}
    health = {"skips_in_a_row": 0, "skipped_steps": 0}
    return RunState(**(values | dict(recipe=recipe, data=data, health=health) | changes))


def test_a_run_status_goes_through_json_unchanged():
    one = state(layout={"data": 2})
    assert RunState.from_dict(json.loads(json.dumps(one.as_dict()))) == one


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.pop("seed"),
        lambda s: s.update(extra=1),
        lambda s: s.update(step=-1),
        lambda s: s.update(step="5"),
        lambda s: s.update(optimizer_step=True),
        lambda s: s["recipe"]["optim"].update(lr=2),
        lambda s: s["data"].pop("corpora"),
        lambda s: s.update(data=[]),
        lambda s: s.update(health={}),
    ],
)
def test_a_state_that_lost_or_changed_a_field_is_damaged(change):
    values = state().as_dict()
    change(values)
    with pytest.raises(Damaged, match="state"):
        RunState.from_dict(values)


def test_a_fingerprint_depends_on_values_not_on_the_order_of_keys():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})


# Resume rules


def recipe():
    """A resolved recipe as nested dicts, with the identity that stands beside it."""
    shape = dict(vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    made = schema.Recipe(
        seq_len=16,
        batch_tokens=64,
        model=schema.Model(**shape, **heads),
        data=schema.Data(sources={"prose": schema.Source(corpus="corpora/prose")}),
        optim=schema.Optim(lr=1e-3),
    )
    return dataclasses.asdict(made) | {"identity": {"corpora": {"prose": "aa"}, "order_version": 1}}


def changed(key, value):
    """The recipe with one dotted key set."""
    made = recipe()
    at = made
    *path, last = key.split(".")
    for name in path:
        at = at[name]
    at[last] = value
    return made


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.hidden_size", 8),
        ("model.rope_theta", 5e5),
        ("seed", 7),
        ("data.window_tokens", 32),
        ("data.tokenizer", "other"),
        ("optim.name", "sgd"),
        ("identity.corpora", {"prose": "bb"}),
        ("identity.corpora", {"prose": "aa", "code": "cc"}),
        ("identity.order_version", 2),
    ],
)
def test_a_fixed_field_is_refused_and_shows_both_values(key, value):
    """ORD-11: another seed or corpus is never this run."""
    verdict = check_resume(recipe(), changed(key, value), allow=[])
    assert len(verdict.problems) == 1
    assert "in the checkpoint" in verdict.problems[0]
    name = verdict.changes[0].key
    assert json.dumps(verdict.changes[0].now).strip('"(') in verdict.problems[0]
    again = check_resume(recipe(), changed(key, value), allow=[name])
    assert len(again.problems) == 2
    assert "cannot change within a run" in again.problems[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seq_len", 32),
        ("precision", "fp32"),
        ("optim.lr", 2e-3),
        ("optim.weight_decay", 0.0),
        ("optim.clip", 0.5),
        ("batch_tokens", [[0, 64], [10, 128]]),
        ("steps", 100),
        ("warmup", 5),
        ("optim.schedule", "wsd"),
        ("data.sources.prose.weight", 2.0),
        ("a_knob_of_a_later_version", 1),
    ],
)
def test_a_deliberate_change_needs_its_name_and_goes_on_record(key, value):
    now = changed(key, value)
    verdict = check_resume(recipe(), now)
    assert [f"allow=[{key}]" in line for line in verdict.problems] == [True]
    allowed = check_resume(recipe(), now, allow=[key])
    assert allowed.problems == []
    assert [(c.key, c.now, c.treatment) for c in allowed.changes] == [(key, value, "deliberate")]
    group = check_resume(recipe(), now, allow=[key.split(".")[0]])
    assert group.problems == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("zero", 3),
        ("micro_batch", 4),
        ("parallel.tensor", 2),
        ("cluster.gpus_per_node", 4),
        ("log.every", 10),
        ("stop_after", 50),
        ("eval_every", 10),
        ("recompute", "full"),
        ("data.prefetch", 0),
        ("data.sources.prose.corpus", "/elsewhere/prose"),
        ("ds", {"zero_optimization": {"overlap_comm": True}}),
    ],
)
def test_a_free_change_is_allowed_and_recorded(key, value):
    verdict = check_resume(recipe(), changed(key, value))
    assert verdict.problems == []
    assert [change.treatment for change in verdict.changes] == ["free"]


def test_the_same_recipe_has_nothing_to_say():
    assert check_resume(recipe(), json.loads(json.dumps(recipe()))).changes == []


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("seq_len_warmup", None, [[0, 8]]),
        ("model.qk_norm", False, True),
        ("parallel.sequence", True, False),
        ("data.sources.prose.weight", 1.0, 2.0),
        ("data.skip.mask", [], [[1, 2]]),
    ],
)
def test_a_knob_that_an_older_version_did_not_know_is_no_change_at_its_default(key, default, other):
    before = recipe()
    place = before
    for group in key.split(".")[:-1]:
        place = place.setdefault(group, {})
    place.pop(key.split(".")[-1], None)
    plain = json.loads(json.dumps(before))
    for value, is_new in ((default, False), (other, True)):
        now = json.loads(json.dumps(before))
        place = now
        for group in key.split(".")[:-1]:
            place = place[group]
        place[key.split(".")[-1]] = value
        assert [change.key for change in check_resume(plain, now).changes] == [key] * is_new


def test_an_allowance_that_names_nothing_is_a_problem():
    (problem,) = check_resume(recipe(), recipe(), allow=["optim.lrr"]).problems
    assert "no knob has this name" in problem


def test_all_problems_are_told_at_once():
    now = changed("seed", 7) | {"seq_len": 32, "precision": "fp32"}
    assert len(check_resume(recipe(), now).problems) == 3


def test_every_pattern_of_the_table_names_a_knob():
    later = {"identity", "checkpoint"}  # beside the recipe, and not built yet
    keys = flatten(recipe()) | {"ds.x": 1}
    for pattern in set(FIXED + FREE) - later:
        sample = pattern.replace("*", "prose")
        assert any(key == sample or key.startswith(f"{sample}.") for key in keys), pattern
    assert treatment("data.sources.prose.weight") == "deliberate"
    assert treatment("optim.beta1") == "deliberate"
