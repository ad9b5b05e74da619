"""A recipe and a layout as a job of the planner, and a cluster file as a machine.

    Recipe, Layout, EngineConfig  ->  Job          Recipe.cluster  ->  Machine + what was assumed

Rule: what the engine will do is read from the DeepSpeed JSON that it will get, never guessed here.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

from base.errors import UserError
from base.units import GIB
from model.cost import head_dim
from parallel.layout import Layout
from plan.machine import HOST_GIB_PER_GPU, Machine, known_gpus, machine_of
from plan.memory_use import PROCESS_BYTES
from plan.outlook import RESTART_S, WRITE_GB_S_PER_HOST
from plan.workload import ENGINES, Job, Shape
from recipes.schema import Model, Recipe
from runtime.ds_config.merge import EngineConfig

# Where a cluster file names no GPU: the device type and its peak tell which one is meant.
BY_PEAK = {312.0: "A100-80GB", 989.0: "H100-SXM", 2250.0: "B200"}
# Cluster knob -> field of Machine that it replaces.
KNOBS = {
    "peak_tflops": "peak_tflops",
    "matmul_tflops": "matmul_tflops",
    "memory_gib": "memory_gib",
    "memory_gb_s": "memory_gb_s",
    "link_gb_s": "link_gb_s",
    "domain": "domain",
    "gpus_per_node": "gpus_per_node",
    "nic_gb_s": "nic_gb_s",
    "price_per_hour": "price_per_hour",
    "host_memory_gib": "host_memory_gib",
}


def shape_of(model: Model) -> Shape:
    """The decoder of a recipe."""
    names = {field.name for field in dataclasses.fields(Shape)} - {"is_gated", "positions"}
    values = {name: getattr(model, name) for name in names}
    return Shape(**values | {"head_dim": head_dim(model)})


def job_of(recipe: Recipe, layout: Layout, engine: EngineConfig) -> Job:
    """One step of `recipe` under a layout: the last batch of a ramp, the longest sequences."""
    name = "ours-compiled" if recipe.compile else "ours"
    profile = ENGINES[name]
    return Job(
        shape=shape_of(recipe.model),
        seq_len=recipe.seq_len,
        micro_batch=layout.micro_batch,
        micro_batches=layout.accumulation[-1][1],
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        data=layout.data,
        stage=layout.stage,
        recompute=recipe.recompute,
        precision=recipe.precision,
        sequence=recipe.parallel.tensor > 1 and recipe.parallel.sequence,
        blocks=tuple(end - first for first, end in pairwise(layout.bounds)),
        engine=profile,
        optimizer=recipe.optim.name,
        grad_dtype=engine.grad_dtype,
        is_immediate=engine.is_immediate,
        is_offloaded=engine.is_offloaded,
        is_on_cpu=recipe.cluster.device == "cpu",
        prefetch=recipe.data.prefetch,
        saves_in_background=recipe.checkpoint.mode == "async"
        or (recipe.checkpoint.mode == "auto" and recipe.cluster.device != "cpu"),
    )


def machine_for(recipe: Recipe) -> tuple[Machine, list[str]]:
    """The machine that a recipe's cluster describes, and a line for each input that was assumed.

    Raises UserError where neither a GPU of the list nor the fields that replace it are given.
    """
    cluster = recipe.cluster
    name = cluster.gpu or BY_PEAK.get(cluster.peak_tflops or 0.0)
    if name is None:
        raise UserError(
            "cluster.gpu is not set, so the planner knows neither rates nor memory: choose"
            " cluster=a100, h100, h200 or b200, or set cluster.gpu to one of"
            f" {', '.join(known_gpus())}"
        )
    given = {
        field: getattr(cluster, knob)
        for knob, field in KNOBS.items()
        if getattr(cluster, knob) is not None
    }
    if "gpus_per_node" in given and "domain" not in given:
        # The fast links join the GPUs of a host, unless the data sheet has a larger domain.
        sheet = machine_of(name)
        given["domain"] = max(sheet.domain, given["gpus_per_node"])
        if sheet.domain <= sheet.gpus_per_node:
            given["domain"] = given["gpus_per_node"]
    machine = machine_of(name, **given)
    if cluster.mtbf_hours is not None:
        machine = dataclasses.replace(machine, mtbf_hours=cluster.mtbf_hours)
    if "matmul_tflops" in given:
        machine = dataclasses.replace(machine, calibrated="")
    return machine, assumptions(machine, given)


def assumptions(machine: Machine, given: dict) -> list[str]:
    """Inputs that the cluster file does not give, and what stands for them."""
    sheet = "data sheet in plan/published/gpus.csv"
    lines = [
        f"{name} = {getattr(machine, field):g} {unit} ({sheet} of {machine.gpu})"
        for name, field, unit in (
            ("memory_gib", "memory_gib", "GiB"),
            ("memory_gb_s", "memory_gb_s", "GB/s"),
            ("link_gb_s", "link_gb_s", "GB/s per GPU, one direction"),
            ("nic_gb_s", "nic_gb_s", "GB/s per GPU, one direction"),
        )
        if field not in given
    ]
    if machine.host_memory_gib is None:
        lines.append(
            f"host_memory_gib = {HOST_GIB_PER_GPU * machine.gpus_per_node:g} GiB per host"
            f" ({HOST_GIB_PER_GPU:g} GiB for each GPU)"
        )
    if machine.mtbf_hours is None:
        lines.append(
            "mean time between failures = 46,000 h / GPUs (Llama 3: one in 2.8 h on 16,384 GPUs)"
        )
    lines += [
        f"a process of a rank takes {PROCESS_BYTES / GIB:g} GiB of a host besides what is counted",
        f"a host writes a save at {WRITE_GB_S_PER_HOST:g} GB/s; a restart takes {RESTART_S:g} s and"
        " a load",
    ]
    return lines
