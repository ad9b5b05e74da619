"""Environment variables of other launchers: torchrun's, mpirun's and SLURM's.

Rule: a launcher that was asked for by name decides. What another one left in the shell is reported
once, is not used, and does not reach DeepSpeed, which refuses ranks that contradict it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

# Set by torchrun for each rank, and by ours.
OF_A_RANK = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR",
)  # fmt: skip
OF_TORCHRUN = ("TORCHELASTIC_", "PET_")
# mpirun of Open MPI, MPICH, Intel MPI and MVAPICH; no rank here is started by them.
OF_MPI = re.compile(
    r"(OMPI_COMM_WORLD_|PMIX_|PMI_|MV2_COMM_WORLD_|HYDI?_|MPI_LOCAL(N?RANKID|NRANKS)).*"
)
SHOWN = 8


def of_mpi(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that mpirun sets for a rank."""
    return sorted(name for name in environ if OF_MPI.fullmatch(name))


def of_launchers(environ: Mapping[str, str]) -> list[str]:
    """Names of all variables by which torchrun or mpirun would describe a rank."""
    torchrun = [name for name in environ if name in OF_A_RANK or name.startswith(OF_TORCHRUN)]
    return sorted([*torchrun, *of_mpi(environ)])


def of_a_step(environ: Mapping[str, str]) -> list[str]:
    """Names of variables by which SLURM's srun describes more tasks than this process."""
    tasks = environ.get("SLURM_NTASKS", "")
    is_one_of_many = tasks.isdigit() and int(tasks) > 1 and "SLURM_STEP_ID" in environ
    return ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"] if is_one_of_many else []


def unused(names: Iterable[str]) -> str:
    """The warning that variables of another launcher are not used."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"variables of another launcher are set in this shell and are not used:"
        f" {' '.join(names[:SHOWN])}{more}"
    )
