"""The DeepSpeed engine behind the small interface that the loop uses for every layout.

    engine.set_lr(lr)   engine.train_step(batches) -> StepResult   engine.evaluate(batches) -> loss

The one rule: the loss and its gradient are means over the target tokens of the *global* batch, so
neither masks nor the cut of the batch over ranks and micro-batches changes them. DeepSpeed divides
gradients by the data-parallel size; the loss is multiplied by it beforehand. DeepSpeed's division
by the accumulation count is switched off, and the boundary is set by hand, so a batch ramp may
change the count at any step.

Nothing here reads a device value on the host: losses stay tensors until the loop asks, one step
later.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from base.errors import Shared
from checkpoint.format.index import Fragment
from checkpoint.save.replicas import Replica
from model.config import DecoderConfig
from model.decoder import Decoder, compile_blocks
from model.init import initial_weight as initial
from parallel import tensor
from parallel.layout import Layout
from parallel.mesh import Mesh, ModelParallelUnit, make_mesh
from recipes.schema import Recipe
from runtime.engine.initial_weights import Draw, fill_owned
from runtime.engine.optimizer import build_optimizer
from runtime.engine.update_gate import MayUpdate, UpdateGate
from runtime.process.process import Process

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# ZeRO++; on the CPU one fails at start and the other in the first backward.
CUDA_ONLY = ("zero_quantized_weights", "zero_quantized_gradients")
NO_CONTEXT = contextlib.nullcontext()


@dataclass(frozen=True)
class StepResult:
    """One update. `loss` and `grad_norm` may still be on their way from the device."""

    loss: torch.Tensor  # () fp32, mean over the targets of the global batch, equal on all ranks
    grad_norm: torch.Tensor | float  # global, before clipping
    tokens: int  # positions in the global batch
    targets: int  # positions that have a target
    skipped: bool  # not finite, an outlier, or nothing to be trained: weights did not move


def untrained(tokens: int, device: torch.device) -> StepResult:
    """The result of a step that is counted without moving the weights: no loss was taken."""
    nothing = torch.full((), float("nan"), device=device)
    return StepResult(loss=nothing, grad_norm=nothing, tokens=tokens, targets=0, skipped=True)


class Engine:
    """Weights, gradients and optimizer of this rank, trained by DeepSpeed."""

    def __init__(self, ds: Any, mesh: Mesh, process: Process):
        self.ds = ds
        self.mesh = mesh
        self.layout = mesh.layout
        self.process = process
        self.update_gate = UpdateGate(ds, mesh.is_plain, process.device)

    @property
    def model(self) -> nn.Module:
        """The decoder; under ZeRO-3 its parameters are empty outside their own forward."""
        return self.ds.module

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next update, on every parameter group."""
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr

    def train_step(
        self,
        micro_batches: Sequence[dict[str, Any]],
        targets: int,
        tokens: int,
        phase: Callable[[str], contextlib.AbstractContextManager] = lambda name: NO_CONTEXT,
        may_update: MayUpdate | None = None,
    ) -> StepResult:
        """One update from this rank's micro-batches of a global batch with `targets` targets.

        Each micro-batch holds the keyword arguments of the decoder, on the device. `phase(name)` is
        a context manager that times a part of the step. `may_update(loss, grad_norm)` is asked once
        before the weights move, with the same numbers on all ranks.
        """
        loss = torch.zeros((), dtype=torch.float32, device=self.process.device)
        data = self.mesh.data
        with phase("compute"):
            for index, batch in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                self.ds.set_gradient_accumulation_boundary(is_last)
                part = self.ds(**batch, num_items_in_batch=targets).loss
                self.ds.backward(part * data.size, scale_wrt_gas=False)
                loss += part.detach()
                if not is_last:
                    self.ds.step()
        with phase("optimizer"):
            dist.all_reduce(loss, group=data.group)
            self.update_gate.ask(loss, may_update)
            self.ds.step()
        return StepResult(
            loss=loss,
            grad_norm=self.ds.get_global_grad_norm(),
            tokens=tokens,
            targets=targets,
            skipped=self.update_gate.closed(),
        )

    def fragments(self) -> list[Fragment]:
        """What this rank owns of weights and optimizer states: live fp32 memory, by name.

        Makes the optimizer's states where no step has made them yet.
        """
        from checkpoint import fragments as owned

        owned.create_states(self.ds)
        return owned.fragments(self.ds, self.mesh.tensor.index)

    def replicas(self) -> list[Replica]:
        """Working weights of this rank that other ranks must hold too, to the bit."""
        from checkpoint import fragments as owned

        return owned.replicas(self.ds, self.mesh)

    def optimizer_step(self) -> int | None:
        """Updates that moved the weights, as the optimizer counts; None for one that does not."""
        from checkpoint import fragments as owned

        return owned.optimizer_step(self.ds)

    def after_load(self, optimizer_step: int) -> None:
        """Bring working weights and step counts in line with filled fragments; a collective."""
        from checkpoint import fragments as owned

        owned.after_load(self.ds, optimizer_step)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[dict[str, Any]]) -> torch.Tensor:
        """Mean loss over the targets of all ranks' micro-batches, a () fp32 tensor.

        Every rank must bring the same number of micro-batches: ZeRO-3 gathers in step.
        """
        self.ds.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.process.device)
        for batch in micro_batches:
            total[0] += self.ds(**batch, num_items_in_batch=1).loss
            total[1] += (batch["labels"] >= 0).sum() / self.mesh.context.size
        self.ds.train()
        dist.all_reduce(total, group=self.mesh.data.group)
        return (total[0] / total[1]).float()


def build(
    recipe: Recipe,
    layout: Layout,
    config: dict[str, Any],
    process: Process,
    draw: Draw | None = initial,
) -> Engine:
    """The engine of `recipe` on this rank: model, weights, optimizer, DeepSpeed.

    `config` is the full DeepSpeed JSON, nothing left at auto. `draw` gives the weights; None leaves
    them undefined, for a checkpoint that will fill them.
    """
    import deepspeed  # after process.start: the accelerator is chosen when it is imported
    from deepspeed.utils import groups

    check_kernels(config, process.device)
    join_deepspeed(process.device)
    mesh = make_mesh(layout, process.rank)
    if layout.pipeline > 1:
        from runtime.engine.pipeline_engine import build_pipeline

        return build_pipeline(recipe, config, process, mesh, draw)
    unit = None if mesh.is_plain else ModelParallelUnit(mesh)
    groups.mpu = unit  # a global, also read where none is given
    model = build_model(recipe, config, process, mesh, unit, draw)
    optimizer = build_optimizer(model.named_parameters(), recipe.optim)
    try:
        ds, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=unit)
    except (AssertionError, ValueError, NotImplementedError) as error:
        # A combination of keys that only the engine refuses; all ranks find it.
        raise Shared(f"DeepSpeed refuses the JSON: {' '.join(str(error).split())}") from error
    ds.train()
    return Engine(ds, mesh, process)


def check_kernels(config: dict[str, Any], device: torch.device) -> None:
    """Raise Shared where the JSON asks for kernels that `device` does not have."""
    given = [key for key in CUDA_ONLY if config["zero_optimization"].get(key)]
    if given and device.type != "cuda":
        raise Shared(
            *(
                f"ds.zero_optimization.{key}=True: its kernels exist for CUDA only, and this run is"
                f" on {device.type}; remove it"
                for key in given
            )
        )


def build_model(
    recipe: Recipe,
    config: dict[str, Any],
    process: Process,
    mesh: Mesh,
    unit: ModelParallelUnit | None,
    draw: Draw | None,
) -> Decoder:
    """This rank's part of the decoder with its weights, in the training dtype, on the device.

    Under ZeRO-3 each module is partitioned as it is made. Weights come by rows, so they are the
    same in every layout and no host holds more of them than it must.
    """
    import deepspeed

    dtype, stage = DTYPES[recipe.precision], mesh.layout.stage
    whole = decoder_config(recipe)
    partition: contextlib.AbstractContextManager = contextlib.nullcontext()
    if stage == 3:
        partition = deepspeed.zero.Init(
            config_dict_or_path=config, mpu=unit, data_parallel_group=mesh.data.group
        )
    with default_dtype(dtype), process.device, partition:
        model = Decoder(tensor.local_config(whole, mesh.tensor))
    tensor.apply(model, mesh, whole, recipe.parallel.sequence)
    if draw is not None:
        fill_owned(model.named_parameters(), whole, recipe.seed, stage, mesh.data, draw)
    model.recompute = recipe.recompute
    if recipe.compile:
        compile_blocks(model.model.layers)
    return model


def decoder_config(recipe: Recipe) -> DecoderConfig:
    """The decoder's configuration."""
    return DecoderConfig(**vars(recipe.model), max_position_embeddings=recipe.seq_len)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters get `dtype` inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def join_deepspeed(device: torch.device) -> None:
    """Let it use the process group; without what takes long and is not used here."""
    import deepspeed

    quiet()
    import_muon_uncompiled()
    if device.type == "cpu":
        # A shared-memory op that training does not use; building it takes a minute and a killed
        # build leaves a lock that later runs wait on.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which every engine imports, without compiling its kernels.

    Compiling loads inductor: 2.6 s of every start, for an optimizer that is not used here.
    """
    compile_function = torch.compile
    torch.compile = lambda *functions, **_: functions[0] if functions else (lambda given: given)
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        torch.compile = compile_function


def quiet() -> None:
    """Warnings only from DeepSpeed, and none about names that DeepSpeed itself still uses."""
    from deepspeed.runtime import bf16_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # BF16_Optimizer prints 18 lines of memory and collects garbage six times, whatever the level:
    # a second of every start.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
