"""Bytes of training state per parameter on one rank: weights, gradients, master weights, moments.

The textbook's 16 (Rajbhandari et al. 2020: 2 + 2 + 4 + 4 + 4) becomes, in DeepSpeed 0.19.8:

    weights    2 (bf16) or 4 (fp32); stage 3: / d
    gradients  what is held between two passes, see `_gradients`
    master     4 / d, also in fp32: DeepSpeed steps a copy
    moments    the optimizer's own state, `recipes.schema.OPTIMIZERS` / d: 8 / d for AdamW

d = data-parallel ranks. These are closed formulas, which tests compare with allocated tensors. Not
counted: activations, reduction and gather buckets (constant sizes), padding, weights that stage 3
keeps gathered because they are small.
"""

from __future__ import annotations

from typing import Any

from recipes.schema import MASTER_BYTES, OPTIMIZERS

# With optimizer offload these are in host memory; only the weights are on the device.
ON_HOST = ("gradients", "master", "moments")


def of_layout(recipe: Any, layout: Any, engine: Any) -> dict[str, float]:
    """Bytes per parameter and rank of `recipe`, by kind of state.

    `layout` is a `parallel.layout.Layout`, `engine` the `runtime.ds_config.merge.EngineConfig` for
    it.
    """
    return state_bytes(
        engine.stage,
        recipe.precision,
        engine.grad_dtype,
        # A pipeline reduces after its last pass, also where there is only one.
        layout.accumulates or layout.pipeline > 1,
        engine.is_immediate,
        layout.zero_ranks,
        engine.is_offloaded,
        recipe.optim.name,
    )


def state_bytes(
    stage: int,
    precision: str,
    grad_dtype: str,
    accumulates: bool,
    is_immediate: bool,
    data_size: int,
    is_offloaded: bool,
    optimizer: str = "adamw",
) -> dict[str, float]:
    """Bytes per parameter and rank of each kind of state.

    `grad_dtype` is the type gradients are summed in ("fp32" or "bf16"), `is_immediate` is
    bf16.immediate_grad_update. Multiply by the parameters of this rank's share of the model (a
    tensor or pipeline rank holds a part of it). Raises KeyError for an optimizer that declares no
    state in `OPTIMIZERS`.
    """
    width = {"bf16": 2, "fp32": 4}
    weights = width[precision]
    summed = width[grad_dtype]
    return {
        "weights": weights / data_size if stage == 3 else weights,
        "gradients": _gradients(
            stage, weights, summed, accumulates, is_immediate, data_size, is_offloaded
        ),
        "master": MASTER_BYTES / data_size,
        "moments": OPTIMIZERS[optimizer] / data_size,
    }


def _gradients(
    stage: int,
    weights: int,
    summed: int,
    accumulates: bool,
    is_immediate: bool,
    data_size: int,
    is_offloaded: bool,
) -> float:
    """Bytes of gradients per parameter at the end of a pass, where they are most; no buckets."""
    if is_offloaded:
        # A buffer in the accumulation type and the fp32 copy that the host optimizer reads.
        return (summed + 4) / data_size
    if stage > 1:
        return summed / data_size
    if weights == 2 and summed == 4:
        # BF16_Optimizer: a whole fp32 sum; the 16-bit gradient beside it unless freed at once.
        return 4 if is_immediate else 6
    # Stage 1 keeps whole gradients until the last pass, which cuts them as they are produced.
    return summed if accumulates else summed / data_size
