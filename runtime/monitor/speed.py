"""Tokens per second, model FLOP utilisation, and the peaks of known devices.

Rule: a speed is a pure function of tokens, seconds and ranks, so every place that prints one prints
the same number. Where the peak is not known there is no utilisation (None), never a guess.

Units: tokens/s over all ranks unless the name says per rank; FLOP/s inside, TFLOP/s in the recipe.
"""

from __future__ import annotations

import re

# Dense bf16 TFLOP/s of one device as torch names it, without sparsity. Sources: NVIDIA data sheets
# of each product (they print twice the number, "with sparsity", for the H, B and L series),
# GeForce: the architecture white papers' figure with fp32 accumulation; AMD Instinct data sheets
# (one MI250X shows as two devices). First match wins, so variants come before the name they
# contain.
PEAK_TFLOPS = (
    (r"GB[23]00", 2500.0),
    (r"B[23]00", 2250.0),
    (r"H[12]00 NVL", 835.5),
    (r"H100 PCIe", 756.0),
    (r"GH200|H[128]00", 989.4),
    (r"H20", 148.0),
    (r"A[18]00", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10G", 70.0),
    (r"A10", 125.0),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121.0),
    (r"RTX 6000 Ada", 364.2),
    (r"RTX A6000", 154.8),
    (r"RTX 5090", 209.5),
    (r"RTX 4090", 165.2),
    (r"RTX 3090", 71.0),
    (r"MI355X", 2516.6),
    (r"MI300X|MI325X", 1307.4),
    (r"MI250X", 191.5),
)


def tokens_per_s(tokens: int, seconds: float) -> float | None:
    """Tokens of one step over all ranks / its seconds; None where no time passed."""
    return tokens / seconds if seconds > 0 else None


def mfu(
    tokens_per_s: float | None, flops_per_token: float | None, peak_flops: float | None, ranks: int
) -> float | None:
    """Model FLOP utilisation, 0..1: FLOP/s that the model needs / FLOP/s that the devices could do.

    `tokens_per_s` is over all `ranks`; `flops_per_token` is forward plus backward without
    recomputation (the convention of Chowdhery et al. 2022, PaLM, appendix B; model.cost names its
    terms); `peak_flops` is one rank's. None where any of the three is not known.
    """
    if tokens_per_s is None or flops_per_token is None or peak_flops is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops * ranks)


def peak_flops(device_name: str | None, peak_tflops: float | None = None) -> float | None:
    """Dense bf16 FLOP/s of one device: `peak_tflops` (cluster.peak_tflops), else by its name.

    None for a CPU (`device_name=None`), an unknown device, a laptop part and a slice of a device
    (MIG).
    """
    if peak_tflops is not None:
        return peak_tflops * 1e12
    if device_name is None or re.search(r"\bMIG\b|Laptop|Max-Q", device_name):
        return None
    for pattern, tflops in PEAK_TFLOPS:
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", device_name):
            return tflops * 1e12
    return None
