"""Checks of benchmarks.gpu that compare numbers: loss parity with the CPU, attention kernels.

Rule: the reference is plain and in fp32: a torch loop without DeepSpeed, SDPA with a mask.
Units: relative differences, milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_bench import TINY, Bench, Row, take_steps, timed
from benchmarks.workload import Workload, count_targets, micro_batches, recipe_of
from model.attention import attention, prepare
from model.config import DecoderConfig, Rotary
from model.decoder import Decoder
from model.init import fill
from recipes.schema import Optim, Recipe
from runtime.engine.batches import to_device
from runtime.engine.optimizer import build_optimizer


def parity(bench: Bench) -> Iterator[Row]:
    """Compare the engine's losses on the device with a plain fp32 loop on the CPU."""
    steps = 20
    work = Workload(shape=TINY, seq_len=64, micro_batch=4, accumulation=2, document_tokens=20)
    optim = Optim(lr=2e-3, schedule="constant")  # high enough that 20 steps move the loss
    expected = plain_loop(work, recipe_of(work, optim=optim), steps)
    fall = expected[0] - expected[-1]
    yield Row("loss falls in the plain loop", fall, "nats", "> 0.5", fall > 0.5)
    for precision, bound in (("fp32", 1e-4), ("bf16", 2e-2)):
        work = replace(work, precision=precision)
        engine, *_ = bench.engine(work, optim=optim)
        losses = take_steps(bench, engine, work, steps).losses
        apart = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
        name = f"loss, {precision} here against fp32 loop on CPU, {steps} steps"
        yield Row(name, apart, "relative", f"<= {bound:g}", apart <= bound)


def plain_loop(work: Workload, recipe: Recipe, steps: int) -> list[float]:
    """Losses of the decoder under torch.optim.AdamW and clip_grad_norm_, without DeepSpeed."""
    model = Decoder(DecoderConfig(**work.shape, max_position_embeddings=work.seq_len))
    fill(model, recipe.seed)
    optimizer = build_optimizer(model.named_parameters(), recipe.optim)
    batches = [to_device(b, torch.device("cpu")) for b in micro_batches(work, 0, "within")]
    targets, losses = count_targets(work, "within"), []
    for _ in range(steps):
        optimizer.zero_grad()
        parts = [model(**batch, num_items_in_batch=targets).loss for batch in batches]
        sum(parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.optim.clip)
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def attention_kernels(bench: Bench) -> Iterator[Row]:
    """Compare the variable-length kernel with masked SDPA: numbers and speed."""
    size = bench.sized(
        dict(batch=4, length=4096, heads=32, kv=8, dim=64, documents=512, repeats=20),
        dict(batch=2, length=64, heads=4, kv=2, dim=16, documents=20, repeats=2),
    )
    work = Workload(
        shape=TINY,
        seq_len=size["length"],
        micro_batch=size["batch"],
        accumulation=1,
        document_tokens=size["documents"],
    )
    (numpy_batch,) = micro_batches(work, 0, "within")
    batch = to_device(numpy_batch, bench.me.device)
    generator = torch.Generator().manual_seed(0)
    widths = (size["heads"], size["kv"], size["kv"])
    shapes = [(size["batch"], size["length"], heads, size["dim"]) for heads in widths]
    wide = [torch.randn(s, generator=generator).to(bench.me.device) for s in shapes]
    seen = {}
    for name, dtype, with_bounds in (
        ("reference", torch.float32, False),
        ("masked SDPA", torch.bfloat16, False),
        ("document bounds", torch.bfloat16, True),
    ):
        like = torch.empty(size["batch"], size["length"], 1, dtype=dtype, device=bench.me.device)
        bounds = (batch["cu_seqlens"], batch["max_seqlen"]) if with_bounds else (None, None)
        attend = prepare(like, size["dim"], Rotary(1e4), batch["segment_ids"], *bounds)
        inputs = [x.to(dtype).requires_grad_() for x in wide]
        seen[name] = attend, attend_once(inputs, attend)
        if name != "reference":
            repeats = size["repeats"]
            seconds = timed(bench, lambda i=inputs, a=attend: attend_once(i, a), repeats)
            yield Row(f"attention forward + backward, {name}", seconds * 1e3, "ms")
    is_varlen = seen["document bounds"][0].cu_seqlens is not None
    yield Row(
        "kernel taken with document bounds",
        "variable length" if is_varlen else "masked SDPA",
        rule="variable length on CUDA",
        is_ok=is_varlen == bench.is_cuda,
    )
    for name in ("masked SDPA", "document bounds"):
        for what, got, want in zip(
            ("output", "grad q", "grad k", "grad v"),
            seen[name][1],
            seen["reference"][1],
            strict=True,
        ):
            apart = float((got.float() - want).norm() / want.norm())
            yield Row(
                f"{name}, bf16: {what} against fp32", apart, "relative", "<= 0.01", apart <= 0.01
            )


def attend_once(inputs: list[torch.Tensor], attend: Any) -> tuple[torch.Tensor, ...]:
    """Output, and gradients of q, k and v for a fixed gradient of the output."""
    out = attention(*inputs, attend)
    return (out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) + out.detach()))
