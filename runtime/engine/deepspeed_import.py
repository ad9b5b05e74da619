"""Imports DeepSpeed without the parts that take long and are not used here, and makes it quiet."""

from __future__ import annotations

import importlib
import logging
import warnings

import torch


def join_deepspeed(device: torch.device) -> None:
    """Let DeepSpeed use the process group, without parts that take long and are not used here."""
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
    """Show only warnings of DeepSpeed, and none about names that DeepSpeed itself still uses."""
    from deepspeed.runtime import bf16_optimizer

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # BF16_Optimizer prints 18 lines of memory and collects garbage six times, whatever the level:
    # a second of every start.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    warnings.filterwarnings(
        "ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
