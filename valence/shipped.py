"""Files that come with the package: the recipes, the documentation and the data of the demo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from valence.errors import UserError

RECIPE_DATA = "../examples/quickstart/"
"""Where the recipes find their rows in a clone."""


def shipped_folder(name: str) -> Path:
    """Return a folder of the repository, which an installed package contains too."""
    package = Path(__file__).parent
    installed = package / "share" / name
    return installed if installed.exists() else package.parent / name


def recipes() -> dict[str, Path]:
    """Name -> file of each recipe."""
    return {path.stem: path for path in sorted(shipped_folder("recipes").glob("*.yaml"))}


def recipe_text(name: str) -> str:
    """Return a recipe that reads its rows from the folder it is written to.

    Raises UserError for an unknown name.
    """
    path = _one(recipes(), name, "recipe", "valence recipes")
    return path.read_text(encoding="utf-8").replace(RECIPE_DATA, "")


def write_demo(folder: Path) -> Path:
    """Write the demo's answers and recipe to a folder, and return the path of the recipe.

    Files that exist are not changed. Raises UserError if the folder cannot be written.
    """
    source, recipe = shipped_folder("examples/shop"), folder / "recipe.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "answers.jsonl").exists():
            shutil.copy(source / "answers.jsonl", folder)
        if not recipe.exists():
            text = (source / "recipe.yaml").read_text(encoding="utf-8")
            # Paths are looked up in the current folder first, which may have an answers.jsonl.
            for name, path in (("answers.jsonl", "answers.jsonl"), ("runs/demo", "run")):
                text = text.replace(f": {name}\n", f": {json.dumps((folder / path).as_posix())}\n")
            recipe.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"the folder cannot be written ({error.strerror})",
            code="file-not-writable",
            where=str(folder),
            fix="choose another folder with --out",
        ) from error
    return recipe


def pages() -> dict[str, Path]:
    """Name -> file of each page of the documentation, such as ``train/methods``."""
    folder = shipped_folder("docs")
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.md"))
        if path.parent.name != "decisions"
    }


def page_text(name: str) -> str:
    """Return a page by its name, or by the last part of it.

    Raises UserError for an unknown name.
    """
    files = pages()
    for page in sorted(files, key=lambda page: not page.startswith("tasks/")):
        files.setdefault(page.rsplit("/", 1)[-1], files[page])
    return _one(files, name.removesuffix(".md"), "page", "valence docs").read_text("utf-8")


def title(text: str) -> str:
    """The first line of a page or of a recipe's comment."""
    return text.split("\n", 1)[0].lstrip("# ")


def _one(files: Mapping[str, Path], name: str, kind: str, command: str) -> Path:
    if name in files:
        return files[name]
    near = get_close_matches(name, files, n=1)
    raise UserError(
        f"there is no {kind} {name!r}",
        code="argument-invalid",
        where="NAME",
        fix=f"use {near[0]}" if near else f"choose one that `{command}` lists",
    )
