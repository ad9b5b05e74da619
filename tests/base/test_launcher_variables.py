"""base/launcher_variables.py: what another launcher left in the shell is known by name."""

from __future__ import annotations

from base.launcher_variables import of_a_step, of_launchers, of_mpi, unused

MPI = ["MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK", "PMI_SIZE"]
TORCHRUN = ["RANK", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"]
SETTINGS = ["PATH", "MASTER_PORT", "OMPI_MCA_btl", "SLURM_JOB_ID"]
ENVIRON = dict.fromkeys([*MPI, *TORCHRUN, *SETTINGS], "1")


def test_variables_of_other_launchers_are_known_and_settings_are_not_among_them():
    assert of_mpi(ENVIRON) == MPI
    assert of_launchers(ENVIRON) == sorted([*MPI, *TORCHRUN])


def test_a_step_of_one_task_is_no_contradiction():
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "8"}
    assert of_a_step(step) == ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"]
    assert of_a_step(step | {"SLURM_NTASKS": "1"}) == []
    assert of_a_step({"SLURM_NTASKS": "8"}) == []  # a shell of salloc


def test_one_line_names_them():
    assert unused(["A", "B"]).endswith("are not used: A B")
    assert unused([f"V{n}" for n in range(11)]).endswith("V7 and 3 more")
