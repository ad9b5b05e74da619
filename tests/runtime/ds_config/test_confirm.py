"""DeepSpeed's own view of a JSON: asked once, remembered, and equal to our list of keys."""

from __future__ import annotations

import json
import sys

import pytest
from ranks import run_command

from base.errors import UserError
from recipes.compose import compose
from runtime.ds_config import confirm
from runtime.ds_config.keys import KEYS, REFUSED
from runtime.ds_config.merge import engine_config

SCRIPT = """
import json, sys
from runtime.ds_config.confirm import check_with_deepspeed
from deepspeed.runtime.precision_config import DeepSpeedBF16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from runtime.ds_config.confirm import _fields
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS
asked, out = sys.argv[1:]
fields = [*_fields(DeepSpeedZeroConfig, "zero_optimization"), *_fields(DeepSpeedBF16Config, "bf16")]
answer = {"problems": [check_with_deepspeed(config) for config in json.load(open(asked))],
          "fields": fields, "removed": list(_REMOVED_TOP_LEVEL_CONFIG_KEYS),
          "removed_zero": list(_REMOVED_ZERO_CONFIG_KEYS)}
json.dump(answer, open(out, "w"))
"""


def resolved(zero) -> dict:
    extra = ["parallel.pipeline=2"] if zero == "pipeline" else []
    recipe = compose("tiny", [f"zero={zero}", *extra]).recipe
    return engine_config(recipe, data_size=2, accumulation=2, accumulates=True).json


@pytest.fixture(scope="module")
def answer(tmp_path_factory):
    """One process that imports DeepSpeed answers everything."""
    folder = tmp_path_factory.mktemp("ask")
    configs = [resolved(zero) for zero in (1, 2, 3, "zero3_offload", "pipeline")]
    wrong = resolved(1)
    wrong["zero_optimization"] |= {"overlap_com": True, "reduce_bucket_size": "many"}
    wrong["bf16"]["enabld"] = True
    configs += [wrong, resolved(1) | {"elasticity": {}}]
    (folder / "asked.json").write_text(json.dumps(configs))
    command = [sys.executable, "-c", SCRIPT, str(folder / "asked.json"), str(folder / "out.json")]
    done = run_command(command, timeout_s=120)
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "out.json").read_text())


def test_deepspeed_takes_every_preset_as_resolved(answer):
    assert answer["problems"][:5] == [[]] * 5


def test_deepspeed_names_every_problem_and_the_nearest_key(answer):
    text = "\n".join(answer["problems"][5])
    assert "did you mean zero_optimization.overlap_comm?" in text
    assert "zero_optimization.reduce_bucket_size='many'" in text
    assert "did you mean bf16.enabled?" in text
    assert "Elastic training has been removed" in answer["problems"][6][0]


def test_our_list_has_each_key_of_deepspeeds_classes_and_no_other(answer):
    typed = ("zero_optimization.", "bf16.")
    theirs = set(answer["fields"])
    inner = {name.rpartition(".")[0] for name in theirs}
    ours = {name for name in KEYS if name.startswith(typed)}
    refused = {name for name in REFUSED if name.startswith(typed)}
    assert ours <= theirs
    leaves = {name for name in theirs if name not in inner}
    unlisted = {
        name
        for name in leaves - ours - refused
        if not any(name.startswith(f"{block}.") for block in refused)
    }
    assert not unlisted


def test_what_deepspeed_has_removed_is_refused_by_us_first(answer):
    assert set(answer["removed"]) <= REFUSED.keys()
    assert {f"zero_optimization.{key}" for key in answer["removed_zero"]} <= REFUSED.keys()


def test_a_passed_json_is_not_asked_again_and_a_new_batch_is_not_new(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(confirm, "ask", lambda config: asked.append(config) or [])
    memo = tmp_path / "cache" / "memo.json"
    confirm.confirm(resolved(1), memo)
    confirm.confirm(resolved(1), memo)
    confirm.confirm(resolved(1) | {"train_batch_size": 999}, memo)
    assert len(asked) == 1
    confirm.confirm(resolved(2), memo)
    assert len(asked) == 2


def test_a_refused_json_is_asked_every_time(tmp_path, monkeypatch):
    monkeypatch.setattr(confirm, "ask", lambda config: ["bad"])
    for _ in range(2):
        with pytest.raises(UserError, match="bad"):
            confirm.confirm(resolved(1), tmp_path / "memo.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["{", "7", ""])
def test_a_damaged_or_unwritable_memo_does_no_harm(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(confirm, "ask", lambda config: [])
    memo = tmp_path / "memo.json"
    memo.write_text(damage)
    confirm.confirm(resolved(1), memo)
    assert len(json.loads(memo.read_text())) == 1
    blocked = memo / "under_a_file" / "memo.json"
    confirm.confirm(resolved(1), blocked)


def test_a_missing_or_old_deepspeed_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(confirm.importlib.metadata, "version", lambda name: "0.18.3")
    with pytest.raises(UserError, match=r"0\.18\.3 is too old.*pip install 'deepspeed>=0\.19\.8'"):
        confirm.installed_version()
    monkeypatch.undo()
    monkeypatch.setattr(confirm, "PACKAGE", "no-such-package-here")
    with pytest.raises(UserError, match="is not installed; pip install"):
        confirm.installed_version()


def test_a_check_that_does_not_end_is_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setattr(confirm, "TIME_LIMIT_S", 0)
    with pytest.raises(UserError, match="not checked, within 0 s: the disk"):
        confirm.confirm({"zero_optimization": {"stage": 1}}, tmp_path / "memo")


def test_the_module_answers_on_standard_output_with_its_status(monkeypatch):
    """Only the plumbing: a process that cannot import DeepSpeed is a problem, not an answer."""
    monkeypatch.setattr(confirm.sys, "executable", "/bin/false")
    assert "cannot be imported" in confirm.ask(resolved(1))[0]
