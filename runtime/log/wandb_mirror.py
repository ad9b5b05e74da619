"""Weights & Biases as a mirror of TensorBoard's event files (`log.wandb=<project>`).

Rule: this project gives W&B no key and stores none; the user logs in with `wandb login` or
WANDB_API_KEY. W&B shows what it reads from the event files (`sync_tensorboard`). Each attempt is
one W&B run, grouped by the run's name. A new run that cannot be mirrored is refused; later a
service that fails costs the mirror and never the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from base.errors import UserError


def require_wandb(project: str) -> None:
    """Raise UserError unless wandb is installed. Imports nothing, so it can run before any rank."""
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"log.wandb={project}: the package wandb is not installed; "
            "`pip install wandb`, or log.wandb=null (TensorBoard has the same numbers)"
        )


class Mirror:
    """A W&B run that follows the event files of one attempt. Make it before they are opened."""

    def __init__(
        self, project: str, folder: Path, segment: int, attempt: int, log: Callable[[str], None]
    ):
        require_wandb(project)
        import wandb

        self._project, self._log = project, log
        self._run, self._troubles = None, (wandb.Error, OSError, RuntimeError)
        try:
            self._run = wandb.init(
                project=project,
                name=f"{folder.name}-attempt-{attempt}",
                group=folder.name,
                dir=str(folder),
                sync_tensorboard=True,
            )
        except self._troubles as problem:
            if attempt > 1:
                self._go_on_without(problem)
                return
            raise UserError(
                f"log.wandb={project}: wandb refused ({problem}); `wandb login`, "
                "WANDB_MODE=offline, or log.wandb=null"
            ) from None
        # wandb patches this class to learn which folder to follow. Our event files are written
        # without the class, so one empty file that it makes announces the folder.
        from tensorboard.summary.writer import event_file_writer

        from runtime.log.event_files import segment_folder

        event_file_writer.EventFileWriter(str(segment_folder(folder, segment))).close()

    def describe(self, hyper_parameters: Mapping[str, Any]) -> None:
        """Show the hyper-parameters as the W&B run's config."""
        self._do(lambda run: run.config.update(dict(hyper_parameters)))

    def close(self) -> None:
        """Wait until W&B has read what was written."""
        self._do(lambda run: run.finish())

    def _do(self, action: Callable[[Any], Any]) -> None:
        if self._run is not None:
            try:
                action(self._run)
            except self._troubles as problem:
                self._go_on_without(problem)

    def _go_on_without(self, problem: Exception) -> None:
        self._run = None
        self._log(f"warning: log.wandb={self._project}: {problem}; going on without the mirror")
