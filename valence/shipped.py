"""Files that come with the package: the recipes, the documentation and the data of the demo."""

from __future__ import annotations

import json
import shutil
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
    if name not in recipes():
        bare = name.removeprefix("online_")
        near = [bare] if bare in recipes() else get_close_matches(name, recipes(), n=1)
        raise UserError(
            f"there is no recipe {name!r}",
            code="argument-invalid",
            where="--recipe",
            fix=f"use {near[0]}" if near else f"use one of {', '.join(recipes())}",
        )
    return recipes()[name].read_text(encoding="utf-8").replace(RECIPE_DATA, "")


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
    }


def page_names() -> list[str]:
    """Names by which pages can be shown."""
    return [*pages(), *(page.rsplit("/", 1)[-1] for page in pages())]


def find_page(name: str) -> Path | None:
    """The page with a name, or whose last part is the name."""
    files = pages()
    for page in sorted(files, key=lambda page: page.startswith(("api/", "losses/"))):
        files.setdefault(page.rsplit("/", 1)[-1], files[page])
    return files.get(name.removesuffix(".md"))


def title(text: str) -> str:
    """The first line of a page or of a recipe's comment."""
    return text.split("\n", 1)[0].lstrip("# ")
