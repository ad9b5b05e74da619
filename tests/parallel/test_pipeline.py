"""A pipeline gives the numbers of a plain loop, says what it cannot do, and never waits for ever.

One launch of four ranks; its last act is a rank that raises in the middle of a step.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from pipeline_worker import CASES, EVAL_TOKENS, STEPS, recipe_of
from plain_loop import plain_loop, relative
from ranks import ROOT, run_command

from base.errors import UserError
from model.cost import flops_per_token, num_parameters
from model.decoder import Decoder
from parallel.layout import solve
from parallel.stages import balanced_bounds
from recipes.compose import compose
from runtime.engine.engine import decoder_config

WORKER = ROOT / "tests" / "workers" / "pipeline_worker.py"
TIMEOUT_S = 280
BF16 = [name for name in CASES if "bf16" in name]
FP32 = [name for name in CASES if name not in BF16]


@pytest.fixture(scope="module")
def launch(short_documents, tmp_path_factory):
    """(what the worker wrote, the launch itself)."""
    out = tmp_path_factory.mktemp("pipeline") / "seen.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["4", str(WORKER), str(out), str(short_documents)]
    done = run_command(command, TIMEOUT_S)
    assert out.is_file(), done.stdout[-6000:]
    return json.loads(out.read_text()), done


@pytest.fixture(scope="module")
def seen(launch):
    return launch[0]


@pytest.mark.parametrize("name", FP32)
def test_losses_and_norms_are_those_of_a_plain_loop(seen, short_documents, name):
    expected = plain_loop(recipe_of(name, short_documents), STEPS, EVAL_TOKENS)
    case = seen["cases"][name]
    assert relative(case["loss"], expected["loss"]) < 1e-6
    assert relative(case["norm"], expected["norm"]) < 1e-5
    assert min(case["norm"]) > 0.2  # the clip is active, so a wrong norm would show in the losses
    assert case["eval"] == pytest.approx(expected["eval"], rel=1e-6)
    assert len({tuple(result) for result in case["results"]}) == 1  # on every rank


@pytest.mark.parametrize("name", BF16)
def test_in_bf16_losses_stay_near_those_of_fp32(seen, short_documents, name):
    """Measured: 1.1e-4 at most over the 6 steps."""
    recipe = dataclasses.replace(recipe_of(name, short_documents), precision="fp32")
    case = seen["cases"][name]
    assert relative(case["loss"], plain_loop(recipe, STEPS)["loss"]) < 1e-3
    assert case["class"] == "BF16_Optimizer"


@pytest.mark.parametrize("name", CASES)
def test_stages_hold_every_weight_once_under_its_name(seen, short_documents, name):
    config = decoder_config(recipe_of(name, short_documents))
    expected = {key: list(p.shape) for key, p in Decoder(config).named_parameters()}
    found: dict[str, list[int]] = {}
    copies = 4 // CASES[name][2]["pipeline"]  # ranks of a stage
    times: Counter[str] = Counter()
    for names in seen["cases"][name]["names"]:
        found |= names
        times.update(list(names))
    assert found == expected
    assert set(times.values()) == {copies}


def test_tied_copies_stay_equal_to_the_bit(seen):
    for name, (_, is_tied, axes, _) in CASES.items():
        by_rank = seen["cases"][name]["copies"]
        ranks_of_stage = 4 // axes["pipeline"]
        for rank in range(ranks_of_stage):
            (first,), last = by_rank[rank], by_rank[rank - ranks_of_stage]
            assert last == ([first] if is_tied else [])


def test_a_step_whose_gradients_are_not_finite_is_skipped_by_all_stages(seen):
    for name in CASES:
        assert seen["cases"][name]["poisoned"] == [[True, True, False]] * 4, name


def test_what_crosses_a_boundary_is_tokens_times_hidden_each_way(seen):
    for name in CASES:
        for counted, formula in seen["cases"][name]["sent"]:
            assert counted == formula > 0, name


@pytest.mark.parametrize("stages", [2, 4])
def test_the_bubble_is_the_textbooks(seen, stages):
    bubble = seen["bubbles"][str(stages)]
    assert bubble["measured"] == pytest.approx(bubble["formula"], abs=0.06)
    assert bubble["measured"] > bubble["formula"] - 0.01  # nobody is faster than the schedule


def test_stages_with_other_parameter_groups_are_refused_by_every_rank(seen):
    """They would wait for each other in the norm's collectives."""
    for said in seen["refusals"]["groups"]:
        assert "pipeline stages have different parameter groups" in said
    assert len(seen["refusals"]["groups"]) == 4


def test_a_rank_that_raises_ends_all(launch):
    done = launch[1]  # within TIMEOUT_S
    assert done.returncode != 0
    assert done.stdout.count("RuntimeError: rank 2 gives up") == 1


def shape(**fields) -> SimpleNamespace:
    values = dict(vocab_size=100, hidden_size=16, intermediate_size=64, num_hidden_layers=6)
    values |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=None)
    return SimpleNamespace(
        **(values | dict(qk_norm=False, qkv_bias=False, tie_word_embeddings=False) | fields)
    )


def stage_costs(model, seq_len: int, bounds: tuple[int, ...]) -> list[SimpleNamespace]:
    """FLOPs per token and parameters of every stage, from whole models of one and two blocks."""
    one, two = ({**vars(model), "num_hidden_layers": layers} for layers in (1, 2))
    one, two = SimpleNamespace(**one), SimpleNamespace(**two)
    flops = flops_per_token(two, seq_len) - flops_per_token(one, seq_len)
    block = num_parameters(two) - num_parameters(one)
    table = model.vocab_size * model.hidden_size
    costs = [
        SimpleNamespace(flops=(end - first) * flops, parameters=(end - first) * block)
        for first, end in itertools.pairwise(bounds)
    ]
    costs[0].parameters += table
    has_head = len(costs) > 1 or not model.tie_word_embeddings
    costs[-1].parameters += model.hidden_size + (table if has_head else 0)
    costs[-1].flops += flops_per_token(one, seq_len) - flops
    return costs


def test_stages_are_balanced_with_embedding_and_head_counted():
    """Compared with all possible bounds."""
    for layers, words, is_tied in itertools.product((1, 2, 5, 8), (10, 400, 3000), (True, False)):
        model = shape(num_hidden_layers=layers, vocab_size=words, tie_word_embeddings=is_tied)
        for stages in range(1, layers + 1):
            inner = itertools.combinations(range(1, layers), stages - 1)
            costs = [stage_costs(model, 32, (0, *cuts, layers)) for cuts in inner]
            best = min(slowest(cost) for cost in costs)
            bounds = balanced_bounds(model, 32, stages)
            assert slowest(stage_costs(model, 32, bounds)) == best, (layers, words, bounds)


def slowest(costs) -> tuple[int, int]:
    return max(cost.flops for cost in costs), max(cost.parameters for cost in costs)


def test_stages_add_up_to_the_model():
    model = compose("70b", []).recipe.model
    costs = stage_costs(model, 8192, balanced_bounds(model, 8192, 8))
    assert sum(cost.parameters for cost in costs) == num_parameters(model)
    assert sum(cost.flops for cost in costs) == pytest.approx(
        flops_per_token(model, 8192), rel=1e-9
    )
    # 80 blocks and a head of 1.05 blocks on 8 stages: 11 blocks somewhere, 10.1 on average.
    assert max(cost.flops for cost in costs) < 1.09 * sum(cost.flops for cost in costs) / 8


def bounded(given: str, stages: int = 2):
    overrides = ["zero=pipeline", f"parallel.pipeline={stages}", f"parallel.bounds={given}"]
    return compose("tiny", overrides).recipe


def test_bounds_that_fit_are_taken():
    assert solve(bounded("[2]"), 2, 1).bounds == (0, 2, 4)
    assert solve(bounded("null"), 2, 1).bounds == (0, 3, 4)


@pytest.mark.parametrize(
    ("given", "stages", "words"),
    [
        ("[1,2]", 2, "2 stages of 4 blocks need 1 bounds below 4; balanced: [3]"),
        ("[4]", 2, "balanced: [3]"),
        ("[2]", 1, "no effect with parallel.pipeline=1"),
        ("[2,2,3]", 4, "must be block numbers from 1 that increase"),
        ("[0]", 2, "must be block numbers from 1 that increase"),
        ("half", 2, "a list has brackets; write parallel.bounds=[half]"),
    ],
)
def test_bounds_that_do_not_fit_are_refused_with_those_that_do(given, stages, words):
    with pytest.raises(UserError) as refused:
        solve(bounded(given, stages), stages, 1)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", CASES)
def test_all_stages_obey_one_judgement_before_the_update(seen, name):
    """Sick on one rank, refused, let through: the same on every rank, to the bit."""
    update_gate = seen["cases"][name]["gate"]
    assert [facts[:3] for facts in update_gate["sick"]] == [[True, True, 0]] * 4
    assert [facts[:3] for facts in update_gate["refused"]] == [[True, True, 0]] * 4
    assert [facts[:3] for facts in update_gate["let"]] == [[False, False, 1]] * 4
    for kind in update_gate.values():
        assert len({tuple(facts[3]) for facts in kind}) == 1  # the same question, once
        assert len(kind[0][3]) == 1
