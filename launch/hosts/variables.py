"""Chooses the variables of the caller that reach the ranks on other hosts.

Rule: an allow-list. Variables of the libraries are chosen by their prefix, others only where PASS=
names them: not the caller's PATH, display or keys. A variable whose name looks like that of a
secret is passed on only when it is named, and its value is never compared or printed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from base.errors import UserError
from base.redaction import looks_secret

PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "UCC_", "FI_", "RDMAV_", "MLX5_", "SHARP_",
    "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUBLAS_", "CUDNN_", "NVTE_", "TRITON_",
    "OMP_", "MKL_", "KMP_", "GOMP_", "DS_", "DEEPSPEED_", "HF_", "TOKENIZERS_", "WANDB_",
)  # fmt: skip
NAMES = ("LD_LIBRARY_PATH", "NO_COLOR", "MAX_JOBS", "PYTHONHASHSEED", "PYTHONWARNINGS")
# Names of devices are a matter of each host.
NEVER = ("CUDA_VISIBLE_DEVICES",)
# What may differ between good hosts: interfaces and adapters have the names their hosts give them.
LOCAL = re.compile(r"_IFNAME$|_HCA$|_NET_DEVICES$|_TOPO_FILE$|^CUDA_VISIBLE_DEVICES$")


def is_watched(name: str) -> bool:
    """Whether a variable controls the libraries, so that hosts must agree on it."""
    return (name.startswith(PREFIXES) or name in NAMES) and name not in NEVER


def passed(environ: Mapping[str, str], named: Iterable[str] = ()) -> dict[str, str]:
    """The variables that every host gets. Raises UserError where a named one is not set."""
    problems = []
    chosen = {
        name: value
        for name, value in environ.items()
        if is_watched(name) and not looks_secret(name)
    }
    for name in named:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            problems.append(f"PASS: {name[:80]!r} is not the name of a variable")
        elif name not in environ:
            problems.append(f"PASS: {name} is not set here; export it first")
        else:
            chosen[name] = environ[name]
    if problems:
        raise UserError(*problems)
    return chosen


def left_here(environ: Mapping[str, str], named: Iterable[str]) -> list[str]:
    """A line for each variable that has no effect on ranks of other hosts."""
    return [
        f"{name}={environ[name]} does not go along: hosts name their devices themselves;"
        f" INCLUDE=host:0,1 chooses, PASS={name} gives it to every host"
        for name in NEVER
        if environ.get(name) and name not in named
    ]


def watched(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that control the libraries on this host, for comparison.

    Secrets are left out, and so are names that may differ between good hosts.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if is_watched(name) and not looks_secret(name) and not LOCAL.search(name)
    }
