"""Training programs that benchmarks.step compares, each a plain loop over the same workload.

    torch       bare loop: LlamaForCausalLM, fused AdamW, clip_grad_norm_ (DDP on several ranks)
    trainer     Hugging Face Trainer with DeepSpeed ZeRO-1
    ours        this project's engine at zero=1, plain causal rows as for the others
    deepspeed   bare DeepSpeed ZeRO-1 with LlamaForCausalLM: the part of the difference due to the
                model
    documents   ours with document masks, as in a real run

Rule: after each update a loop calls `turns.after_step(loss, times)`. It pauses there while others
run, and the loop ends when it returns False. Weights, tokens, learning rate, betas, decay (matrices
only) and clipping are the same everywhere; every baseline gets its fastest plain settings (fused
AdamW, SDPA, no cache).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks.workload import (
    LR,
    Workload,
    count_targets,
    micro_batches,
    recipe_of,
    resolved_of,
)
from model.init import fill
from runtime.engine.batches import to_device
from runtime.engine.build_engine import build
from runtime.engine.deepspeed_import import quiet
from runtime.engine.engine import DTYPES
from runtime.engine.optimizer import build_optimizer
from runtime.monitor.clock import StepClock, StepTimes
from runtime.process import process


class Turns(Protocol):
    """Interface at which a loop pauses (benchmarks.worker implements it)."""

    def begin(self) -> bool: ...
    def after_step(self, loss: float, times: StepTimes | None = None) -> bool: ...


def llama(work: Workload) -> nn.Module:
    """Transformers' Llama with this project's initial weights, in the training dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **work.shape,
        max_position_embeddings=work.seq_len,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    fill(model, recipe_of(work).seed)
    return model.to(DTYPES[work.precision]).train()


def llama_batches(work: Workload, rank: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches in Transformers' convention: labels are the inputs, the model shifts them."""
    batches = []
    for batch in micro_batches(work, rank, "across"):
        ids = torch.from_numpy(batch.input_ids)
        labels = ids.clone()
        labels[:, 0] = -100  # never a target; the Trainer counts targets before the shift
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def run_torch(work: Workload, turns: Turns) -> None:
    """Train with a bare torch loop (contender `torch`)."""
    me = process.start(recipe_of(work).cluster)
    core = llama(work)
    model = nn.parallel.DistributedDataParallel(core) if work.world > 1 else core
    optimizer = build_optimizer(core.named_parameters(), recipe_of(work).optim)
    batches, targets = llama_batches(work, me.rank), count_targets(work, "across")
    clock = StepClock()
    is_on = turns.begin()
    clock.start()
    while is_on:
        total = 0.0
        with clock.phase("compute"):
            for number, batch in enumerate(batches):
                if work.world > 1:
                    model.require_backward_grad_sync = number == len(batches) - 1
                # DDP divides gradients by the ranks.
                loss = model(**batch, num_items_in_batch=targets).loss
                (loss * work.world).backward()
                total += loss.item()
        with clock.phase("optimizer"):
            nn.utils.clip_grad_norm_(core.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        is_on = turns.after_step(total, clock.finish().times())
        clock.start()


def run_deepspeed(work: Workload, turns: Turns) -> None:
    """Train with bare DeepSpeed: our JSON and Transformers' Llama (contender `deepspeed`)."""
    me = process.start(recipe_of(work).cluster)
    import deepspeed

    prepare_deepspeed(deepspeed)
    deepspeed.init_distributed()
    recipe = recipe_of(work)
    model = llama(work)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=build_optimizer(model.named_parameters(), recipe.optim),
        config=resolved_of(recipe, work.world).config,
    )
    batches, targets = llama_batches(work, me.rank), count_targets(work, "across")
    clock = StepClock()
    is_on = turns.begin()
    clock.start()
    while is_on:
        total = 0.0
        for number, batch in enumerate(batches):
            engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            with clock.phase("compute"):
                loss = engine(**batch, num_items_in_batch=targets).loss
                engine.backward(loss * work.world, scale_wrt_gas=False)
                total += loss.item()
            with clock.phase("optimizer"):
                engine.step()
        is_on = turns.after_step(total, clock.finish().times())
        clock.start()


def run_ours(work: Workload, turns: Turns, attend: str = "across") -> None:
    """Train with this project's engine; `attend="within"` uses document masks."""
    recipe = recipe_of(work)
    me = process.start(recipe.cluster)
    resolved = resolved_of(recipe, work.world)
    engine = build(recipe, resolved.layout, resolved.config, me)
    numpy_batches = micro_batches(work, me.rank, attend)
    targets = count_targets(work, attend)
    clock = StepClock()
    is_on = turns.begin()
    clock.start()
    while is_on:
        with clock.phase("data"):
            batches = [to_device(batch, me.device) for batch in numpy_batches]
            if attend == "across":  # plain causal attention without a mask, like the others
                for batch in batches:
                    for name in ("segment_ids", "cu_seqlens", "max_seqlen"):
                        del batch[name]
        engine.set_lr(LR)
        result = engine.train_step(batches, targets, work.tokens, clock.phase)
        loss = float(result.loss)
        is_on = turns.after_step(loss, clock.finish().times())
        clock.start()


def run_documents(work: Workload, turns: Turns) -> None:
    """Train with this project's engine and document masks."""
    run_ours(work, turns, attend="within")


def run_trainer(work: Workload, turns: Turns) -> None:
    """Train with Hugging Face's Trainer. Needs `accelerate`, no dependency of this project."""
    process.start(recipe_of(work).cluster)
    import accelerate  # noqa: F401  (missing: ImportError, which the worker reports)
    import deepspeed
    from transformers import Trainer, TrainerCallback, TrainingArguments

    prepare_deepspeed(deepspeed)
    recipe = recipe_of(work)
    losses: list[torch.Tensor] = []

    class Counted(Trainer):
        """A Trainer that takes the rows in order and keeps every loss unrounded."""

        def _get_train_sampler(self, *_: Any) -> None:
            return None

        def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **named)
            losses.append(loss)
            return loss

    class Pause(TrainerCallback):
        """Callback that passes every step to `turns`."""

        def on_step_end(self, args, state, control, **kwargs):
            # The ranks' shares add up; with several ranks the Trainer scales each by their number.
            loss = float(sum(losses)) / work.world
            losses.clear()
            if not turns.after_step(loss):
                control.should_training_stop = True

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.micro_batch,
            gradient_accumulation_steps=work.accumulation,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta1=recipe.optim.beta1,
            adam_beta2=recipe.optim.beta2,
            weight_decay=recipe.optim.weight_decay,
            max_grad_norm=recipe.optim.clip,
            optim="adamw_torch_fused",
            bf16=work.precision == "bf16",
            deepspeed=resolved_of(recipe, work.world).config,
            max_steps=recipe.steps,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        quiet()
        torch.set_num_threads(work.threads)
        trainer = Counted(
            model=llama(work),
            args=arguments,
            train_dataset=RepeatedRows(work),
            callbacks=[Pause()],
        )
        if turns.begin():
            trainer.train()


class RepeatedRows(torch.utils.data.Dataset):
    """Repeat the global batch, one row an item, in the order in which ranks take rows."""

    def __init__(self, work: Workload):
        by_rank = [llama_batches(work, rank) for rank in range(work.world)]
        self.rows = []
        for number in range(work.accumulation):
            for rank in range(work.world):
                batch = by_rank[rank][number]
                for row in range(work.micro_batch):
                    self.rows.append({name: tensor[row] for name, tensor in batch.items()})

    def __len__(self) -> int:
        return len(self.rows) * 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index % len(self.rows)]


def prepare_deepspeed(deepspeed: Any) -> None:
    """Import DeepSpeed as runtime.engine.deepspeed_import does: no shared-memory op, quiet."""
    quiet()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


CONTENDERS: dict[str, Callable[[Workload, Turns], None]] = {
    "torch": run_torch,
    "trainer": run_trainer,
    "ours": run_ours,
    "deepspeed": run_deepspeed,
    "documents": run_documents,
}
