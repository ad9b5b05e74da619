"""Commands of a Markdown page, and commands that a program printed, for tests that walk a page.

Convention: a ```bash block holds one command a line, a ```console block is output. A block directly
below `<!-- not run: reason -->` is left out.
"""

from __future__ import annotations

import re
import shlex

BLOCK = re.compile(r"(<!-- not run: .+? -->\n+)?^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"']+)"""
PRINTED = re.compile(rf"\bmake [a-z]+(?:-[a-z]+)*(?: [A-Z_]+={VALUE})+|: (make [a-z-]+)$", re.M)
# A model that trains 200 steps in seconds, whatever the recipe.
SMALL = {
    "cluster": "laptop", "precision": "fp32", "compile": "false", "recompute": "none",
    "model.hidden_size": "32", "model.intermediate_size": "64", "model.num_hidden_layers": "4",
    "model.num_attention_heads": "4", "model.num_key_value_heads": "2", "seq_len": "32",
    "batch_tokens": "256", "micro_batch": "2", "eval_tokens": "1024",
}  # fmt: skip
SHORT = {"tokens": "null", "steps": "40", "eval_every": "20", "checkpoint.interval": "20"}


def commands_of(page: str) -> list[str]:
    """The commands of a page in their order, without comments behind them."""
    blocks = [text for not_run, text in BLOCK.findall(page) if not not_run]
    lines = [line.partition(" #")[0].strip() for text in blocks for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def printed_commands(output: str) -> list[str]:
    """The whole commands in an output, without those with a gap to fill (`TO=...`, `RANK=`)."""
    found = [match[1] or match[0] for match in PRINTED.finditer(output)]
    return [command.rstrip(".,;:)`") for command in found if "..." not in command]


def cpu_sized(command: str) -> list[str]:
    """The words of a command; a run that begins is made small, a comparison short."""
    words = shlex.split(command)
    given = dict(word.split("=", 1) for word in words[2:] if "=" in word)
    if words[:2] == ["make", "compare"] and "SWEEP" in given:
        return [*words, "REPEATS=1", f"STEPS={min(4, int(given['STEPS']))}"]
    recipe = given.get("RECIPE", "tiny")
    if words[:2] != ["make", "pretrain"] or recipe.endswith(".yaml"):
        return words
    small = SMALL | (SHORT if recipe != "tiny" else {})
    small |= {"stop_after": "20"} if given.get("NPROC", "1") != "1" else {}
    own = shlex.split(given.get("OVERRIDES", ""))
    own = [word for word in own if word.partition("=")[0] not in small]
    overrides = " ".join([*own, *(f"{knob}={value}" for knob, value in small.items())])
    return [*(word for word in words if not word.startswith("OVERRIDES=")),
            f"OVERRIDES={overrides}"]  # fmt: skip
