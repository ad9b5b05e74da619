"""Run by test_memory_use on some ranks: bytes that are alive while the optimizer steps.

Writes [{case, measured, kinds}] in bytes per parameter, counted inside the second call of the torch
optimizer that DeepSpeed steps, where its own copies of the gradients exist.
"""

from __future__ import annotations

import gc
import json
import sys

import state_worker
import torch
import torch.distributed as dist
from torch import nn

from recipes.compose import compose
from runtime.process import process

WIDTH, LAYERS = state_worker.WIDTH, state_worker.LAYERS


def measure(deepspeed, zero, precision: str, accumulation: int, extra: list[str]) -> dict:
    """Build, take two steps, and count what is held when the second one has its gradients."""
    config = state_worker.configured(zero, precision, accumulation, extra)
    gc.collect()
    gc.freeze()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config.json)
    looks: list[int] = []

    def look(stepped, *_) -> None:
        held = state_worker.live(model.parameters())
        for group in stepped.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    storage = parameter.grad.untyped_storage()
                    held[storage.data_ptr()] = storage.nbytes()
        looks.append(sum(held.values()))

    optimizer.register_step_pre_hook(look)
    for _ in range(2):
        looks.clear()
        for index in range(accumulation):
            engine.set_gradient_accumulation_boundary(index == accumulation - 1)
            engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)).float().pow(2).mean())
            engine.step()
    numbers = LAYERS * WIDTH * WIDTH
    result = {
        "case": [zero, precision, accumulation],
        "measured": max(looks) / numbers,
        "grad_dtype": config.grad_dtype,
        "is_immediate": config.is_immediate,
        "ranks": dist.get_world_size(),
        "class": type(engine.optimizer).__name__,
    }
    engine.destroy()
    return result


def main(out: str, cases: str) -> None:
    place = process.start(compose("tiny", ["cluster.device=cpu"]).recipe.cluster)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    results = [measure(deepspeed, *case) for case in json.loads(cases)]
    if place.is_first:
        with open(out, "w") as file:
            json.dump(results, file)
    process.finish()
    process.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
