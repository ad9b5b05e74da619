"""Published runs as jobs: rows of throughput.csv, or of any file with the same columns.

    row  ->  (Job, Machine, measured tokens/s per GPU)  or  the reason why the row cannot be used

Rule: nothing here looks at a row's source except EXCLUDED, which names what is left out and why; a
blank field means unknown, is filled with what a user of that engine would most likely have chosen,
and is listed in `unknown`, which widens the printed range.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from base.errors import UserError
from plan.machine import Machine, machine_of
from plan.memory_use import fits_recompute
from plan.workload import ENGINES, Job, Profile, Shape

# What is left out by name: a part of the source or of the model -> the reason, which is printed.
EXCLUDED = (
    (r"Jean Zay V100", "", "the log's own repetitions differ by 40 %"),
    (r"GPT-NeoX", "", "it does not say which FLOPs and which batch it counts"),
    (r"nanochat|modded-nanogpt", "", "another optimizer (Muon), whose work is not modelled"),
    (r"nanotron", r"80B@(32|64) ", "the allocator was at the edge of the card"),
    (r"llm-foundry", r"30b@.* s8192 ", "contradicts its neighbours in the same table"),
    (r"llm-foundry", r"13b@8 A100-40GB", "contradicts its neighbours in the same table"),
    (r"llm-foundry", r"70b@64 A100-40GB", "contradicts its neighbours in the same table"),
    (r"llm-foundry", r"760m@.* s(512|1024) ", "contradicts its neighbours in the same table"),
    (r"llm-foundry", r"1b@32 A100-40GB", "contradicts its neighbours in the same table"),
    (r"DeepCompile|Ulysses|ZeRO\+\+", "", "no layers or batch: a trend only"),
)

# Sources that are one family: left out together when a prediction is tested.
FAMILIES = (
    (r"NVIDIA|NeMo|Megatron-Bridge|DGX", "NVIDIA recipes"),
    (r"Narayanan|Korthikanti|Megatron-LM README", "Megatron papers"),
    (r"llm-foundry|MosaicML|Composer", "llm-foundry"),
    (r"torchtitan", "torchtitan"),
    (r"Zero Bubble", "Zero Bubble"),
    (r"nanotron", "nanotron"),
    (r"BLOOM|BigScience", "BigScience"),
    (r"DeepSpeed", "DeepSpeed"),
)


LIKELY_BUBBLE = 0.1  # idle share up to which a user interleaves, where the chunks are unknown


@dataclass(frozen=True)
class PublishedRun:
    """One usable row."""

    family: str
    label: str
    framework: str
    job: Job
    machine: Machine
    tokens_per_s: float  # per GPU, measured
    memory_gib: float | None  # of the fullest GPU, as the source measured it
    unknown: tuple[str, ...] = ()  # fields that were blank and matter
    notes: dict[str, str] = field(default_factory=dict, compare=False, hash=False)

    @property
    def is_calibrated(self) -> bool:
        """Whether engine and GPU have rows that constants were fitted on."""
        return bool(self.machine.calibrated) and self.job.engine.is_calibrated


NEEDED = ("source", "layers", "hidden", "seq", "n_gpus", "gpu")


def read(path: Path, needed: Sequence[str] = NEEDED) -> list[dict[str, str]]:
    """The rows of a file. Raises UserError where it is not a table of such columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"ROWS={path}: cannot be read: {error}") from None
    missing = set(needed) - set(rows[0] if rows else ())
    if missing:
        raise UserError(
            f"ROWS={path}: no column {', '.join(sorted(missing))}; the columns are those of"
            " plan/published/throughput.csv"
        )
    return rows


def usable(rows: list[dict[str, str]]) -> tuple[list[PublishedRun], dict[str, int]]:
    """The runs that can be predicted, and reason -> number of rows that cannot."""
    found, refused = [], {}
    for row in rows:
        run = published_run(row)
        if isinstance(run, str):
            refused[run] = refused.get(run, 0) + 1
        else:
            found.append(run)
    return found, refused


def published_run(row: dict[str, str]) -> PublishedRun | str:
    """The run of a row, or why it cannot be used."""
    shown = _label(row)
    for source, label, reason in EXCLUDED:
        if re.search(source, f"{row['source']} {row.get('framework', '')}") and re.search(
            label, shown
        ):
            return f"excluded: {source.replace(chr(92), '')} {label}: {reason}".replace(" :", ":")
    if row.get("kind", "benchmark") not in ("benchmark", "whole_run", ""):
        return f"kind={row['kind']}: not a benchmark"
    if row.get("complete") == "0":
        return "complete=0: something that decides the speed was not published"
    precision = row.get("precision") or "bf16"
    if precision not in ("bf16", "fp16"):
        return f"precision={precision}: no rates"
    if (_number(row, "ep") or 1) > 1:
        return "experts are not modelled"
    try:
        machine = _machine(row)
    except UserError:
        return f"gpu={row['gpu'] or 'blank'} is not in gpus.csv"
    unknown: list[str] = []
    job = _job(row, precision, machine, unknown)
    if isinstance(job, str):
        return job
    measured = tokens_per_s(row, job)
    if not measured:
        return "no speed, or in a convention that cannot be converted"
    memory = _number(row, "mem_gb_per_gpu")
    return PublishedRun(
        family=_family(row["source"]),
        label=shown,
        framework=row.get("framework", ""),
        job=job,
        machine=machine,
        tokens_per_s=measured,
        memory_gib=memory,
        unknown=tuple(unknown),
        notes=row,
    )


def tokens_per_s(row: dict[str, str], job: Job) -> float | None:
    """Measured tokens per second and GPU; TFLOP/s and MFU by the source's own formula."""
    given = _number(row, "tokens_per_s_per_gpu")
    if given:
        return given
    step = _number(row, "step_time_s")
    if step:
        return job.tokens / step / job.world
    tflops = _number(row, "tflops_per_gpu")
    if not tflops:
        mfu = _number(row, "mfu")
        tflops = (
            mfu * (_number(row, "peak_tflops") or machine_of(row["gpu"]).peak_tflops)
            if mfu
            else None
        )
    flops = flops_of_convention(row.get("flop_convention", ""), job)
    return tflops * 1e12 / flops if tflops and flops else None


def flops_of_convention(convention: str, job: Job) -> float | None:
    """FLOPs per token as a source counted them."""
    shape, s = job.shape, job.seq_len
    layers, h = shape.num_hidden_layers, shape.hidden_size
    body = layers * shape.block_matrices
    if convention.startswith(("megatron_96", "megatron_72")):
        times = 96 if "_96" in convention else 72
        return times * layers * h * h * (1 + s / (6 * h) + shape.vocab_size / (16 * layers * h))
    if convention.startswith("8*N"):
        return 8.0 * shape.parameters
    if "6Lhs" in convention:
        return 6.0 * (body + shape.embedding) + 6.0 * layers * shape.query * s
    if convention:
        return float(shape.flops_per_token(s))
    return None


def _number(row: dict[str, str], name: str) -> float | None:
    try:
        value = float(row.get(name) or "")
    except ValueError:
        return None
    return value if 0 < value < 1e30 else None


def _label(row: dict[str, str]) -> str:
    axes = "x".join(row.get(name) or "?" for name in ("tp", "cp", "pp"))
    return (
        f"{row.get('model', '')}@{row['n_gpus']} {row['gpu']} s{row['seq']}"
        f" b{row.get('micro_batch', '')} {axes} {row.get('framework', '')}"
    )


def _family(source: str) -> str:
    return next((name for pattern, name in FAMILIES if re.search(pattern, source)), source)


def _machine(row: dict[str, str]) -> Machine:
    gpu = row["gpu"]
    if gpu == "H100" and "torchtitan" in row.get("framework", ""):
        gpu = "H100-HBM2e-96GB-500W"  # the only cluster that its tables name
    machine = machine_of(gpu)
    changes = {}
    per_node = _number(row, "gpus_per_node")
    if per_node:
        changes["gpus_per_node"] = int(per_node)
        if machine.domain <= machine.gpus_per_node:
            changes["domain"] = int(per_node)
    nic = nic_gb_s(row.get("interconnect", ""), int(per_node or machine.gpus_per_node))
    if nic:
        changes["nic_gb_s"] = nic
    return dataclasses.replace(machine, **changes)


def nic_gb_s(text: str, gpus_per_node: int) -> float | None:
    """GB/s per GPU from words such as `1600 Gb/s RoCE per node`; None where they give none."""
    found = re.search(r"(?:(\d+)x\s*[\w-]*\s*)?[^\d]*?([\d.]+)\s*(G|T)b/s", text)
    if not found:
        return None
    rate = float(found[2]) * (1000 if found[3] == "T" else 1) / 8
    rate *= int(found[1] or 1)
    is_of_host = "per node" in text or found[1]
    return rate / gpus_per_node if is_of_host and "per GPU" not in text else rate


def _job(row: dict[str, str], precision: str, machine: Machine, unknown: list[str]) -> Job | str:
    """The job of a row, or why there is none; fields that were blank are added to `unknown`."""
    number = {name: int(_number(row, name) or 0) for name in (
        "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq", "global_batch",
        "micro_batch", "n_gpus", "tp", "pp", "vpp", "dp", "cp")}  # fmt: skip
    missing = [name for name in ("layers", "hidden", "heads", "seq", "n_gpus") if not number[name]]
    if missing:
        return f"no {', '.join(missing)}"
    is_odd = number["heads"] > number["hidden"] or number["kv_heads"] > number["heads"]
    if is_odd or (row.get("zero_stage") or "0") not in ("0", "1", "2", "3"):
        return "sizes that contradict each other"
    shape = _shape(row, number)
    tensor, pipeline, context = (number[name] or 1 for name in ("tp", "pp", "cp"))
    data = number["dp"] or number["n_gpus"] // (tensor * pipeline * context)
    if data * tensor * pipeline * context != number["n_gpus"]:
        return "the axes do not multiply to the number of GPUs"
    if pipeline > number["layers"]:
        return "more pipeline stages than layers"
    micro_batch = number["micro_batch"]
    if not micro_batch or not number["global_batch"]:
        return "no batch"
    micro_batches = max(1, round(number["global_batch"] / (data * micro_batch)))
    engine, engine_unknown = _engine(row)
    unknown += engine_unknown
    stage = row.get("zero_stage") or ""
    if engine.name.startswith("fsdp") and pipeline > 1:
        stage = "1"  # weights stay gathered between the micro-batches of a step
    if not stage:
        stage = "3" if engine.name.startswith(("fsdp", "xla")) else "1"
    virtual = number["vpp"] or 1
    schedule = re.search(r"schedule (ZB-\dp)", row.get("notes", ""))
    if pipeline > 1 and not number["vpp"] and "schedule" not in row.get("notes", ""):
        unknown.append("vpp")
        # Megatron's and torchtitan's users interleave from about 2023 on.
        is_likely = number["layers"] >= 4 * pipeline and int(_number(row, "year") or 2024) >= 2023
        if is_likely and engine.name.split("-")[0] in ("megatron", "fsdp"):
            # Nobody who can interleave keeps a bubble of more than a tenth of the work.
            idle = (pipeline - 1) / micro_batches
            virtual = max(2, min(math.ceil(idle / LIKELY_BUBBLE), number["layers"] // pipeline))
    group = re.search(r"group (\d+)|FSDP (\d+) x DP", row.get("sharding_impl", ""))
    sizes = [int(size) for size in group.groups() if size] if group else []
    recompute = (row.get("recompute") or "").strip()
    job = Job(
        shape=shape,
        seq_len=number["seq"],
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        tensor=tensor,
        pipeline=pipeline,
        virtual=virtual,
        context=context,
        data=data,
        stage=int(stage),
        recompute=recompute if recompute in ("none", "selective", "full") else "none",
        precision=precision,
        sequence=not (
            engine.name in ("megatron-classic", "megatron-deepspeed") and recompute != "selective"
        ),
        blocks=_blocks(row, shape, pipeline, engine),
        schedule=schedule[1].lower() if schedule else "1f1b",
        shard_group=min(sizes[0], data * context) if sizes else 0,
        engine=engine,
    )
    if not recompute:
        unknown.append("recompute")
        job = dataclasses.replace(job, recompute=fits_recompute(job, machine))
    return job


def _blocks(row: dict[str, str], shape: Shape, pipeline: int, engine: Profile) -> tuple[int, ...]:
    """Blocks per stage: by cost where the engine balances, else as the notes say, else even."""
    layers = shape.num_hidden_layers
    if pipeline > 1 and engine.name == "nanotron" and pipeline <= layers:
        return greedy_blocks(shape, pipeline)
    if pipeline > 2 and "first and last stage have one layer fewer" in row.get("notes", ""):
        middle = (layers + 2) // pipeline
        if middle * pipeline == layers + 2:
            return (middle - 1, *[middle] * (pipeline - 2), middle - 1)
    return ()


def greedy_blocks(shape: Shape, pipeline: int) -> tuple[int, ...]:
    """nanotron's split: a stage takes blocks until the cost so far passes its share of all."""
    head = shape.embedding / shape.block_matrices
    share = (shape.num_hidden_layers + head) / pipeline
    counts = [0] * pipeline
    stage = 0
    for index in range(shape.num_hidden_layers):
        counts[stage] += 1
        if index + 1 > share * (stage + 1) and stage < pipeline - 1:
            stage += 1
    return tuple(counts)


def _shape(row: dict[str, str], number: dict[str, int]) -> Shape:
    hidden, layers, heads = number["hidden"], number["layers"], number["heads"]
    ffn = number["ffn_hidden"] or 4 * hidden
    kv_heads = number["kv_heads"] or heads
    vocab = number["vocab"] or (256000 if "Nemotron" in row.get("model", "") else 51200)
    given = _number(row, "params") or 0
    # Gate, ties and positions follow from the printed number of parameters.
    shapes = [
        Shape(vocab, hidden, ffn, layers, heads, kv_heads, tie_word_embeddings=tied,
              is_gated=gated, positions=positions)
        for gated in (False, True)
        for tied in (False, True)
        for positions in (0, number["seq"])
    ]  # fmt: skip
    is_gpt = re.search(r"GPT|MPT|BLOOM|OPT|Nemotron", row.get("model", ""), re.I) is not None
    if given:
        # Several shapes may give the same number: those of the model's kind are more likely.
        likely = 0.03 if is_gpt else 1e-3
        return min(
            shapes,
            key=lambda shape: (
                abs(shape.parameters / given - 1)
                + likely * ((shape.is_gated == is_gpt) + ((shape.positions > 0) != is_gpt))
            ),
        )
    return Shape(
        vocab, hidden, ffn, layers, heads, kv_heads,
        tie_word_embeddings=is_gpt and "Nemotron" not in row.get("model", ""),
        is_gated=not is_gpt, positions=number["seq"] if is_gpt else 0,
    )  # fmt: skip


def _engine(row: dict[str, str]) -> tuple[Profile, list[str]]:
    """The profile of a framework, and what had to be guessed."""
    framework = row.get("framework", "").lower()
    year = int(_number(row, "year") or 2024)
    flash, unknown = row.get("flash_attention") or "", []
    sharded = "fsdp" in (row.get("sharding_impl") or "").lower() or row.get("zero_stage") == "3"
    is_megatron = "megatron" in framework or "nemo" in framework
    if "nanotron" in framework:
        engine = ENGINES["nanotron"]
    elif "deepspeed" in framework and (sharded or "megatron" not in framework):
        engine = ENGINES["deepspeed"]
    elif "deepspeed" in framework:
        engine = ENGINES["megatron-deepspeed"]
    elif is_megatron and year >= 2023 and "zero-bubble" not in framework:
        engine = ENGINES["megatron"]
        if not re.search("nemo|bridge|core", framework):  # overlap has to be asked for there
            engine = dataclasses.replace(
                engine, tensor_exposed="all", data_exposed="all", attention="attention_two"
            )
    elif is_megatron:
        engine = ENGINES["megatron-classic"]
    elif re.search(r"maxtext|jax|levanter", framework):
        engine = ENGINES["xla"]
    elif row.get("compile") == "yes":
        engine = ENGINES["fsdp-compiled"]
    elif sharded or re.search(r"fsdp|composer|titan|torch|gpt", framework):
        engine = ENGINES["fsdp"]
    else:
        # What most engines have: attention kernels of their year, and nothing else that is special.
        engine = dataclasses.replace(
            ENGINES["megatron"], bytes_multiple="bytes_compiled", attention="attention_two",
            tensor_exposed="all", data_exposed="shard_exposed", sum_bytes=4, is_calibrated=False,
        )  # fmt: skip
        unknown.append("framework")
    if (engine.name == "fsdp" or "framework" in unknown) and year <= 2023:
        engine = dataclasses.replace(engine, attention="attention_old")
    if flash == "no":
        engine = dataclasses.replace(engine, attention="")
    elif flash == "yes" and not engine.attention:
        engine = dataclasses.replace(engine, attention="attention_old")
    if engine.name == "fsdp" and "PURE (bf16)" in row.get("notes", ""):
        engine = dataclasses.replace(engine, sum_bytes=2)
    if "async TP" in row.get("notes", ""):
        engine = dataclasses.replace(engine, tensor_exposed="tensor_exposed")
    return engine, unknown
