"""Trains a tiny model under several ZeRO stages and precisions, saves in the middle, resumes from
its own saves and those of earlier launches, and writes the results.

    torchrun ... fragments_worker.py out.json folder setup,setup,...

The folder is shared by launches.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from checkpoint import fragments as owned
from checkpoint.comm import RankComm
from checkpoint.load.restoring import load
from checkpoint.save.commit import save
from runtime.process import process

SEQUENCES, MICRO, LENGTH, VOCAB = 12, 2, 10, 61
SAVED, LAST = 1, 3
# name: (stage, bf16, fp32 accumulation, optimizer)
FP32 = {f"fp32-{stage}": (stage, False, False, "adamw") for stage in (1, 2, 3)}
BF16 = {
    f"bf16-{stage}{'-accum32' if accumulation else ''}": (stage, True, accumulation, "adamw")
    for stage in (1, 2, 3)
    for accumulation in (False, True)
}
SGD = {"sgd-1": (1, False, False, "sgd"), "sgd-3": (3, True, False, "sgd")}
SETUPS = FP32 | BF16 | SGD


def build(setup: tuple, seed: int):
    """Build a DeepSpeed engine with weights of `seed`."""
    stage, bf16, accumulation, optimizer = setup
    torch.manual_seed(seed)
    shape = dict(hidden_size=20, intermediate_size=28, num_hidden_layers=1, vocab_size=VOCAB)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager")
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=LENGTH))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    make = {
        "adamw": lambda: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True),
        "sgd": lambda: torch.optim.SGD(groups, lr=1e-2),
    }[optimizer]
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": SEQUENCES // MICRO // dist.get_world_size(),
        "gradient_clipping": 1.0,
        # Some parameters stay gathered under ZeRO-3, some do not; several sub-groups.
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 100,
            "sub_group_size": 2000,
        },
        "zero_allow_untested_optimizer": True,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
    if accumulation:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return deepspeed.initialize(model=model, optimizer=make(), config=config)[0]


def train(ds, first: int, last: int) -> list[tuple[float, float]]:
    """Train updates first to last; returns (loss of the global batch, gradient norm) of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    share, seen = SEQUENCES // world, []
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
        mine = batch[rank * share : (rank + 1) * share].split(MICRO)
        loss = torch.zeros(())
        for i, ids in enumerate(mine):
            ds.set_gradient_accumulation_boundary(i == len(mine) - 1)
            part = ds(input_ids=ids, labels=ids).loss * MICRO / SEQUENCES
            ds.backward(part * world, scale_wrt_gas=False)
            loss += part.detach()
            ds.step()
        dist.all_reduce(loss)
        seen.append((float(loss), float(ds.get_global_grad_norm())))
    return seen


def bits(ds, comm: RankComm) -> str:
    """Hash of the state of all ranks, and of the weights that the forward pass uses."""
    text = hashlib.sha256()
    for fragment in owned.fragments(ds):
        text.update(f"{fragment.name} {fragment.kind} {fragment.start}".encode())
        text.update(fragment.tensor.numpy().tobytes())
    for name, parameter in ds.module.named_parameters():
        text.update(name.encode() + parameter.detach().float().numpy().tobytes())
    return " ".join(comm.exchange(text.hexdigest(), "test"))


def resume(setup: tuple, run: Path, comm: RankComm):
    """Load the save of `run` into a new engine with other weights; returns the next updates."""
    ds = build(setup, seed=99)
    owned.create_states(ds)
    loaded = load(run, owned.fragments(ds), comm)
    owned.after_load(ds, loaded.state["optimizer_step"])
    seen = train(ds, loaded.step + 1, LAST)
    assert owned.optimizer_step(ds) in (LAST, None)
    return seen, bits(ds, comm)


def worst(expected, got) -> float:
    """Largest relative difference of losses and norms."""
    pairs = [pair for e, g in zip(expected, got, strict=True) for pair in zip(e, g, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def main(out: Path, root: Path, setups: list[str]) -> None:
    """Run all setups in one launch."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    comm, world = RankComm(), dist.get_world_size()
    classes, same, cross, states, curves = {}, {}, {}, {}, {}
    parameters, counts = {}, {}
    for name in setups:
        setup = SETUPS[name]
        ds = build(setup, seed=1)
        classes[name] = type(ds.optimizer).__name__
        train(ds, 1, SAVED)
        run = root / f"{name}-{world}"
        pieces = owned.fragments(ds)
        parameters[name] = sum(getattr(p, "ds_numel", p.numel()) for p in ds.module.parameters())
        counts[name] = sum(comm.exchange(sum(f.count for f in pieces), "test"))
        state = {"optimizer_step": owned.optimizer_step(ds) or 0}
        report = save(run, SAVED, pieces, state, comm)
        assert report.ok, report.problem
        straight = train(ds, SAVED + 1, LAST), bits(ds, comm)
        curves[name] = straight[0]
        resumed = resume(setup, run, comm)
        same[name] = [straight[0] == resumed[0], straight[1] == resumed[1]]
    for number, name in enumerate(FP32):
        for there in range(1, world + 1):
            # Another stage from each number of ranks, so that all pairs of stages come up; within
            # two ranks all pairs at once.
            others = range(3) if there == world == 2 else [(number + there) % 3]
            for other in others:
                run = root / f"fp32-{other + 1}-{there}"
                seen, _ = resume(FP32[name], run, comm)
                cross[f"{run.name} -> {name}-{world}"] = worst(curves["fp32-1"], seen)
    if world == 2:
        for name, setup in FP32.items():
            plain, early = build(setup, seed=1), build(setup, seed=1)
            owned.create_states(early)
            unmoved = owned.optimizer_step(early) == 0
            train(plain, 1, 1), train(early, 1, 1)
            states[name] = unmoved and bits(plain, comm) == bits(early, comm)
    if comm.rank == 0:
        seen = dict(classes=classes, same=same, cross=cross, states=states)
        seen |= dict(parameters=parameters, counts=counts)
        out.write_text(json.dumps(seen | {"curves": curves}))
    dist.barrier()
    process.finish()
    process.leave(0)


main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
