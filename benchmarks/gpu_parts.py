"""The checks of benchmarks.gpu, one function each; they run in worker processes of that command.

    check(bench) -> rows, yielded as they are found, so a check that is stopped keeps what it has

The one rule: a check runs whole on a CPU too, in tiny shapes, where what only a GPU has is reported
as None; so everything but the numbers is tested without one. Units: seconds, GiB, tokens/s.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from benchmarks import syncs
from benchmarks.workload import Workload, count_targets, micro_batches, recipe_of, settled_of
from model.attention import attention, prepare
from model.config import DecoderConfig
from model.cost import activation_bytes, flops_per_token, num_parameters
from model.decoder import Decoder, compile_blocks
from model.init import fill
from recipes.schema import Cluster, Optim, Recipe
from runtime import process
from runtime.batches import to_device
from runtime.clock import StepClock, StepTimes, cuda_clock
from runtime.engine import Engine, build
from runtime.memory import GIB
from runtime.optimizer import build_optimizer
from runtime.run_folder import device_name
from runtime.settle import Settled
from runtime.speed import mfu, peak_flops
from runtime.state_bytes import state_bytes

TINY = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
# A third of a billion: state of 6 GB dwarfs buckets of 100 MB, and three builds fit the budget.
SHAPE_350M = dict(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    tie_word_embeddings=True,
)
# Llama 3.2 1B, the shape of recipe 1b.
SHAPE_1B = dict(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    rope_theta=500000.0,
    tie_word_embeddings=True,
)
WARM_UP = 3  # first steps allocate and choose kernels


@dataclass(frozen=True)
class Row:
    """One line of the table. `is_ok` is None where there is no bound, `rule` says the bound."""

    name: str
    value: float | str | None
    unit: str = ""
    rule: str = ""
    is_ok: bool | None = None


@dataclass(frozen=True)
class Bench:
    """Where the checks run."""

    device_type: str  # cuda, or cpu = dry run in tiny shapes

    @cached_property
    def me(self) -> process.Process:
        """The process group, joined once."""
        return process.start(Cluster(device=self.device_type))

    @property
    def is_cuda(self) -> bool:
        return self.device_type == "cuda"

    def clock(self) -> StepClock:
        return cuda_clock() if self.is_cuda else StepClock()

    def wait(self) -> None:
        """Until the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def sized(self, cuda: dict[str, Any], dry: dict[str, Any]) -> dict[str, Any]:
        """The values for this device."""
        return cuda if self.is_cuda else dry

    def engine(self, work: Workload, **knobs: Any) -> tuple[Engine, Settled, Recipe]:
        """This project's engine for a workload."""
        recipe = recipe_of(work, cluster=Cluster(device=self.device_type), **knobs)
        settled = settled_of(recipe, 1)
        return build(recipe, settled.layout, settled.config, self.me), settled, recipe


Check = Callable[[Bench], Iterator[Row]]


def take_steps(
    bench: Bench, engine: Engine, work: Workload, steps: int
) -> tuple[list[float], list[float], list[StepTimes]]:
    """Train as pretrain.py does; losses, norms and times, all read after the last step."""
    batches = micro_batches(work, 0, "within")
    targets = count_targets(work, "within")
    clock, results, spans = bench.clock(), [], []
    clock.start()
    for _ in range(steps):
        with clock.phase("data"):
            moved = [to_device(batch, engine.process.device) for batch in batches]
        results.append(engine.train_step(moved, targets, work.tokens, clock.phase))
        spans.append(clock.finish())
    losses = [float(result.loss) for result in results]
    norms = [float(result.grad_norm) for result in results]
    return losses, norms, [span.times() for span in spans]


def parity(bench: Bench) -> Iterator[Row]:
    """Losses of the engine on the device against a plain loop in fp32 on the CPU."""
    steps = 20
    work = Workload(shape=TINY, seq_len=64, micro_batch=4, accumulation=2, document_tokens=20)
    optim = Optim(lr=1e-2, schedule="constant")  # high enough that 20 steps move the loss
    expected = plain_loop(work, recipe_of(work, optim=optim), steps)
    yield Row("loss falls in the plain loop", expected[0] - expected[-1], "nats", "> 0.5", True)
    for precision, bound in (("fp32", 1e-4), ("bf16", 2e-2)):
        work = Workload(**(asdict(work) | {"precision": precision}))
        engine, *_ = bench.engine(work, optim=optim)
        losses, _, _ = take_steps(bench, engine, work, steps)
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
        losses.append(float(sum(parts)))
    return losses


def attention_kernels(bench: Bench) -> Iterator[Row]:
    """The kernel that reads document bounds against masked SDPA: same numbers, and the speed."""
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
        attend = prepare(like, size["dim"], 1e4, batch["segment_ids"], *bounds)
        inputs = [x.to(dtype).requires_grad_() for x in wide]
        seen[name] = attend, attend_once(inputs, attend)
        repeats = 1 if name == "reference" else size["repeats"]
        seconds = timed(bench, lambda i=inputs, a=attend: attend_once(i, a), repeats)
        if name != "reference":
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
    """Output and the gradients of q, k, v for a fixed gradient of the output."""
    out = attention(*inputs, attend)
    return (out.detach(), *torch.autograd.grad(out, inputs, torch.ones_like(out) + out.detach()))


def timed(bench: Bench, action: Callable[[], Any], repeats: int) -> float:
    """Mean seconds of one call, after three that do not count."""
    for _ in range(WARM_UP):
        action()
    bench.wait()
    began = time.perf_counter()
    for _ in range(repeats):
        action()
    bench.wait()
    return (time.perf_counter() - began) / repeats


def step_clock(bench: Bench) -> Iterator[Row]:
    """The split of the step adds up to the wall clock, and a late batch is seen as data time."""
    size = bench.sized(dict(shape=SHAPE_350M, seq_len=1024), dict(shape=TINY, seq_len=32))
    work = Workload(precision="bf16", micro_batch=4, accumulation=1, **size)
    engine, *_ = bench.engine(work)
    take_steps(bench, engine, work, WARM_UP)
    bench.wait()
    began = time.perf_counter()
    _, _, times = take_steps(bench, engine, work, 10)
    bench.wait()
    wall = time.perf_counter() - began
    ratio = sum(t.step_s for t in times) / wall
    yield Row("clock: sum of 10 steps / wall", ratio, "", "0.9 .. 1.02", 0.9 <= ratio <= 1.02)
    gap = max(abs(t.step_s - t.data_s - t.compute_s - t.optimizer_s - t.other_s) for t in times)
    yield Row("clock: step - sum of its phases", gap, "s", "<= 1e-6", gap <= 1e-6)
    bench.wait()
    clock = bench.clock()
    clock.start()
    with clock.phase("data"):
        time.sleep(0.05)
    late = clock.finish().times().data_s
    yield Row(
        "clock: data time of a batch 0.05 s late", late, "s", "0.045 .. 0.1", 0.045 < late < 0.1
    )


def host_syncs(bench: Bench) -> Iterator[Row]:
    """How often a step makes the host wait for the device, and whose code does."""
    steps = 4
    shape = bench.sized(dict(shape=TINY | {"num_hidden_layers": 8}), dict(shape=TINY))
    for stage in (1, 2, 3):
        for accumulation in (1, 2):
            work = Workload(
                precision="bf16", seq_len=64, micro_batch=2, accumulation=accumulation, **shape
            )
            engine, *_ = bench.engine(work, zero=stage)
            take_steps(bench, engine, work, WARM_UP)
            batches, targets = micro_batches(work, 0, "within"), count_targets(work, "within")
            clock = bench.clock()
            clock.start()
            with syncs.counted() as seen:
                for _ in range(steps):
                    moved = [to_device(batch, bench.me.device) for batch in batches]
                    engine.set_lr(1e-3)
                    engine.train_step(moved, targets, work.tokens, clock.phase)
                    clock.finish()
            name = f"zero={stage}, accumulation {accumulation}: host syncs per step"
            ours = seen.per_step(steps, "ours")
            yield Row(f"{name}, ours", ours, "", "0", ours == 0)
            yield Row(f"{name}, DeepSpeed's", seen.per_step(steps, "deepspeed"))
            if seen.places:
                yield Row(f"{name}, where", seen.describe(steps))


def zero_stages(bench: Bench) -> Iterator[Row]:
    """ZeRO 1, 2, 3 in bf16 on one device: same losses, and memory against the formulas."""
    size = bench.sized(
        dict(shape=SHAPE_350M, seq_len=1024, micro_batch=8), dict(shape=TINY, seq_len=32)
    )
    work = Workload(precision="bf16", accumulation=2, **size)
    first: list[float] | None = None
    for stage in (1, 2, 3):
        before = allocated(bench)
        engine, settled, recipe = bench.engine(work, zero=stage)
        losses, norms, times = take_steps(bench, engine, work, WARM_UP + 5)
        first = first or losses
        apart = max(abs(a - b) / b for a, b in zip(losses, first, strict=True))
        name = f"zero={stage}, bf16"
        rule = "<= 0.005, norms finite"
        is_ok = apart <= 5e-3 and all(norm < float("inf") for norm in norms)
        yield Row(f"{name}: loss against zero=1", apart, "relative", rule, is_ok)
        speed = work.tokens * 5 / sum(t.step_s for t in times[WARM_UP:])
        yield Row(f"{name}: speed", speed, "tokens/s")
        yield from memory_rows(bench, name, before, settled, recipe, work)
        del engine


def memory_rows(
    bench: Bench, name: str, before: float | None, settled: Settled, recipe: Recipe, work: Workload
) -> Iterator[Row]:
    """Allocated memory over what the formulas say, after a step and at its peak."""
    config = settled.engine
    per_parameter = state_bytes(
        config.stage,
        recipe.precision,
        config.grad_dtype,
        settled.layout.accumulates,
        config.is_immediate,
        settled.layout.data,
        config.is_offloaded,
    )
    state = sum(per_parameter.values()) * settled.num_parameters
    kept = activation_bytes(work.shape_object, work.micro_batch, work.seq_len, recipe.precision)
    yield Row(f"{name}: state by formula", state / GIB, "GiB")
    yield Row(f"{name}: activations by formula", kept.total / GIB, "GiB")
    if before is None:
        yield Row(f"{name}: allocated / formula", None)
        return
    held = (torch.cuda.memory_allocated() - before) / state
    peak = (torch.cuda.max_memory_allocated() - before) / (state + kept.total)
    yield Row(f"{name}: held after a step / state", held, "", "0.6 .. 1.2", 0.6 <= held <= 1.2)
    yield Row(f"{name}: peak / (state + activations)", peak, "", "0.8 .. 1.3", 0.8 <= peak <= 1.3)


def allocated(bench: Bench) -> float | None:
    """Bytes allocated now, the peak reset to them; None on a CPU."""
    if not bench.is_cuda:
        return None
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def utilisation(bench: Bench) -> Iterator[Row]:
    """MFU of about a billion parameters in bf16: recompute none and full, eager and compiled."""
    size = bench.sized(
        dict(shape=SHAPE_1B, seq_len=4096, micro_batch=4), dict(shape=TINY, seq_len=32)
    )
    work = Workload(precision="bf16", accumulation=1, document_tokens=1024, **size)
    peak = peak_flops(device_name(bench.me.device))
    began = time.perf_counter()
    engine, *_ = bench.engine(work)
    bench.wait()
    parameters = num_parameters(work.shape_object)
    yield Row(f"build of {parameters:,} parameters", time.perf_counter() - began, "s")
    flops = flops_per_token(work.shape_object, work.seq_len)
    for is_compiled in (False, True):
        if is_compiled:
            compile_blocks(engine.model, "inductor" if bench.is_cuda else "eager")
        for recompute in ("none", "full"):
            engine.model.recompute = recompute
            allocated(bench)
            began = time.perf_counter()
            take_steps(bench, engine, work, WARM_UP)
            warm = time.perf_counter() - began
            _, _, times = take_steps(bench, engine, work, 6)
            speed = work.tokens * 5 / sum(t.step_s for t in times[1:])
            name = f"recompute={recompute}, {'compiled' if is_compiled else 'eager'}"
            yield Row(f"{name}: speed", speed, "tokens/s")
            used = mfu(speed, flops, peak, 1)
            yield Row(f"{name}: MFU", used, "", "> 0.3", None if used is None else used > 0.3)
            yield Row(f"{name}: first {WARM_UP} steps", warm, "s")
            if bench.is_cuda:
                yield Row(f"{name}: peak", torch.cuda.max_memory_allocated() / GIB, "GiB")


CHECKS: dict[str, Check] = {
    "parity": parity,
    "attention": attention_kernels,
    "clock": step_clock,
    "syncs": host_syncs,
    "zero": zero_stages,
    "mfu": utilisation,
}


def main(device_type: str) -> int:
    """Run the checks named on stdin, one a line; answer one JSON line per row, then a last one."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench(device_type)

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    for line in sys.stdin:
        try:
            for row in CHECKS[line.strip()](bench):
                send({"row": asdict(row)})
            send({"done": True})
        except Exception as error:
            traceback.print_exc()
            send({"done": True, "error": f"{type(error).__name__}: {error}"})
    process.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
