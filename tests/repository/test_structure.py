"""Rules of the repository: imports, lengths, places of tests, and the maps in README and rooms."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

from ranks import ROOT
from source_tree import PACKAGES, commands_of_make, imports, module_name, sources

MOST_LINES, MOST_FUNCTION_LINES = 500, 100
MOST_COMPLEXITY = 20
ENTRY_LINES, LOOP_LINES, LOOP_COMPLEXITY = 350, 60, 15  # of pretrain.py


MOST_FILES = 20  # in a folder; commands/ has one for each command, tests/ mirrors the rooms
# Commands whose work is a tool's, or a benchmark's: they have no file in commands/.
TOOLS = {"test", "lint", "format", "bench", "matrix", "crash", "chaos"}


def test_every_room_imports_only_from_rooms_before_it():
    wrong = []
    for path in sources():
        room = path.relative_to(ROOT).parts[0]
        if room not in PACKAGES:
            continue
        allowed = PACKAGES[: PACKAGES.index(room) + 1]
        for name in imports(path):
            first = name.split(".")[0]
            if first in (*PACKAGES, "benchmarks", "tests", "pretrain") and first not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_a_command_is_one_file_that_nobody_imports():
    expected = {
        command: f"commands.{command.replace('-', '_')}"
        for command in commands_of_make()
        if command not in TOOLS
    }
    assert {command: commands_of_make()[command] for command in expected} == expected
    files = {path.stem for path in (ROOT / "commands").glob("*.py")} - {"__init__"}
    assert files == {name.removeprefix("commands.") for name in expected.values()}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        for name in imports(path)
        if name.startswith("commands.") and name != module_name(path)
    ]
    assert not wrong


def test_a_folder_holds_few_files_and_a_file_name_stands_for_one_thing():
    folders: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for path in sources():
        shown = path.relative_to(ROOT)
        if shown.parts[0] not in PACKAGES or shown.parts[0] == "commands":
            continue
        if path.name == "__init__.py":
            continue
        folders.setdefault(str(shown.parent), []).append(path.name)
        names.setdefault(path.name, []).append(str(shown))
    assert not {name: len(files) for name, files in folders.items() if len(files) > MOST_FILES}
    assert not [places for places in names.values() if len(places) > 1]


def test_tests_stand_where_what_they_test_stands():
    """Tests are tests/<room>/test_<module>.py or test_<module>_<part>.py, except whole runs."""
    wrong = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        folder = path.parent.relative_to(ROOT / "tests")
        if folder.parts[0] in ("whole_runs", "repository", "benchmarks"):
            continue
        stem = path.stem.removeprefix("test_")
        modules = [file.stem for file in (ROOT / folder).glob("*.py")]
        if not any(stem == name or stem.startswith(f"{name}_") for name in modules):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


def test_libraries_stay_behind_the_files_that_know_them():
    homes = {
        "deepspeed": r"runtime/engine/\w+\.py|runtime/ds_config/confirm\.py|parallel/pipeline\.py"
        r"|checkpoint/fragments\.py",
        "hydra": r"recipes/(compose|overrides)\.py",
        "omegaconf": r"recipes/(compose|interpolation)\.py",
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
        not in ("pretrain.py", "launch", "runtime", "record", "commands", "tests", "benchmarks")
        and re.search(r"os\.environ|os\.getenv", path.read_text())
    ]
    assert not wrong


def test_the_launcher_starts_without_torch():
    code = "import sys, commands.pretrain, commands.show; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_run_chooses_its_device_before_deepspeed_does():
    """DeepSpeed takes a GPU at its first import, even where the recipe chooses the CPU."""
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


def test_the_readme_maps_every_room_and_each_room_its_files():
    readme = (ROOT / "README.md").read_text()
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    tops = {name.split("/")[0] for name in listed if name} - {".gitignore", ".ci", "README.md"}
    assert not [top for top in sorted(tops) if top not in readme]
    missing = []
    for path in sources():
        folder = path.parent.relative_to(ROOT)
        if folder.parts and folder.parts[0] in PACKAGES and path.name != "__init__.py":
            described = (
                ast.get_docstring(ast.parse((path.parent / "__init__.py").read_text())) or ""
            )
            if path.name not in described:
                missing.append(str(path.relative_to(ROOT)))
    assert not missing


def test_the_table_of_commands_is_the_makefiles():
    page = (ROOT / "docs" / "commands.md").read_text()
    table = dict(re.findall(r"^\| `make ([a-z-]+)[^`]*` \| `([\w.]+)` \|", page, re.MULTILINE))
    assert table == commands_of_make()


def test_no_text_points_outside_the_project():
    wrong = [
        str(path.relative_to(ROOT))
        for path in [*sources(), ROOT / "README.md", ROOT / "Makefile"]
        if re.search(r"shared/(design|cases|prototypes)", path.read_text())
        and path.name != "test_structure.py"
    ]
    assert not wrong


def test_the_loop_fits_one_screen_and_no_function_branches_too_much():
    """Complexity as McCabe counts it: one more than the branches of a function."""
    functions = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.parse((ROOT / "pretrain.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert functions["loop"] <= LOOP_LINES
    assert len((ROOT / "pretrain.py").read_text().splitlines()) <= ENTRY_LINES
    for most, paths in ((LOOP_COMPLEXITY, ["pretrain.py"]), (MOST_COMPLEXITY, ["."])):
        command = [sys.executable, "-m", "ruff", "check", "--select", "C901", "--quiet"]
        command += ["--output-format", "concise", "--no-cache"]
        command += ["--config", f"lint.mccabe.max-complexity={most}", *paths]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("", "")


def test_no_two_modules_of_the_runtime_import_each_other():
    """Also not inside of functions."""
    graph = {}
    for path in sources():
        if path.relative_to(ROOT).parts[0] in ("runtime", "pretrain.py"):
            graph[module_name(path)] = set(imports(path))
    circles = [
        f"{one} <-> {other}"
        for one, found in graph.items()
        for other in found & graph.keys()
        if one < other and one in graph[other]
    ]
    assert not circles


def test_what_many_need_is_spelt_once():
    """Names of our environment variables, and the call that ties a process to its parent."""
    homes = {
        "PRETRAIN_[A-Z]+": "base/run_variables.py",
        r"PR_SET_PDEATHSIG\s*=|prctl\(1,": "base/parent_death.py",
        r"O_DIRECTORY|def sync_folder": "base/durable.py",
        r"^\w*(GIB|MIB)\b[^=]* = (2 ?\*\*|1 <<)": "base/units.py",
    }
    wrong = [
        f"{path.relative_to(ROOT)}: {found.group()}"
        for path in sources()
        if path.relative_to(ROOT).parts[0] not in ("tests", "benchmarks")
        for pattern, home in homes.items()
        if str(path.relative_to(ROOT)) != home
        for found in re.finditer(pattern, path.read_text(), re.MULTILINE)
    ]
    assert not wrong


# Files of a corpus, which its manifest holds by the hash of the whole.
CORPUS_LINES = {"data/text/publish.py", "data/text/unit.py", "data/text/ingest.py"}
# What a process writes to another one, through a pipe.
PIPED_LINES = {"launch/hosts/agent.py", "launch/hosts/cluster.py", "launch/hosts/carriers.py"}
# A file of one object, replaced as a whole.
OBJECTS = {"checkpoint/format/epochs.py", "record/requests.py", "record/failure.py"}


def test_one_file_writes_the_lines_of_a_run():
    """No other module turns an object into a line of JSON, but where it is not a run's file."""
    wrong = []
    for path in sources():
        shown = str(path.relative_to(ROOT))
        is_other = shown in CORPUS_LINES | PIPED_LINES | OBJECTS | {"base/jsonl.py"}
        if is_other or shown.startswith(("tests/", "benchmarks/")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
                continue
            text = ast.unparse(node)
            if re.search(r"json\.dumps\(.*\+ '\\n'", text) and "indent" not in text:
                wrong.append(f"{shown}:{node.lineno} {text}")
    assert not wrong


def test_a_public_class_name_stands_for_one_thing():
    places: dict[str, list[str]] = {}
    for path in sources():
        if path.relative_to(ROOT).parts[0] in PACKAGES:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: files for name, files in places.items() if len(files) > 1}


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 220
