"""Trains a recipe in one process: full decoder, torch's AdamW and clip_grad_norm_, no DeepSpeed.

The reference for all layouts. The decoder itself is compared with Transformers elsewhere. Only for
small models: on a CPU torch computes the norm of a weight in fp32 (measured with torch 2.13:
160,000 gradients, error 6e-5), DeepSpeed in fp64.
"""

from __future__ import annotations

from pathlib import Path

import torch

from data.stream.schedule import schedule_of
from data.stream.stream import open_stream
from model.decoder import Decoder
from model.init import fill
from recipes.schema import Recipe
from runtime.engine.batches import to_device
from runtime.engine.engine import decoder_config
from runtime.engine.learning_rate import learning_rate, warmup_steps
from runtime.engine.optimizer import build_optimizer

CPU = torch.device("cpu")
ROWS = 4  # sequences per pass


def plain_loop(recipe: Recipe, steps: int, eval_tokens: int = 0) -> dict:
    """Losses and norms of `steps` updates, and the held-out loss after the last one."""
    schedule = schedule_of(recipe)
    stream = open_stream(
        recipe.data, recipe.seed, recipe.seq_len, schedule, Path("/"), recipe.model.vocab_size
    )
    model = Decoder(decoder_config(recipe))
    fill(model, recipe.seed)
    optimizer = build_optimizer(model.named_parameters(), recipe.optim)
    warmup = warmup_steps(recipe.warmup, recipe.steps)
    seen: dict[str, list] = {"loss": [], "norm": []}
    for step in range(1, steps + 1):
        data = stream.step(step, 0, 1, ROWS)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe.optim, warmup, recipe.steps)
        optimizer.zero_grad()
        total = 0.0
        for batch in data.micro_batches:
            loss = model(**to_device(batch, CPU), num_items_in_batch=data.num_targets).loss
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip or float("inf"))
        optimizer.step()
        seen["loss"].append(total)
        seen["norm"].append(norm.item())
    if eval_tokens:
        batches = stream.evaluation(0, 1, ROWS, eval_tokens).batches
        with torch.no_grad():
            losses = [model(**to_device(b, CPU), num_items_in_batch=1).loss for b in batches]
        seen["eval"] = float(sum(losses)) / sum(int((b.labels >= 0).sum()) for b in batches)
    return seen


def relative(ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of two sequences."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
