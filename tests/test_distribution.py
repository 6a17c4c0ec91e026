"""The name of the installed package, and its dependencies without extras."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.arch.source import FILES, ROOT
from tests.command import write_place
from valence.errors import DISTRIBUTION

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OLD_NAME = re.compile(r"pip install[^\n`]*[ '\"]valence(?![-\w/.])")


def _texts() -> list[Path]:
    documents = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "dev").rglob("*.md"),
        *(ROOT / "recipes").glob("*.yaml"),
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
    ]
    return [*FILES, *documents]


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == DISTRIBUTION == "valence-align"
    assert PROJECT["scripts"] == {"valence": "valence.cli:main"}
    actual = [
        item
        for extra in PROJECT["optional-dependencies"].values()
        for item in extra
        if item.startswith("valence")
    ]
    assert [item.partition("[")[0] for item in actual] == [DISTRIBUTION]


def test_nothing_tells_to_install_the_other_project() -> None:
    wrong = {
        path.name: result[0]
        for path in _texts()
        if (result := OLD_NAME.search(path.read_text(encoding="utf-8")))
    }
    assert wrong == {}


def test_extras_that_are_named_exist() -> None:
    named = re.compile(r"valence-align\[([\w,]+)\]")
    extras = {
        extra
        for path in _texts()
        for result in named.findall(path.read_text(encoding="utf-8"))
        for extra in result.split(",")
    }
    assert extras
    assert extras <= set(PROJECT["optional-dependencies"])


def test_a_plain_installation_draws_charts() -> None:
    assert any(item.startswith("plotly") for item in PROJECT["dependencies"])


def test_the_wheel_contains_the_templates_of_the_reports() -> None:
    from valence.reports.rendering import SOURCES

    used = re.compile(r"[\"'](\w+(?:\.\w+)?\.(?:j2|css|js|txt))[\"']")
    names = {
        name
        for path in (ROOT / "valence/reports").rglob("*")
        if path.suffix in (".py", ".j2")
        for name in used.findall(path.read_text(encoding="utf-8"))
    }
    assert names
    assert names <= SOURCES.keys()
    target = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    assert target["build"]["targets"]["wheel"]["packages"] == ["valence"]  # all of its files


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1].split(","))
sys.argv = ["valence", *sys.argv[2:]]
import valence
from valence import cli
valence.train, valence.LOSSES
cli.main()
"""
"""Runs a command where the modules named in the first argument cannot be imported."""


def test_training_needs_no_app_and_no_extra(tmp_path: Path) -> None:
    import_names = {"prometheus-client": "prometheus_client", "math-verify": "math_verify"}
    import_names |= {"liger-kernel": "liger_kernel", "mlflow-skinny": "mlflow"}
    extras = {
        import_names.get(name, name)
        for extra, items in PROJECT["optional-dependencies"].items()
        if extra not in ("dev", "docs")
        for item in items
        for name in [re.split(r"[\[<>=]", item)[0]]
    }
    write_place(tmp_path)
    words = ("train", "recipe.yaml", "train.max_steps=1")
    forbidden = ",".join(["valence.apps", *sorted(extras)])
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, forbidden, *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "runs/first/model/model.safetensors").is_file()
