"""Asks the installed DeepSpeed whether it accepts a resolved JSON, before any rank starts.

Importing DeepSpeed costs seconds, so it is asked in a process of its own, and an answer without
problems is remembered for (DeepSpeed version, JSON) in .cache/. `runtime.ds_config.keys` has
refused everything that is known to be wrong, without DeepSpeed; only what is wrong for the
installed version is found here. `python -m runtime.ds_config.confirm` reads a JSON from standard
input and prints a list of problems; exit status: 0 = none, 3 = some.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from base.errors import UserError
from base.paths import CACHE, ROOT
from base.values import did_you_mean

MEMO = CACHE / "engine_check.json"
PACKAGE = "deepspeed"
# Earlier versions average, clip or skip differently, without a message.
OLDEST = (0, 19, 8)
REMEMBERED = 200
# Any number is legal for these keys, so DeepSpeed is not asked again for another batch.
NOT_ASKED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
TIME_LIMIT_S = 600  # the imports alone, from a cold disk that many hosts share or on a busy machine
HAS_PROBLEMS = 3


def confirm(config: dict[str, Any], memo: Path = MEMO) -> None:
    """Raise UserError with every problem that DeepSpeed has with `config`."""
    version = installed_version()
    asked = {name: value for name, value in config.items() if name not in NOT_ASKED}
    key = hashlib.sha256(json.dumps([version, asked], sort_keys=True).encode()).hexdigest()
    passed = _read(memo)
    if key in passed:
        return
    problems = ask(config)
    if problems:
        raise UserError(*problems)
    _write(memo, [*passed, key][-REMEMBERED:])


def installed_version() -> str:
    """DeepSpeed's version. Raises UserError where it is missing or too old."""
    wanted = ".".join(map(str, OLDEST))
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{PACKAGE} is not installed; pip install '{PACKAGE}>={wanted}'") from None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < OLDEST:
        raise UserError(
            f"{PACKAGE} {version} is too old: earlier versions average, clip or skip differently;"
            f" pip install '{PACKAGE}>={wanted}'"
        )
    return version


def ask(config: dict[str, Any]) -> list[str]:
    """Problems that DeepSpeed has with `config`, one line each; asked in a process of its own."""
    command = [sys.executable, "-m", "runtime.ds_config.confirm"]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(config),
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [
            f"{PACKAGE} was not imported, and the JSON not checked, within {TIME_LIMIT_S} s: the"
            " disk that holds the interpreter does not answer, or the machine is overloaded"
        ]
    if done.returncode not in (0, HAS_PROBLEMS):
        tail = " ".join(done.stderr.strip().splitlines()[-1:])
        return [f"{PACKAGE} cannot be imported, or ended while checking the JSON: {tail}"]
    return json.loads(done.stdout.splitlines()[-1])


def check_with_deepspeed(config: dict[str, Any]) -> list[str]:
    """Problems that DeepSpeed's own classes find in `config`, one line each. Imports DeepSpeed."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from pydantic import ValidationError

    blocks = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
    }
    problems = []
    for name, cls in blocks.items():
        try:
            cls(**config.get(name, {}))
        except ValidationError as error:
            problems += [_line(name, cls, item) for item in error.errors()]
        except (TypeError, ValueError, AssertionError) as error:
            problems.append(f"{name}: DeepSpeed refuses it: {error}")
    if problems:
        return problems
    passes = config["gradient_accumulation_steps"]
    one_rank = config["train_micro_batch_size_per_gpu"] * passes
    try:
        # Outside a process group DeepSpeed counts one rank.
        DeepSpeedConfig({**config, "train_batch_size": one_rank})
    except (DeepSpeedConfigError, TypeError, ValueError, AssertionError) as error:
        problems.append(f"DeepSpeed refuses the JSON: {' '.join(str(error).split())}")
    return problems


def _line(block: str, cls: Any, item: dict[str, Any]) -> str:
    """One pydantic error as one line, with the nearest valid name for an unknown key."""
    path = ".".join([block, *(str(part) for part in item["loc"])])
    if item["type"] == "extra_forbidden":
        known = list(_fields(cls, block))
        return f"{path}: DeepSpeed has no such key{did_you_mean(path, known)}"
    return f"{path}={item['input']!r}: {item['msg']}"


def _fields(cls: Any, prefix: str):
    """Dotted names of the fields of a pydantic class and of the classes inside it."""
    for name, field in cls.model_fields.items():
        path = f"{prefix}.{field.alias or name}"
        yield path
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in inner:
            if hasattr(kind, "model_fields"):
                yield from _fields(kind, path)


def _read(memo: Path) -> list[str]:
    try:
        keys = json.loads(memo.read_text())
    except (OSError, ValueError):
        return []
    return keys if isinstance(keys, list) else []


def _write(memo: Path, keys: list[str]) -> None:
    """Replace the memo in one rename. Best effort: without the memo DeepSpeed is asked again."""
    fresh = memo.with_suffix(f".{os.getpid()}")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(keys))
        fresh.replace(memo)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()


def main() -> int:
    """Entry of `python -m runtime.ds_config.confirm`."""
    config = json.load(sys.stdin)
    # DeepSpeed logs to standard output: everything it prints goes to standard error.
    out = os.dup(1)
    os.dup2(2, 1)
    problems = check_with_deepspeed(config)
    with os.fdopen(out, "w") as answer:
        print(json.dumps(problems), file=answer)
    return HAS_PROBLEMS if problems else 0


if __name__ == "__main__":
    sys.exit(main())
