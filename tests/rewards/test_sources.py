"""Which source files the identity of a reward function includes."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from valence.rewards.functions import function_of
from valence.user_code.sources import are_current, imported_sources, loaded_sources

FILES: dict[str, dict[str, str]] = {
    "import": {"main": "import helper"},
    "from": {"main": "from helper import value"},
    "star": {"main": "from helper import *"},
    "in a function": {"main": "def f():\n    import helper"},
    "in a branch": {"main": "try:\n    import helper\nexcept ImportError:\n    pass"},
    "through another": {"main": "import between", "between": "import helper"},
    "in a cycle": {"main": "import between", "between": "import main, helper"},
    "by name": {"main": "import importlib\nimportlib.import_module('helper')"},
    "dunder": {"main": "__import__('helper')"},
}
PACKAGES: dict[str, tuple[str, str, str]] = {
    "absolute": ("pk.main", "from pk import helper", "pk.helper"),
    "relative": ("pk.main", "from . import helper", "pk.helper"),
    "name of a relative module": ("pk.main", "from .helper import value", "pk.helper"),
    "two levels": ("pk.sub.main", "from ..helper import value", "pk.helper"),
    "initialization": ("main", "import pk.helper", "pk"),
    "namespace": ("main", "from space import helper", "space.helper"),
    "relative by name": (
        "pk.main", "import importlib\nimportlib.import_module('.helper', __package__)", "pk.helper",
    ),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path  # type: ignore[misc]
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(folder: Path, name: str, text: str = "") -> Path:
    path = folder / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", FILES)
def test_an_imported_module_is_included(folder: Path, case: str) -> None:
    for name, text in FILES[case].items():
        write(folder, name, text)
    helper = write(folder, "helper", "value = 1")
    before = imported_sources(["main"])
    assert {"main", "helper"} <= before.keys()
    helper.write_text("value = 2")
    after = imported_sources(["main"])
    assert before["main"] == after["main"]
    assert before["helper"] != after["helper"]


@pytest.mark.parametrize("case", PACKAGES)
def test_modules_of_packages_are_included(folder: Path, case: str) -> None:
    name, text, expected = PACKAGES[case]
    for package in ("pk.__init__", "pk.sub.__init__", "pk.helper", "space.helper"):
        write(folder, package)
    write(folder, name, text)
    assert {name, expected} <= imported_sources([name]).keys()


def test_libraries_and_attributes_are_left_out(folder: Path) -> None:
    write(folder, "main", "import os, torch\nfrom json import loads\nimport valence, absent")
    assert list(imported_sources(["main"])) == ["main"]


def test_no_module_is_imported(folder: Path) -> None:
    write(folder, "main", "import helper")
    write(folder, "helper", "raise RuntimeError")
    assert list(imported_sources(["main"])) == ["helper", "main"]


def test_a_function_without_imports_has_the_identity_that_old_files_record(folder: Path) -> None:
    """Scores and verdicts of earlier versions stay valid for it."""
    write(folder, "alone", "def score(completions, **context):\n    return [1.0]\n")
    identity = function_of("alone:score", {}, 60.0, "reward.0").identity
    assert identity is not None
    assert identity.keys() == {"function", "settings", "source"}


def test_a_function_that_another_module_defines_includes_both(folder: Path) -> None:
    write(folder, "main_of_two", "from helper_of_two import score\nTABLE = 1")
    write(folder, "helper_of_two", "def score(completions, **context):\n    return [1.0]\n")
    first = function_of("main_of_two:score", {}, 60.0, "reward.0").identity
    write(folder, "main_of_two", "from helper_of_two import score\nTABLE = 2")
    assert function_of("main_of_two:score", {}, 60.0, "reward.0").identity == first  # as imported
    del sys.modules["main_of_two"]
    assert function_of("main_of_two:score", {}, 60.0, "reward.0").identity != first


def test_threads_can_look_at_once(folder: Path) -> None:
    write(folder, "main", "import helper\n" + "x = [1, (2, 3), {4: 5}]\n" * 500)
    write(folder, "helper")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            sources_of_threads = list(threads.map(lambda _: imported_sources(["main"]), range(16)))
    finally:
        sys.setswitchinterval(before)
    assert all(sources == sources_of_threads[0] for sources in sources_of_threads)


@pytest.mark.parametrize(
    ("name", "is_included"),
    [("generated", True), ("absent_package.generated", True), ("json.generated", False)],
)
def test_loaded_modules_are_included_unless_a_library_generated_them(
    folder: Path, name: str, is_included: bool
) -> None:
    path = write(folder, "code_of_a_run")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    sources = loaded_sources()
    assert (name in sources) is is_included
    assert "__main__" not in sources
    assert "json" not in sources
    assert are_current(sources)
    del sys.modules[name]
    path.unlink()
    assert are_current(sources) is not is_included
