"""Layouts do not change the run: a pairwise cover of all of them, and what a tensor rank says,
holds and computes.

Three launches: two ranks for the details, four for the cover, eight for three axes at once.
"""

from __future__ import annotations

import json
import sys

import pytest
from layout_cases import BF16_BOUND, Case, cover, every, pairs, parse
from layout_worker import EVAL_TOKENS, recipe_of
from parity_worker import STEPS
from plain_loop import plain_loop, relative
from ranks import ROOT, run_command, run_ranks

from base.errors import UserError
from data.stream.schedule import schedule_of
from recipes.compose import compose
from runtime.resolve import resolve

WORKERS = ROOT / "tests" / "workers"
TIMEOUT_S = 280  # of one launch
pytestmark = pytest.mark.timeout(900)  # the first test waits for two
COVER = cover(case for case in every() if case.world == 4)
THREE_AXES = [
    Case(tensor=2, pipeline=2, data=2, accumulation=4, tied=True),
    Case(tensor=2, context=2, data=2, stage=3, accumulation=4, recompute="full"),
]


@pytest.fixture(scope="module")
def trained(short_documents, tmp_path_factory) -> dict[str, dict]:
    """What every case saw, by name."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for world, cases in ((4, COVER), (8, THREE_AXES)):
        names = ";".join(case.name for case in cases)
        arguments = str(folder / f"{world}.json"), str(short_documents), names
        found |= run_ranks(WORKERS / "layout_worker.py", world, TIMEOUT_S, *arguments)
    return found


@pytest.fixture(scope="module")
def plain(short_documents) -> dict[bool, dict]:
    """The plain loop, without and with tied embeddings."""
    cases = {tied: Case(tied=tied, accumulation=4) for tied in (False, True)}
    return {
        tied: plain_loop(recipe_of(case, short_documents), STEPS, EVAL_TOKENS)
        for tied, case in cases.items()
    }


@pytest.fixture(scope="module")
def launch(short_documents, tmp_path_factory):
    """(what two tensor ranks wrote, the launch itself, which ends in a failure)."""
    out = tmp_path_factory.mktemp("tensor") / "seen.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", str(WORKERS / "tensor_worker.py"), str(out), str(short_documents)]
    done = run_command(command, TIMEOUT_S)
    assert out.is_file(), done.stdout[-6000:]
    return json.loads(out.read_text()), done


@pytest.fixture(scope="module")
def seen(launch) -> dict:
    return launch[0]


def test_the_cover_has_every_pair_that_four_ranks_can_have():
    all_pairs = set().union(*(pairs(case) for case in every() if case.world == 4))
    assert set().union(*map(pairs, COVER)) == all_pairs
    assert len(COVER) == 12
    assert all(parse(case.name) == case for case in every())


def test_losses_and_norms_are_those_of_a_plain_loop_in_every_layout(trained, plain):
    for name, case in trained.items():
        expected = plain[parse(name).tied]
        if parse(name).precision == "bf16":
            assert relative(case["loss"], expected["loss"]) < BF16_BOUND, name
            assert case["eval"] == pytest.approx(expected["eval"], rel=BF16_BOUND), name
            continue
        assert relative(case["loss"], expected["loss"]) < 1e-6, name
        assert relative(case["norm"], expected["norm"]) < 1e-5, name
        assert case["eval"] == pytest.approx(expected["eval"], rel=1e-6), name
        assert min(case["norm"]) > 0.2, name  # the clip is active: a wrong norm would show


def test_every_layout_trains_on_the_same_batches(trained):
    assert len(trained) == len(COVER) + len(THREE_AXES)
    assert len({tuple(case["hash"]) for case in trained.values()}) == 1


def test_the_fullest_rank_allocates_what_show_says_of_the_optimizer(trained):
    for name, case in trained.items():
        held = max(rank["optimizer"] for rank in case["memory"])
        shown = case["memory"][0]["shown"]
        assert shown <= held <= 1.01 * shown, (name, held, shown)  # above it: padding


def test_autograd_keeps_what_the_dry_run_says_at_most(trained):
    """Of cases in fp32 without recomputation: a CPU without bf16 units keeps fp32 copies, and what
    a block keeps when it runs again is not seen. A stage in the middle has no ends, but they count.
    """
    seen = 0
    for name, case in trained.items():
        if parse(name).precision == "bf16" or parse(name).recompute != "none":
            continue
        for rank in case["memory"]:
            most = rank["activations"] + rank["loss"]
            assert 0.85 * rank["activations"] <= rank["kept"] <= most, (name, rank)
            seen += 1
    assert seen >= 4


def test_a_clipped_sgd_update_has_the_norm_of_the_clip_in_every_layout(trained):
    for name, case in trained.items():
        rounding = 1e-4 if parse(name).precision == "fp32" else 2e-3  # of bf16 weights
        assert case["update_norm"] == pytest.approx(0.1, rel=rounding), name


def test_replicated_weights_stay_equal_to_the_bit(trained, seen):
    assert not any(case["replicas"] or case["drifted"] for case in trained.values())
    replicas = seen["replicas"]  # after 100 steps
    assert replicas["differ"] == []
    assert replicas["last"] < replicas["first"]


def test_a_cut_decoder_computes_what_the_whole_one_does(seen):
    """Losses and all gradients, the vocabulary not divisible; compiled whole (fullgraph), too."""
    assert len(seen["differences"]) == 5
    for name, difference in seen["differences"].items():
        assert difference < 1e-6, name


def test_what_ranks_say_is_what_the_formulas_foretell(seen):
    assert len(seen["counts"]) == 7
    for name, ranks in seen["counts"].items():
        for rank in ranks:
            assert rank["heard"] == rank["foretold"] != {}, name


def test_selective_recomputation_says_nothing_twice(seen):
    without, selective = seen["selective"]
    assert selective == without > 0


def test_stage_3_gathers_in_every_micro_batch_and_at_most_what_is_foretold(seen):
    (_, once), (_, twice) = seen["gathers"]["heard"]
    _, foretold = seen["gathers"]["foretold"]
    assert (
        foretold / 2 <= twice - once <= foretold
    )  # half: what is still held is not gathered again


def test_zero_3_with_tensor_parallelism_warns_of_its_gathers():
    recipe = compose("7b", ["zero=3", "parallel.tensor=4"]).recipe
    schedule = schedule_of(recipe)
    (line,) = [line for line in resolve(recipe, 16, schedule).warnings if "gathers" in line]
    assert "parallel.tensor=4" in line
    plain = compose("7b", ["zero=3"]).recipe
    assert not [line for line in resolve(plain, 16, schedule).warnings if "gathers" in line]


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("ds.zero_optimization.leaf_module.classes=[]", "add Block"),
        ("ds.zero_optimization.zero_hpz_partition_size=2", "zero_hpz_partition_size"),
    ],
)
def test_what_stage_3_cannot_do_with_sharded_modules_is_refused(override, part):
    recipe = compose("7b", ["zero=3", "parallel.tensor=4", override]).recipe
    schedule = schedule_of(recipe)
    with pytest.raises(UserError) as refused:
        resolve(recipe, 16, schedule)
    assert part in str(refused.value)


def test_recompute_is_checked_when_composing():
    with pytest.raises(UserError, match="every-0"):
        compose("tiny", ["recompute=every-0"])
    with pytest.raises(UserError, match="compile=true"):
        compose("tiny", ["recompute=selective", "compile=true"])


def test_initial_weights_are_parts_of_those_of_one_process(seen):
    assert all(rank["is_initial"] for ranks in seen["counts"].values() for rank in ranks)


def test_a_rank_holds_the_parameters_that_are_foretold(seen):
    for name, ranks in seen["counts"].items():
        assert all(rank["held"] == rank["parameters"] for rank in ranks), name
        assert max(rank["held"] for rank in ranks) == ranks[0]["most"], name


def test_gradients_of_tokens_travel_while_those_of_weights_are_computed(seen):
    """In the backward of each half of a block, every product with the tokens runs between the
    launch of the scatter and the wait for it; those of the head run in its forward."""
    names = [name.partition("::")[2] for name in seen["backward"]]
    starts = [i for i, name in enumerate(names) if name == "reduce_scatter_tensor"]
    overlapped = []
    for start in starts:
        end = names.index("wait_tensor", start)
        overlapped.append(names[start:end].count("mm"))
    assert overlapped == [0] + [2, 3] * 4  # gate and up; q, k and v


def test_a_rank_that_fails_in_a_step_ends_the_launch(launch):
    _, done = launch
    assert done.returncode != 0
    assert done.stdout.count("UserError: rank 1 gives up in the middle of a step") == 1
