"""Builds engines on some ranks and counts the bytes of their tensors; run by test_state_bytes.py.

Writes [{case, class, measured, computed, bucket}] in bytes per parameter. Every storage that holds
a tensor after a backward pass, and did not exist before the model, is counted once.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from recipes.compose import compose
from runtime.ds_config.merge import EngineConfig, engine_config
from runtime.ds_config.state_bytes import state_bytes
from runtime.process import process

WIDTH, LAYERS = 64, 8
BUCKET = 1000  # elements: small beside the model, so that buckets do not hide an error


def live(parameters) -> dict[int, int]:
    """Map the address of each storage since the freeze to its bytes; gc does not see parameters."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter)]
    for parameter in parameters:
        for name in ("grad", "grad_accum", "ds_tensor"):
            tensors.append(getattr(parameter, name, None))
    found = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def resolved(model: nn.Module) -> int:
    """Bytes held; the least of three looks, as gloo's threads let go of a tensor a moment later."""
    looks = []
    for _ in range(3):
        looks.append(sum(live(model.parameters()).values()))
        time.sleep(0.02)
    return min(looks)


def configured(zero, precision: str, accumulation: int, extra: list[str]) -> EngineConfig:
    small = ["reduce_bucket_size", "allgather_bucket_size"]
    if zero == 1 and precision == "bf16" and accumulation > 1:  # BF16_Optimizer has one bucket
        small = ["allgather_bucket_size"]
    if "3" in str(zero):
        small = ["reduce_bucket_size", "stage3_prefetch_bucket_size"]
        extra = [*extra, "ds.zero_optimization.stage3_param_persistence_threshold=0"]
    sizes = [f"ds.zero_optimization.{name}={BUCKET}" for name in small]
    recipe = compose("tiny", [f"zero={zero}", f"precision={precision}", *sizes, *extra]).recipe
    # `micro_batch` does not matter: the pass below feeds what it likes.
    return engine_config(
        dataclasses.replace(recipe, micro_batch=1),
        data_size=dist.get_world_size(),
        accumulation=accumulation,
        accumulates=accumulation > 1,
    )


def measure(deepspeed, zero, precision: str, accumulation: int, extra: list[str]) -> dict:
    """Build an engine, train two steps and count the bytes held after the passes of the second."""
    config = configured(zero, precision, accumulation, extra)
    gc.collect()
    gc.freeze()  # what exists is neither looked through again nor counted
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS)]
    numbers = LAYERS * WIDTH * WIDTH
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config.json)
    most = 0
    for step in range(2):
        for index in range(accumulation):
            engine.set_gradient_accumulation_boundary(index == accumulation - 1)
            engine.backward(engine(torch.ones(1, WIDTH, dtype=dtype)).float().pow(2).mean())
            if step == 1:
                most = max(most, resolved(model))
            engine.step()
    parts = state_bytes(
        config.stage,
        precision,
        config.grad_dtype,
        accumulation > 1,
        config.is_immediate,
        dist.get_world_size(),
        config.is_offloaded,
    )
    result = {
        "case": [zero, precision, accumulation],
        "class": type(engine.optimizer).__name__,
        "expected_class": config.optimizer_class,
        "measured": most / numbers,
        "computed": sum(parts.values()),
        "bucket": 4 * BUCKET / numbers,
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
