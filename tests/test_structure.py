"""The shape of the repository: who imports whom, how long things are, a README that is true."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

from ranks import ROOT

PACKAGES = ("recipes", "model", "parallel", "data", "checkpoint", "runtime", "launch", "compare")

# package -> what its modules may import of ours, besides itself. A name with a dot is one module.
ARROWS = {
    "recipes": (),
    "model": (),
    "parallel": ("model", "recipes.schema"),
    "data": ("recipes.schema", "recipes.cores", "recipes.tail"),
    "checkpoint": (
        "parallel", "model", "data", "recipes.schema", "recipes.exits", "recipes.command",
    ),
    "runtime": (
        "parallel", "model", "checkpoint", "recipes.schema", "recipes.exits", "recipes.redaction",
        "recipes.cores", "recipes.tail",
    ),
    "launch": ("recipes.schema", "recipes.exits", "recipes.redaction", "recipes.cores"),
}  # fmt: skip

MOST_LINES, MOST_FUNCTION_LINES = 500, 100


def sources() -> list[Path]:
    folders = [ROOT / name for name in (*PACKAGES, "benchmarks", "tests")]
    return [ROOT / "pretrain.py", *(path for f in folders for path in sorted(f.rglob("*.py")))]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Full names of everything a file imports, wherever in it."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{name.name}" for name in node.names))
    return tuple(found)


@functools.cache
def verbs() -> dict[str, str]:
    """Verb of the Makefile -> module it runs, where it runs one of ours."""
    found = {}
    for verb, recipe in re.findall(
        r"^([a-z-]+):.*?## .*?\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    ):
        module = re.search(r"-m ([\w.]+)", recipe)
        if module:
            found[verb] = module.group(1)
    return found


def is_under(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def test_imports_follow_the_arrows():
    entries = set(verbs().values())
    wrong = []
    for path in sources():
        package = path.relative_to(ROOT).parts[0]
        if package not in ARROWS or module_name(path) in entries:
            continue
        allowed = (*ARROWS[package], package)
        for name in imports(path):
            if name.split(".")[0] in PACKAGES and not any(is_under(name, a) for a in allowed):
                if name in ARROWS[package] or any(a.startswith(f"{name}.") for a in allowed):
                    continue  # `import recipes` on the way to recipes.schema
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_nobody_imports_a_module_behind_a_verb_that_reaches_up():
    """A module may do more than its package only because nothing depends on it."""
    free = {
        module_name(path)
        for path in sources()
        if module_name(path) in set(verbs().values())
        and any(
            name.split(".")[0] in PACKAGES
            and not any(
                is_under(name, a)
                for a in (
                    *ARROWS.get(module_name(path).split(".")[0], ()),
                    module_name(path).split(".")[0],
                )
            )
            for name in imports(path)
        )
    }
    assert {"launch.local", "recipes.show"} <= free
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        for name in imports(path)
        if name in free
    ]
    assert not wrong


def test_libraries_stay_behind_the_files_that_know_them():
    homes = {
        "deepspeed": r"runtime/engine\w*\.py|parallel/pipeline\.py|checkpoint/fragments\.py",
        "hydra": r"recipes/compose\.py",
        "omegaconf": r"recipes/compose\.py",
    }
    wrong = []
    for path in sources():
        shown = str(path.relative_to(ROOT))
        if shown.startswith(("tests/", "benchmarks/")):
            continue
        for name in imports(path):
            library = name.split(".")[0]
            if library in homes and not re.fullmatch(homes[library], shown):
                wrong.append(f"{shown} imports {name}")
            if library == "torch" and shown.startswith(("data/", "launch/", "recipes/")):
                wrong.append(f"{shown} imports {name}")
    assert not wrong


def test_the_environment_is_read_only_at_the_edges():
    wrong = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.relative_to(ROOT).parts[0]
        not in ("pretrain.py", "launch", "runtime", "tests", "benchmarks")
        and re.search(r"os\.environ|os\.getenv", path.read_text())
    ]
    assert not wrong


def test_the_launcher_starts_without_torch():
    code = "import sys, launch.local, recipes.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_run_chooses_its_device_before_deepspeed_does():
    """DeepSpeed takes the GPU of a host at its first import, whatever the recipe says later."""
    code = "import sys, pretrain; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_files_and_functions_stay_short():
    files, functions = [], []
    for path in sources():
        text = path.read_text()
        files.append((len(text.splitlines()), str(path.relative_to(ROOT))))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                functions.append((length, f"{path.relative_to(ROOT)}:{node.name}"))
    for kind, found in (("file", files), ("function", functions)):
        print(f"longest {kind}s:", *(f"{name} {n}" for n, name in sorted(found)[-5:]))
    assert max(files) <= (MOST_LINES, "~")
    assert max(functions) <= (MOST_FUNCTION_LINES, "~")


def test_the_readme_maps_every_file():
    readme = (ROOT / "README.md").read_text()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    tops = {name.split("/")[0] for name in listed if name} - {".gitignore", ".ci", "README.md"}
    missing = [top for top in sorted(tops) if top not in readme]
    missing += [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.parent.name in PACKAGES
        and path.name != "__init__.py"
        and f"`{path.name}`" not in readme
    ]
    assert not missing
    mapped = re.findall(r"`(\w+\.py)`", readme)
    names = {path.name for path in sources()}
    assert not [name for name in mapped if name not in names]


def test_the_readme_table_of_verbs_is_the_makefiles():
    readme = (ROOT / "README.md").read_text()
    table = dict(re.findall(r"^\| `make ([a-z-]+)[^`]*` \| `([\w.]+)` \|", readme, re.MULTILINE))
    assert table == verbs()


def test_no_text_points_outside_the_project():
    wrong = [
        str(path.relative_to(ROOT))
        for path in [*sources(), ROOT / "README.md", ROOT / "Makefile"]
        if re.search(r"shared/(design|cases|prototypes)", path.read_text())
        and path.name != "test_structure.py"
    ]
    assert not wrong
