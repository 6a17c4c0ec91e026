"""Who may import whom, and what may not be imported until it is needed."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.arch.source import FILES, PACKAGE, ROOT, imports, is_in, name_of, shown, tree
from valence import cli

LAYERS = (
    "options",
    "version",
    "statistics",
    "storage",
    "files",
    "types",
    "config",
    "batching",
    "distributed",
    "losses",
    "user_code",
    "methods",
    "models",
    "data",
    "rollouts",
    "rewards",
    "reports",
    "targets",
    "terminal",
)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "network": (),
    "shipped": (),
    "completion": ("config", "methods", "data.importers.sources", "rewards", "shipped"),
    "options": ("completion",),
    "statistics": (),
    "storage": ("files",),
    "files": (),
    "terminal": (),
    "types": (),
    "config": ("types", "files", "network", "methods", "user_code", "data.sources"),
    "batching": ("types",),
    "distributed": ("terminal",),
    "losses": ("types",),
    "user_code": (),
    "methods": ("types", "losses", "user_code", "data.kind_names"),
    "models": ("types", "network", "files", "storage", "version"),
    "data": ("types", "user_code", "files", "storage", "network", "statistics"),
    "rollouts": ("types", "network", "files", "storage", "user_code"),
    "rewards": ("types", "user_code", "network", "files", "storage", "version"),
    "reports": (
        "types",
        "user_code",
        "distributed.process_group",
        "statistics",
        "storage",
        "files",
        "network",
        "terminal",
    ),
    "targets": (
        "types",
        "config",
        "user_code",
        "methods",
        "data",
        "models",
        "distributed",
        "reports",
        "storage",
    ),
    "evaluation": (
        "user_code",
        "statistics",
        "storage",
        "files",
        "types",
        "data",
        "rewards",
        "reports",
    ),
    "training": (*LAYERS, "evaluation"),
    "jobs": (*LAYERS, "network", "evaluation", "training"),
    "apps": (),
    "apps.feedback": (*LAYERS, "network", "training", "jobs"),
    "apps.compare": (*LAYERS, "network", "evaluation", "training", "jobs"),
    "apps.serve": (*LAYERS, "network", "training", "jobs", "apps.feedback"),
    "apps.export": ("types", "files", "storage", "data", "rollouts"),
    "apps.sweep": (*LAYERS, "training"),
    "api": (*LAYERS, "training"),
    "cli": (
        *LAYERS,
        "network",
        "training",
        "jobs",
        "apps",
        "api",
        "shipped",
        "completion",
    ),
    "__main__": ("cli",),
    "version": (),
    # valence/__init__.py names them, and loads them on first use
    "": ("api", "losses", "version", "types", "data.importers.records"),
}
"""Part of the package -> the parts it may import, besides itself and ``errors``."""

LEAVES = {
    "valence.errors": (),
    "valence.types": (),
    "valence.data.convert": ("valence.errors", "valence.types"),
    "valence.data.split": ("valence.errors", "valence.types"),
    "valence.config.schema": (
        "valence.errors",
        "valence.types",
        "valence.data.convert",
        "valence.data.split",
        "valence.user_code.plugins",
    ),
}
"""Modules that any module may import -> the modules of the package that they import, at most."""

HEAVY = (
    "plotly",
    "peft",
    "datasets",
    "gguf",
    "accelerate",
    "wandb",
    "vllm",
    "tensorboard",
    "pyarrow",
    "trackio",
    "mlflow",
    "bitsandbytes",
    "math_verify",
    "jsonschema",
    "vaderSentiment",
    "fastapi",
    "starlette",
    "uvicorn",
    "optuna",
    "lm_eval",
)
COME_WITH = {
    "pydantic_core": "pydantic",
    "markupsafe": "jinja2",
    "pyarrow": "datasets",
    "numpy": "transformers",
    "triton": "torch",
    "huggingface_hub": "transformers",
    "yaml": "transformers",
    "regex": "transformers",
    "h11": "uvicorn",
    "starlette": "fastapi",
    "mlflow": "mlflow_skinny",
}
"""Imported without being declared -> the dependency that cannot work without it."""

ELSEWHERE = ("vllm",)
"""Imports of code that only runs in a separate environment: a server's plugin."""

PURE = ("torch", "annotated_types", "typing_extensions")


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    if path.name == "__main__.py":
        return "__main__"
    names = name_of(path).split(".")[1:] or [""]
    return ".".join(names[: 2 if names[0] == "apps" else 1])


def test_imports_go_down_only() -> None:
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)
    wrong: list[str] = []
    for path in FILES:
        part = part_of(path)
        allowed = [
            *LEAVES,
            *(
                f"valence.{name}"
                for name in (*MAY_IMPORT[part], "errors", *([part] if part else []))
            ),
        ]
        wrong += [
            f"{shown(path)}:{line}: {name}"
            for line, name in imports(path)
            if is_in(name, "valence") and not any(is_in(name, prefix) for prefix in allowed)
        ]
    assert wrong == []


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    results: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = lowest[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            results.extend([sorted(group)] if len(group) > 1 else [])

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return results


def module_graph() -> dict[str, set[str]]:
    """The modules that each module imports, also inside functions and for type checkers only."""
    modules = {name_of(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        names = [name for _, name in imports(path)]
        targets = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[name_of(path)] = (targets & modules) - {name_of(path)}
    return graph


def test_cycles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert sorted(cycles(graph)) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_modules_import_each_other() -> None:
    graph = module_graph()
    assert len(graph) > 100
    assert cycles(graph) == []


def test_no_packages_import_each_other() -> None:
    """valence/__init__.py names the public objects, and any package may import the leaves;
    everything else belongs to a package.
    """
    package = {
        name_of(path): name_of(path) if name_of(path) in LEAVES else f"valence.{part_of(path)}"
        for path in FILES
    }
    graph: dict[str, set[str]] = {name: set() for name in package.values()}
    for name, targets in module_graph().items():
        graph[package[name]] |= {package[t] for t in targets} - {package[name]}
    assert cycles(graph) == []


def test_leaves_import_leaves_only() -> None:
    graph = module_graph()
    assert {name for name in LEAVES if graph[name] - set(LEAVES[name])} == set()


def test_losses_are_pure() -> None:
    """Tensors in, tensors out: nothing but torch and the words for bounds of settings."""
    allowed = {"valence", *PURE, *sys.stdlib_module_names}
    losses = [path for path in FILES if part_of(path) == "losses"]
    assert losses
    assert [
        f"{shown(path)}:{line}: {name}"
        for path in losses
        for line, name in imports(path)
        if name.split(".")[0] not in allowed
    ] == []  # fmt: skip


def test_libraries_that_only_some_runs_need_are_imported_where_used() -> None:
    assert [
        f"{shown(path)}:{line}: {name}"
        for path in FILES
        for line, name in imports(path, top=True)
        if name.split(".")[0] in HEAVY
    ] == []  # fmt: skip


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    declared = {re.split(r"[\[<>=]", item)[0].replace("-", "_") for item in wanted} | {"ruamel"}
    used = (
        {name.split(".")[0] for path in FILES for _, name in imports(path)}
        - sys.stdlib_module_names
        - {"valence"}
    )
    assert used - declared == {*COME_WITH, *ELSEWHERE}
    assert set(COME_WITH.values()) <= declared


def test_the_oldest_versions_that_are_tried_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("gguf", "eightbit", "serve")
    allowed = [
        *project["dependencies"],
        *(item for extra in extras for item in project["optional-dependencies"][extra]),
    ]
    tried = dict(
        line.split("==")
        for line in (ROOT / "constraints-oldest.txt").read_text().splitlines()
        if "==" in line
    )
    for name, version in (item.split(">=") for item in allowed):
        if name != "typing-extensions":  # of which others need a newer one
            assert f"{tried[name]}.".startswith(f"{version}."), name


def test_only_dist_speaks_to_other_processes() -> None:
    users = [
        f"{shown(path)}:{line}"
        for path in FILES
        if part_of(path) != "distributed"
        for line, name in imports(path)
        if is_in(name, "torch.distributed")
    ]
    # A server that is sent weights is no process of the run.
    assert [
        place for place in users if not place.startswith("valence/rollouts/vllm_plugin.py:")
    ] == []


STATEMENTS = (
    "import valence",
    "import valence.config.load",
    "import valence.losses; [loss.settings for loss in valence.losses.LOSSES.values()]",
    "from valence.methods import METHODS, ONLINE; [m.settings for m in "
    "(*METHODS.values(), *ONLINE.values())]",
    "import valence.types, valence.errors",
)
"""What needs no tensors."""
HELP = ("--help", "train --help")
STARTING = (
    "train recipe.yaml",
    "train .",
    "evaluate .",
    "score recipe.yaml",
    "sample . --prompt so",
    "export . model",
)
"""Commands that with --nproc only start processes."""
READING = (
    "check recipe.yaml",
    "train recipe.yaml",
    "train recipe.yaml --json",
    "train .",
    "sweep recipe.yaml --over train.epochs=1,2 --out sweep",
)
"""Commands that a mistake in the recipe ends."""
MISTAKES: dict[str, dict[str, Any]] = {
    "an unknown setting": {"train": {"learning_rte": 1e-5}},
    "a wrong type": {"train": {"batch_size": "many"}},
    "a wrong method": {"method": "kot"},
    "an unknown setting of the loss": {"loss": {"betta": 0.1}},
    "a wrong value of the loss": {"loss": {"beta": -1}},
    "an unknown setting of an online method": {
        "method": "grpo",
        "reward": "exact_match",
        "loss": {"epsilon": 0.1},
    },
    "a wrong combination": {"method": "dpo", "data": {"train": "rows.jsonl", "stratify": True}},
    "a missing file": {"data": {"train": "row.jsonl"}},
}
RUN_IN_TURN = """
import json, os, sys
found, folder = [], sys.argv[1]
with open(f"{folder}/cases.json") as file:
    cases = json.load(file)

def loaded(forbidden):
    return sorted(forbidden & sys.modules.keys())

for case in cases:
    status, launched = None, []
    os.chdir(case["folder"])
    try:
        if "statement" in case:
            exec(case["statement"], {})
        else:
            import valence.cli
            from valence.distributed import launcher
            launcher.launch = lambda *_: launched.append(True) or 0
            sys.argv = ["valence", *case["words"].split()]
            valence.cli.main()
    except SystemExit as error:
        status = error.code
    found.append([status, bool(launched), loaded(set(case["forbidden"]))])
with open(f"{folder}/found.json", "w") as file:
    json.dump(found, file)
"""
"""Runs statements and commands in one process, one after the other, and writes to a file how each
ended (its exit status, and whether it would have started processes) and which forbidden modules are
loaded by then.
"""


def write_recipe(folder: Path, **changes: Any) -> None:
    """A recipe, also as a run's own, with its file of rows."""
    recipe = {"method": "kto", "model": {"name": "tiny"}, "data": {"train": "rows.jsonl"}} | changes
    folder.mkdir()
    for name in ("recipe.yaml", "config.yaml"):
        (folder / name).write_text(json.dumps(recipe))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')


def test_what_needs_no_tensors_loads_no_torch(tmp_path: Path) -> None:
    """A mistake in a recipe is reported, and processes are started, without waiting for libraries
    to load.
    """
    write_recipe(tmp_path / "right")
    for name, changes in MISTAKES.items():
        write_recipe(tmp_path / name, **changes)
    torch_free = ["torch", "transformers", *HEAVY]
    strict = [*torch_free, "numpy"]
    here = str(tmp_path / "right")
    cases: list[dict[str, Any]] = [
        {"statement": code, "folder": here, "ends": [None, False], "forbidden": torch_free}
        for code in STATEMENTS
    ]
    cases += [
        {"words": words, "folder": here, "ends": [0, False], "forbidden": torch_free}
        for words in HELP
    ]
    cases += [
        {"words": words, "folder": str(tmp_path / name), "ends": [2, False], "forbidden": strict}
        for name in MISTAKES
        for words in READING
    ]
    cases += [
        {"words": f"{words} --nproc 2", "folder": here, "ends": [0, True], "forbidden": torch_free}
        for words in STARTING
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_python(RUN_IN_TURN, str(tmp_path))
    result = json.loads((tmp_path / "found.json").read_text())
    wrong = [
        (case.get("statement", case.get("words")), Path(case["folder"]).name, ends, modules)
        for case, (*ends, modules) in zip(cases, result, strict=True)
        if ends != case["ends"] or modules
    ]
    assert wrong == []


def run_python(code: str, *arguments: str) -> str:
    """The output of this code in a separate process."""
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_without_adapter_or_report_loads_no_library_for_them() -> None:
    loaded = set(run_python("import sys, valence.api; print(*sys.modules)").split())
    assert "torch" in loaded
    # which transformers loads where it is installed
    assert not loaded & set(HEAVY) - {"accelerate"}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no expandable segments")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "expandable_segments:True None"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64 None"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "None max_split_size_mb:64"),
    ],
)
def test_memory_of_a_device_is_in_segments_that_can_grow_unless_set_otherwise(
    variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in cli.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    names = "'PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF'"
    code = (
        f"import atexit, os, sys; atexit.register(lambda: print(*map(os.environ.get, ({names}))))"
    )
    printed = run_python(
        f"{code}; from valence import cli; sys.argv = ['valence', '--version']\ncli.main()"
    )
    assert printed.splitlines()[-1] == expected


def test_importing_valence_changes_no_variable_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM", *cli.ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    code = (
        "import os; before = dict(os.environ); import valence; valence.train; valence.LOSSES; "
        "print({name for name, value in os.environ.items() if before.get(name) != value})"
    )
    # PyTorch sets this one.
    assert run_python(code).strip() in ("set()", "{'TORCHINDUCTOR_CACHE_DIR'}")


def test_the_package_is_where_the_tests_look() -> None:
    assert valence.__file__ is not None
    assert Path(valence.__file__).parent == PACKAGE


def test_public_classes_have_names_of_their_own() -> None:
    names = [
        node.name
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(names) > 100
    assert [name for name, count in Counter(names).items() if count > 1] == []
