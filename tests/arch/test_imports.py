"""Who may import whom, and what may not be imported until it is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.arch.source import FILES, PACKAGE, ROOT, imports, is_in, name_of

LAYERS = (
    "checksums",
    "files",
    "types",
    "config",
    "dist",
    "losses",
    "engine",
    "data",
    "rollout",
    "reward",
    "checkpoint",
    "report",
    "terminal",
)

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "errors": (),
    "network": (),
    "checksums": (),
    "files": (),
    "terminal": (),
    "types": (),
    "config": ("files",),
    "dist": ("terminal",),
    "losses": ("types",),
    "engine": ("types", "network", "files"),
    "data": ("types",),
    "rollout": ("types", "network", "files"),
    "reward": ("types", "network", "checksums", "files"),
    "checkpoint": ("types", "dist.protocol", "dist.together", "checksums", "files"),
    "report": ("types", "dist.protocol", "checksums", "files", "terminal"),
    "training": (*LAYERS, "network"),
    "api": (*LAYERS, "training"),
    "cli": (*LAYERS, "training", "api"),
    "__main__": ("cli",),
    "": ("api", "losses"),  # valence/__init__.py names them, and loads them on first use
}
"""Part of the package -> the parts it may import, besides itself and ``errors``."""

HEAVY = (
    "plotly", "peft", "datasets", "gguf", "accelerate", "wandb", "vllm", "tensorboard", "pyarrow", "trackio", "mlflow",
    "bitsandbytes", "math_verify", "jsonschema", "vaderSentiment", "fastapi", "starlette", "uvicorn",
)  # fmt: skip
COME_WITH = {
    "pydantic_core": "pydantic",
    "jinja2": "torch",
    "pyarrow": "datasets",
    "numpy": "transformers",
    "triton": "torch",
    "huggingface_hub": "transformers",
    "regex": "transformers",
    "h11": "uvicorn",
    "starlette": "fastapi",
    "mlflow": "mlflow_skinny",
}
"""Imported without being declared -> the dependency that cannot work without it."""

ELSEWHERE = ("vllm",)
"""What only runs in an environment of its own imports, a server's plugin."""

PURE = ("torch", "annotated_types", "typing_extensions")


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return "__main__" if path.name == "__main__.py" else (name_of(path).split(".")[1:] or [""])[0]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    part = part_of(path)
    allowed = [f"valence.{name}" for name in (*MAY_IMPORT[part], "errors", *([part] if part else []))]
    allowed += ["valence.__version__"]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for line, name in imports(path)
        if is_in(name, "valence") and not any(is_in(name, prefix) for prefix in allowed)
    ]
    assert wrong == []


def test_the_rules_name_every_part() -> None:
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)


def test_losses_are_pure() -> None:
    """Tensors in, tensors out: nothing but torch and the words for bounds of settings."""
    outside = {
        name.split(".")[0]
        for path in FILES
        if part_of(path) == "losses"
        for _, name in imports(path)
        if not is_in(name, "valence")
    }
    assert outside - sys.stdlib_module_names <= set(PURE)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_libraries_that_only_some_runs_need_are_imported_where_used(path: Path) -> None:
    wrong = [f"{path}:{line}: {name}" for line, name in imports(path, top=True) if name.split(".")[0] in HEAVY]
    assert wrong == []


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    declared = {re.split(r"[\[<>=]", each)[0].replace("-", "_") for each in wanted} | {"ruamel"}
    used = {name.split(".")[0] for path in FILES for _, name in imports(path)} - sys.stdlib_module_names - {"valence"}
    assert used - declared == {*COME_WITH, *ELSEWHERE}
    assert set(COME_WITH.values()) <= declared


def test_the_oldest_versions_that_are_tried_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("gguf", "eightbit", "serve")
    allowed = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    tried = dict(line.split("==") for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if "==" in line)
    for name, version in (each.split(">=") for each in allowed):
        if name != "typing-extensions":  # of which others need a newer one
            assert f"{tried[name]}.".startswith(f"{version}."), name


def test_only_dist_speaks_to_other_processes() -> None:
    users = [path for path in FILES for _, name in imports(path) if is_in(name, "torch.distributed")]
    # A server that is sent weights is no process of the run.
    assert [path.name for path in users if part_of(path) != "dist"] == ["vllm_plugin.py"]


def modules_after(code: str) -> set[str]:
    """The modules that are loaded once this code has run in a process of its own."""
    return set(run_code(code).rpartition("LOADED ")[2].split())


def run_code(code: str) -> str:
    """What this code prints in a process of its own, and after that the word LOADED and the names of all loaded modules."""
    shown = f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\nprint('LOADED', *sys.modules)"
    return subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.parametrize("code", [
    "import valence",
    "import valence.config.load",
    "import valence.losses; [loss.settings for loss in valence.losses.LOSSES.values()]",
    "from valence.training.methods import METHODS, ONLINE; [m.settings for m in (*METHODS.values(), *ONLINE.values())]",
    "import valence.types, valence.errors",
    "import valence.cli; sys.argv = ['valence', '--help']; valence.cli.main()",
    "import valence.cli; sys.argv = ['valence', 'train', '--help']; valence.cli.main()",
])  # fmt: skip
def test_what_needs_no_tensors_waits_for_no_torch(code: str) -> None:
    loaded = modules_after(code)
    assert "valence" in loaded
    assert not loaded & {"torch", "transformers", *HEAVY}


@pytest.mark.parametrize("words", [
    "train recipe.yaml", "resume .", "evaluate .", "score recipe.yaml", "sample . --prompt so", "export . model"
])  # fmt: skip
def test_who_only_starts_processes_waits_for_no_torch(words: str, tmp_path: Path) -> None:
    write_recipe(tmp_path)
    place = f"import os, valence.cli; from valence.dist import launch; os.chdir({str(tmp_path)!r}); "
    noted = "launch.launch = lambda *_: len(sys.modules.setdefault('launched', sys).argv) and 0; "
    loaded = modules_after(f"{place}{noted}sys.argv = {['valence', *words.split(), '--nproc', '2']}; valence.cli.main()")
    assert "launched" in loaded
    assert not loaded & {"torch", "transformers", *HEAVY}


def write_recipe(folder: Path, **changes: Any) -> None:
    """A recipe, also as a run's own, with its file of rows."""
    recipe = {"method": "kto", "model": {"name": "tiny"}, "data": {"train": "rows.jsonl"}} | changes
    for name in ("recipe.yaml", "config.yaml"):
        (folder / name).write_text(json.dumps(recipe))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')


MISTAKES = {
    "an unknown setting": {"train": {"learning_rte": 1e-5}},
    "a wrong type": {"train": {"batch_size": "many"}},
    "a wrong method": {"method": "kot"},
    "an unknown setting of the loss": {"loss": {"betta": 0.1}},
    "a wrong value of the loss": {"loss": {"beta": -1}},
    "an unknown setting of an online method": {"method": "grpo", "reward": "exact_match", "loss": {"epsilon": 0.1}},
    "a wrong combination": {"method": "dpo", "data": {"train": "rows.jsonl", "stratify": True}},
    "a missing file": {"data": {"train": "row.jsonl"}},
}


@pytest.mark.parametrize("changes", MISTAKES.values(), ids=MISTAKES)
@pytest.mark.parametrize("command", ["check recipe.yaml", "train recipe.yaml", "train recipe.yaml --json", "resume ."])
def test_a_mistake_in_a_recipe_is_reported_without_torch(command: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_recipe(tmp_path, **changes)
    words = f"import os, time, valence.cli; os.chdir({str(tmp_path)!r}); sys.argv = {['valence', *command.split()]}"
    measured = "sys.modules[f'CPU={time.process_time()}'] = sys"
    code = f"{words}\n    try:\n        valence.cli.main()\n    finally:\n        {measured}; print('STATUS', sys.exc_info()[1])"
    done = run_code(code)
    assert "STATUS 2" in done
    loaded = set(done.rpartition("LOADED ")[2].split())
    assert not loaded & {"torch", "transformers", "numpy", *HEAVY}
    (cpu,) = (float(name.removeprefix("CPU=")) for name in loaded if name.startswith("CPU="))
    assert cpu < 3  # seconds; 0.4 on an idle machine, and imports of torch and transformers take 5


def test_a_run_without_adapter_or_report_loads_no_library_for_them() -> None:
    loaded = modules_after("import valence.api")
    assert "torch" in loaded
    assert not loaded & set(HEAVY) - {"accelerate"}  # which transformers loads where it is installed


def test_the_package_is_where_the_tests_look() -> None:
    import valence

    assert valence.__file__ is not None
    assert Path(valence.__file__).parent == PACKAGE
