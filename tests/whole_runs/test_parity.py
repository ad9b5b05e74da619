"""One recipe gives the same run in every layout: ZeRO 1, 2, 3 x 1, 2, 4 ranks x accumulation 1, 4.

The reference shares no code with the engine: Transformers' Llama, torch.optim.AdamW and
clip_grad_norm_ in a plain loop below.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from parity_worker import BATCH, SEQ_LEN, STEPS, VARIANTS, tiny_recipe
from ranks import ROOT, run_ranks
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from data.stream.schedule import read_schedule
from data.stream.stream import open_stream
from model.config import DecoderConfig
from model.decoder import Decoder
from model.init import fill
from runtime.engine.learning_rate import learning_rate, warmup_steps

WORKER = ROOT / "tests" / "workers" / "parity_worker.py"
TIMEOUT_S = {1: 120, 2: 180, 4: 280}


@pytest.fixture(scope="module")
def cases(short_documents, tmp_path_factory) -> dict[str, dict]:
    """All fp32 cases of all numbers of ranks, by name."""
    folder = tmp_path_factory.mktemp("parity")
    found = {}
    for world, timeout_s in TIMEOUT_S.items():
        out = folder / f"{world}.json"
        seen = run_ranks(WORKER, world, timeout_s, str(out), str(short_documents), "fp32")
        found |= {f"{world} ranks {name}": case for name, case in seen.items()}
    return found


@pytest.fixture(scope="module")
def reference(short_documents) -> dict[str, list[float]]:
    """Losses and norms of the plain loop on the same batches."""
    recipe = tiny_recipe(short_documents, stage=1, micro_batch=BATCH, precision="fp32")
    schedule = read_schedule(recipe.batch_tokens, SEQ_LEN)
    stream = open_stream(recipe.data, recipe.seed, SEQ_LEN, schedule, Path("/"), 64)
    model = llama_like(recipe)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
    )
    warmup = warmup_steps(recipe.warmup, STEPS)
    seen: dict[str, list[float]] = {"loss": [], "norm": []}
    for step in range(1, STEPS + 1):
        (batch,) = stream.step(step, 0, 1, BATCH).micro_batches
        ids, labels = torch.from_numpy(batch.input_ids), torch.from_numpy(batch.labels)
        segments = torch.from_numpy(batch.segment_ids)
        same = segments[:, :, None] == segments[:, None, :]
        visible = same & torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))[:, None]
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.optim, warmup, STEPS)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip)
        optimizer.step()
        seen["loss"].append(loss.item())
        seen["norm"].append(norm.item())
    return seen


def llama_like(recipe) -> LlamaForCausalLM:
    """Transformers' Llama with the initial weights of the recipe."""
    ours = Decoder(DecoderConfig(**vars(recipe.model), max_position_embeddings=SEQ_LEN))
    fill(ours, recipe.seed)
    shape = {
        field.name: getattr(recipe.model, field.name)
        for field in dataclasses.fields(recipe.model)
        if field.name not in ("qkv_bias", "qk_norm", "head_dim")
    }
    theirs = LlamaForCausalLM(
        LlamaConfig(**shape, max_position_embeddings=SEQ_LEN, attn_implementation="sdpa")
    )
    theirs.load_state_dict(ours.state_dict())
    return theirs


def relative(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def test_losses_equal_a_plain_loop_in_every_layout(cases, reference):
    assert len(cases) == 18 + len(VARIANTS)
    for name, case in cases.items():
        assert relative(case["loss"], reference["loss"]) < 1e-6, name
        assert relative(case["norm"], reference["norm"]) < 1e-5, name


def test_the_reference_moves_and_its_clip_is_active(reference):
    assert len(set(reference["loss"])) == STEPS
    assert min(reference["norm"]) > 0.2


def test_batches_and_initial_weights_do_not_depend_on_the_layout(cases):
    assert len({tuple(case["hash"]) for case in cases.values()}) == 1
    assert len(set(next(iter(cases.values()))["hash"])) == STEPS
    assert len({case["initial"] for case in cases.values()}) == 1


def test_a_clipped_sgd_update_has_the_norm_of_the_clip(cases):
    for name, case in cases.items():
        assert case["update_norm"] == pytest.approx(0.1, rel=1e-4), name


def test_each_stage_builds_the_optimizer_we_expect(cases):
    for name, case in cases.items():
        stage_3 = "zero3" in name
        expected = "DeepSpeedZeroOptimizer_Stage3" if stage_3 else "DeepSpeedZeroOptimizer"
        assert case["optimizer"] == expected, name
