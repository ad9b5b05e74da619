"""The rank of this process, its device and its process group.

A rank is started by torchrun or `make pretrain` (RANK, WORLD_SIZE, LOCAL_RANK), by SLURM's srun
(SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID), or alone. Rule: only this file reads these variables of
the launcher. Units: seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from base.cores import allow_open_files, usable
from base.errors import Shared, UserError
from base.launcher_variables import of_mpi, unused
from base.parent_death import signal_at_parent_death
from base.paths import CACHE
from base.redaction import redact, secret_values
from base.run_variables import LAUNCH, PLAN
from base.values import counted
from recipes.schema import Cluster
from record.trust import keep_to_owner
from runtime.engine import builds
from runtime.process import rendezvous
from runtime.process.visible_gpus import visible_gpus

CLAIMS: list[socket.socket] = []  # names held until this process ends
SHARED_REPORT_S = 3.0  # the same for a problem that all ranks find together
FIRST_REPORTS_S = 10.0  # how much later than another rank the first may find the same problem
# Until a rank prints that it waits for others; ranks of one host start at almost the same time.
FIRST_WAIT_S, LATER_WAIT_S = 3.0, 15.0
# The variables that say how many ranks there are, by launcher.
WAITS_BY = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID")
PARENT = os.getppid()  # the agent; it is process 1 where it is a container's entry point


@dataclass(frozen=True)
class Process:
    """One rank. `local_world` ranks share this host."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """True on global rank 0, which writes the record."""
        return self.rank == 0


def launched_world() -> int:
    """Number of ranks that the launcher started; 1 when there is no launcher."""
    return _number("WORLD_SIZE", "SLURM_NTASKS" if _under_srun() else None, default=1)


def launched_rank() -> int:
    """Global rank given by the launcher; 0 when there is no launcher."""
    return _number("RANK", "SLURM_PROCID", default=0)


def given_plan() -> dict[str, Any]:
    """What the launcher's plan chose and predicts (plan.json); says so where there was none."""
    return json.loads(os.environ.get(PLAN) or '{"predicted": null, "why": "no plan was made"}')


def check_launcher() -> None:
    """Raise UserError where the launcher's variables name no rank of a world.

    Variables of mpirun, which starts no rank here, are removed, with a warning.
    """
    world, rank = launched_world(), launched_rank()
    local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", default=0)
    if world > 1 and "RANK" not in os.environ and not _under_srun():
        raise UserError(
            f"WORLD_SIZE={world} is set in the environment and RANK is not; unset it to train on"
            " one rank, or start with torchrun, srun or make pretrain"
        )
    ignored = of_mpi(os.environ)
    for name in ignored:  # DeepSpeed refuses ranks that contradict them
        del os.environ[name]
    if ignored and local_rank == 0:
        print(f"warning: {unused(ignored)}", file=sys.stderr)
    if rank >= world:
        raise UserError(
            f"RANK={rank} is not below WORLD_SIZE={world} in the environment; unset both to train"
            " on one rank, or start with torchrun, srun or make pretrain"
        )


def start(cluster: Cluster) -> Process:
    """Join the process group and choose device and threads.

    Raises UserError when the device that the recipe asks for cannot be used, and TimeoutError when
    ranks are missing at the rendezvous.
    """
    world, rank = launched_world(), launched_rank()
    local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", default=0)
    local_world = _number("LOCAL_WORLD_SIZE", None, default=min(world, _slurm_tasks_per_node()))
    device = choose_device(cluster, local_rank, local_world)
    die_with_launcher()
    keep_to_owner()
    allow_open_files()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(num_threads(cluster, local_world))
    ports = rendezvous.ports(os.environ)
    _export(rank, world, local_rank, local_world, ports[0], device)
    options = {}
    if world == 1:
        options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    limit = datetime.timedelta(seconds=cluster.timeout_s)
    limit_groups(limit)
    with report_wait(rank, world, local_rank, cluster.timeout_s):
        if world > 1 and not rendezvous.has_agent_store():
            name = rendezvous.job_name(os.environ, world)
            address = os.environ["MASTER_ADDR"]
            store = rendezvous.join(address, ports, name, rank, world, cluster.timeout_s)
            options = {"store": store, "rank": rank, "world_size": world}
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=limit,
            **options,
        )
    if device.type == "cuda" and local_world > torch.cuda.device_count():
        gpu = f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
        claim_gpu(dist.distributed_c10d._get_default_store(), gpu)
    return Process(rank, world, local_rank, local_world, device)


def claim_gpu(store: dist.Store, name: str) -> None:
    """Raise UserError where another rank of the host has the GPU `name` already.

    Where each rank sees one GPU, only the identity of the GPU shows whether it is another one.
    """
    if store.add(f"gpu/{name}", 1) > 1:
        raise UserError(
            "several ranks were started on a host that shows 1 GPU; start at most 1 on it"
            " (NPROC=1), give each rank a GPU of its own, or set cluster.device=cpu"
        )


def limit_groups(limit: datetime.timedelta) -> None:
    """Make `limit` the time limit of all process groups that are created without one of their own.

    torch gives such groups its own default, whatever the limit of the first group is: those of
    parallel.mesh and of DeepSpeed would wait for up to half an hour.
    """
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        assert hasattr(dist.distributed_c10d, name), f"this torch has no {name}"
        setattr(dist.distributed_c10d, name, limit)


@contextlib.contextmanager
def report_wait(rank: int, world: int, local_rank: int, timeout_s: float) -> Iterator[None]:
    """Print after a moment that this rank waits for others, and which variables made it wait.

    They may be left over in the shell from another launcher, and then nobody ever comes.
    """
    names = [name for name in WAITS_BY if name in os.environ]
    text = (
        f"rank {rank} waits for the other {world - 1} of {world} ranks, {timeout_s:.0f} s at most"
        f" (cluster.timeout_s), because {' '.join(names)} are set in the environment; to train"
        f" without them: unset {' '.join(names)}, or make pretrain"
    )
    # Our launcher has started all ranks, and reports their ends.
    is_silent = world == 1 or LAUNCH in os.environ
    after_s = FIRST_WAIT_S if local_rank == 0 else LATER_WAIT_S
    timer = threading.Timer(after_s, lambda: print(text, file=sys.stderr, flush=True))
    timer.daemon = True
    if not is_silent:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def die_with_launcher() -> None:
    """Ask Linux to kill this rank when the torchrun agent that started it dies.

    The agent gives each rank a session of its own, so nothing else would end a rank whose agent
    was killed, and it would go on writing the run.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or not sys.platform.startswith("linux"):
        return
    signal_at_parent_death(signal.SIGKILL)
    if os.getppid() != PARENT:  # the agent died before the call above
        os.kill(os.getpid(), signal.SIGKILL)


def choose_device(cluster: Cluster, local_rank: int, local_world: int) -> torch.device:
    """cuda:<local rank> or cpu, as the recipe and the machine allow.

    Raises UserError where CUDA is asked for and missing, where there are too few GPUs, and, with
    `auto`, where this torch cannot use a GPU that is there: nobody wants to train on the CPU
    beside an idle GPU.
    """
    if cluster.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        if count == 1:  # srun --gpus-per-task=1: each rank of a host sees another GPU as the first
            return torch.device("cuda", 0)
        if local_world > count:
            raise UserError(
                f"the host shows {counted(count, 'GPU')}, too few for its"
                f" {counted(local_world, 'rank')}; start at most {count} on it (NPROC={count}), or"
                " set cluster.device=cpu"
            )
        return torch.device("cuda", local_rank)
    seen = visible_gpus()
    if seen and torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"a GPU is visible ({seen[0]}) but torch {torch.__version__} is a CPU build; install a"
            " CUDA build of torch in this interpreter, choose another one with PYTHON=..., or set"
            " cluster.device=cpu to train on the CPU"
        )
    if cluster.device == "cuda":
        raise UserError(
            f"cluster.device=cuda but torch {torch.__version__} sees no CUDA device; check the"
            " driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or set cluster.device=cpu"
        )
    return torch.device("cpu")


def num_threads(cluster: Cluster, local_world: int) -> int:
    """Threads of this rank: the recipe's, else OMP_NUM_THREADS, else its share of the cores.

    Launchers set OMP_NUM_THREADS where the user has not.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if cluster.threads is None and chosen.isdecimal() and int(chosen):
        return int(chosen)
    return cluster.threads or max(1, usable() // local_world)


def first_does(action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0; returns its result there and None on other ranks.

    If it raises UserError, every rank raises it, so that no rank waits for rank 0.
    """
    result, problems = None, [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except UserError as error:
            problems = [error.problems]
    dist.broadcast_object_list(problems, src=0)
    if problems[0]:
        raise Shared(*problems[0])
    return result


def report(error: UserError) -> None:
    """Print an error that the user can correct, once and not on every rank.

    Before the ranks have joined, all ranks of a host usually find the same problem, and one of them
    prints it. Later a problem is either shared, and rank 0 prints it, or it belongs to one rank. A
    problem that should be shared, but that rank 0 does not report, is printed by another rank.
    """
    try:
        rank = launched_rank()
        local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", default=0)
        is_alone = launched_world() == 1
    except UserError:  # the launcher's variables are wrong: that is the error to report
        rank, local_rank, is_alone = 0, 0, True
    if isinstance(error, Shared):  # rank 0 prints it, if it has the same problem
        is_printed = _is_first_to_report(error, rank, SHARED_REPORT_S) or rank == 0
    else:
        is_printed = dist.is_initialized() or is_alone or _is_first_to_report(error, local_rank)
    if is_printed:
        where = f"rank {rank}: " if rank else ""
        for problem in error.problems:
            shown = redact(problem, secret_values(os.environ))
            print(f"refused: {where}{shown}", file=sys.stderr, flush=True)


def _is_first_to_report(error: UserError, local_rank: int, wait_s: float = FIRST_REPORTS_S) -> bool:
    """True where no other rank of this host reports the same text.

    The rank that reports takes a socket name, which the kernel frees when the rank ends. The first
    rank of a host reports at once, and the launcher ends the others when it ends. The others wait
    for both, and report only if they are still alive then: the problem is theirs alone.
    """
    if not sys.platform.startswith("linux"):
        return local_rank == 0
    words = hashlib.sha256(str(error).encode(errors="replace")).hexdigest()
    name = f"\0pretrain-{PARENT}-{words}"
    if local_rank > 0 and _is_reported_soon(name, wait_s):
        return False
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(name)
    except OSError:
        return False
    CLAIMS.append(claim)
    return True


def print_without_secrets(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Replacement for `sys.excepthook`: lines and messages of a traceback may hold secrets."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(redact(text, secret_values(os.environ)), file=sys.stderr, end="", flush=True)


def _is_reported_soon(name: str, wait_s: float) -> bool:
    """Wait for another rank to take the name, or for the launcher's SIGTERM to end this one."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    deadline = time.monotonic() + wait_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                probe.connect(name)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)


def finish() -> None:
    """Leave the process group; without it torchrun sometimes reports a failed exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(status: int) -> NoReturn:
    """End this process at once, without the interpreter's shutdown; all files are written by then.

    Threads of gloo outlive the process group as long as anything refers to it, as globals of
    DeepSpeed do. A thread that releases a tensor while the interpreter shuts down needs the
    interpreter's lock, is ended in the middle of C++ code, and the finished run aborts ("terminate
    called without an active exception").
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
            stream.flush()
    os._exit(status)


def _under_srun() -> bool:
    """True where srun started this process; the shell of a SLURM job has no SLURM_STEP_ID."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ


def _number(name: str, slurm_name: str | None, default: int) -> int:
    for known in (name, slurm_name if _under_srun() else None):
        if known and known in os.environ:
            text = os.environ[known]
            if not text.isdigit():
                raise UserError(f"{known}={text!r} in the environment is not a number; unset it")
            return int(text)
    return default


def _slurm_tasks_per_node() -> int:
    """SLURM_NTASKS_PER_NODE, or the first count of SLURM_TASKS_PER_NODE such as `8(x4)`."""
    text = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 1_000_000


def _export(
    rank: int, world: int, local_rank: int, local_world: int, port: int, device: torch.device
) -> None:
    """Set the variables that torch.distributed and DeepSpeed read, where the launcher has not."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world,
        "MASTER_ADDR": _slurm_first_host() if _under_srun() else "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in values.items():
        os.environ.setdefault(name, str(value))
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    else:
        os.environ["LOCAL_RANK"] = str(device.index)  # DeepSpeed takes it for the GPU
    have_home()
    builds.prepare()


def have_home() -> None:
    """Set HOME to a folder in .cache/ for a user without a home (HOME unset, no user name).

    Libraries would otherwise build into a folder named `~` in the working directory.
    """
    if not os.path.isabs(os.path.expanduser("~")):
        os.environ["HOME"] = str(CACHE / "home")


def _slurm_first_host() -> str:
    """First host of SLURM_STEP_NODELIST: `gpu[03-04,9]-ib` -> `gpu03-ib`."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "127.0.0.1")
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    prefix, first, suffix = found.groups(default="")
    return prefix + first + suffix
