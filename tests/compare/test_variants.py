"""compare.variants and compare.folder: the runs of a sweep, their names, and what is refused."""

from __future__ import annotations

import json

import pytest

from base.errors import UserError
from commands import compare as command
from compare import folder
from compare.variants import ComparisonPlan, plan
from data.stream.schedule import schedule_of
from recipes.overrides import sweep_values
from runtime.resolve import resolve


def planned(
    *sweep: str, ranks=2, steps=20, repeats=2, name=None, overrides=(), **more
) -> ComparisonPlan:
    """Plan of `make compare RECIPE=tiny SWEEP=...`."""

    def resolved(recipe):
        return resolve(recipe, ranks, schedule_of(recipe))

    return plan(name, "tiny", ranks, list(overrides), list(sweep), steps, repeats, resolved, **more)


def problems_of(*sweep: str, **options) -> list[str]:
    with pytest.raises(UserError) as refusal:
        planned(*sweep, **options)
    return refusal.value.problems


# ---- the plan


def test_rounds_are_interleaved_and_every_run_has_a_name_of_its_own():
    wanted = planned("zero=1,2", "micro_batch=1,2")
    assert [variant.label for variant in wanted.variants] == [
        "zero=1 micro_batch=1",
        "zero=1 micro_batch=2",
        "zero=2 micro_batch=1",
        "zero=2 micro_batch=2",
    ]
    runs = [turn.run for turn in wanted.turns()]
    assert runs[:2] == ["tiny-by-zero-micro_batch.zero-1.micro_batch-1.r1",
                        "tiny-by-zero-micro_batch.zero-1.micro_batch-2.r1"]  # fmt: skip
    assert [turn.round for turn in wanted.turns()] == [1] * 4 + [2] * 4
    assert len(set(runs)) == 8
    arguments = wanted.arguments(wanted.turns()[5])
    assert arguments[0] == "recipe=tiny"
    assert arguments[-1] == "run=tiny-by-zero-micro_batch.zero-1.micro_batch-2.r2"
    assert {"stop_after=20", "log.communication=true", "checkpoint.at_end=false"} < set(arguments)
    assert {"eval_tokens=0", "eval_every=0"} < set(arguments)


def test_runs_ranked_by_loss_are_evaluated_and_each_round_has_a_seed_for_all_variants():
    wanted = planned("optim.lr=1e-3,2e-3", repeats=3, rank="val_loss", has_seeds=True)
    arguments = [wanted.arguments(turn) for turn in wanted.turns()]
    seeds = [[one for one in each if one.startswith("seed=")] for each in arguments]
    assert seeds == [["seed=1234"]] * 2 + [["seed=1235"]] * 2 + [["seed=1236"]] * 2
    for each in arguments:
        assert "eval_every=2" in each  # ten points of a curve
        assert not [one for one in each if one.startswith("eval_tokens=")]
    stored = wanted.as_dict()
    assert (stored["rank"], stored["first_seed"]) == ("val_loss", 1234)
    assert not {"rank", "first_seed"} & planned("zero=1,2").as_dict().keys()  # as older versions
    own = planned("zero=1,2", overrides=["seed=5"], rank="val_loss", has_seeds=True)
    assert [one for one in own.arguments(own.turns()[2]) if "seed=" in one] == ["seed=6"]


def test_hydras_lists_choices_and_ranges_are_understood():
    assert sweep_values(["optim.lr=choice(1e-3,2e-3)", "seed=range(1,4)", "data=sotu,mine"]) == {
        "optim.lr": ["optim.lr=0.001", "optim.lr=0.002"],
        "seed": ["seed=1", "seed=2", "seed=3"],
        "data": ["data=sotu", "data=mine"],
    }
    assert sweep_values(["batch_tokens=[[0,2048],[3,4096]],2048"]) == {
        "batch_tokens": ["batch_tokens=[[0,2048],[3,4096]]", "batch_tokens=2048"]
    }


@pytest.mark.parametrize("word", ["zero", "zero=1,", "optim.lr=interval(0,1)", "zero=glob(*)"])
def test_a_malformed_sweep_is_refused(word):
    [problem] = problems_of(word)
    assert f"sweep {word!r} is malformed" in problem


def test_names_that_folders_do_not_take_are_replaced():
    wanted = planned("batch_tokens=[[0,2048],[3,4096]],2048")
    assert [v.slug for v in wanted.variants] == [
        "batch_tokens-0-2048-3-4096", "batch_tokens-2048",
    ]  # fmt: skip
    equal = planned("data.sources.prose.max_epochs=1.5,2.5", "ds.zero_optimization.round_robin"
                      "_gradients=true,false", name="n" * 60)  # fmt: skip
    assert [v.slug for v in equal.variants] == ["v001", "v002", "v003", "v004"]
    assert max(len(turn.run) for turn in equal.turns()) <= 100


def test_every_problem_of_every_variant_is_reported_before_anything_starts():
    found = problems_of("zero=1,4", "micro_batch=2,3")
    assert any(line.startswith("zero=4 micro_batch=2") and "zero=4" in line for line in found)
    assert any("micro_batch=3" in line and "2048" in line for line in found)
    assert len(found) == 2
    # a problem of the recipe itself, and so of every variant, is printed once
    shared = problems_of("zero=1,2,3", overrides=["optim.lr=-1"])
    assert len(shared) == 1
    assert shared[0].startswith("optim.lr=-1")


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["zero=1"], {}, "one variant, nothing to compare"),
        ([], {}, "one variant, nothing to compare"),
        (["zero=1,1"], {}, "zero=1 stands there twice"),
        (["zero=1,2", "zero=3"], {}, "zero is given twice"),
        (["run=a,b"], {}, "SWEEP sets run: the comparison names its runs"),
        (["zero=1,2"], {"overrides": ["stop_after=3"]}, "OVERRIDES sets stop_after"),
        (["zero=1,2"], {"overrides": ["zero=3"]}, "zero stands in SWEEP and in OVERRIDES"),
        (["recipe=tiny,1b"], {}, "SWEEP sets recipe"),
        (["zero=1,2"], {"steps": 300}, "STEPS=300 is more than the 200 steps of tiny"),
        (["zero=1,2"], {"name": "a/b"}, "NAME='a/b' is not a folder name"),
        (["zero=1,2"], {"name": "a=b"}, "a name has no '='"),
        (["zero=1,2"], {"name": "n" * 99}, "too long for its runs' names"),
        (["seed=range(0,2000)"], {}, "more than 1000 runs"),
        (["zero=1,2"], {"ranks": 3}, "batch_tokens=2048"),
        (["seed=1,2"], {"has_seeds": True}, "SEEDS and SWEEP both set seed"),
        (
            ["zero=1,2"],
            {"rank": "val_loss", "overrides": ["eval_tokens=0"]},
            "RANK=val_loss: eval_tokens=0 evaluates nothing",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_reason(words, options, said):
    assert said in "\n".join(problems_of(*words, **options))


def test_counts_given_wrong_are_refused_together(capsys):
    arguments = ["--sweep", "zero=1,2", "--steps", "2", "--repeats", "x", "--nproc", "0"]
    assert command.main(arguments) == 93
    said = capsys.readouterr().err
    assert "STEPS='2' is not a number from 3" in said
    assert "REPEATS='x'" in said
    assert "NPROC='0'" in said
    arguments = ["--sweep", "zero=1,2", "--seeds", "0", "--repeats", "2", "--rank", "val_loss"]
    assert command.main(arguments) == 93
    said = capsys.readouterr().err
    assert "SEEDS and REPEATS both set the rounds" in said
    assert "SEEDS='0' is not a number from 1" in said
    assert command.main(["--sweep", "zero=1,2", "--rank", "loss"]) == 93
    assert "RANK=loss: give one of tokens_per_s, val_loss, bits_per_byte" in capsys.readouterr().err


def test_a_folder_stores_what_it_compares_and_refuses_another(tmp_path):
    place = tmp_path / "cmp"
    wanted = planned("zero=1,2").as_dict()
    folder.open_comparison(place, wanted).close()
    folder.open_comparison(place, wanted).close()  # continues
    folder.open_comparison(place, planned("zero=1,2", repeats=5).as_dict()).close()  # more rounds
    with pytest.raises(UserError, match=r"another comparison \(steps 20 there, 30 now\)"):
        folder.open_comparison(place, planned("zero=1,2", steps=30).as_dict())
    edited = json.loads(json.dumps(wanted))
    edited["variants"][0]["digest"] = "0"
    with pytest.raises(UserError, match="the recipe has changed since"):
        folder.open_comparison(place, edited)
    held = folder.open_comparison(place, wanted)
    with pytest.raises(UserError, match="another process is writing"):
        folder.open_comparison(place, wanted)
    held.close()
    # recorded rounds belong to it, even when fewer were asked for later; others are refused
    again = planned("zero=1,2", repeats=6, name="cmp")
    for name in (again.by_round()[5][0], again.by_round()[6][1]):
        (tmp_path / name).mkdir()
    folder.refuse_strangers(place, planned("zero=1,2", repeats=5, name="cmp").by_round())
    with pytest.raises(UserError, match=r"have these names: cmp\.zero-2\.r6 in "):
        folder.refuse_strangers(place, again.by_round())
    with pytest.raises(UserError, match=r"names: cmp\.zero-1\.r5, cmp\.zero-2\.r6 in "):
        folder.refuse_strangers(tmp_path / "new", again.by_round())
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="is not the folder of a comparison"):
        folder.open_comparison(tmp_path / "run", wanted)
