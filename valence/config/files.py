"""Read a recipe file and locate the files that a recipe names.

Every failure is a UserError with the nearest name.
"""

from __future__ import annotations

import os
import shlex
from difflib import get_close_matches
from pathlib import Path

from valence.data.sources import is_hub_dataset
from valence.errors import UserError
from valence.files import check_path, expand_path

DATA_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".gz")
"""Ends of the names of data files that are no recipe."""


def read_recipe_text(path: Path) -> str:
    """The text of a recipe.

    Raises UserError unless it is a readable file in UTF-8 without a byte order mark.
    """
    check_path(str(path))
    if path.is_dir():
        recipes = sorted(str(p) for p in path.iterdir() if p.suffix in (".yaml", ".yml"))
        raise UserError(
            "the path is a folder, not a recipe",
            code="path-is-folder",
            where=str(path),
            fix=f"use a file in it: {', '.join(recipes[:5])}"
            if recipes
            else "use the path of a .yaml file",
        )
    if path.suffix.lower() in DATA_SUFFIXES and path.is_file():
        raise UserError(
            "the file has rows of data, but must be a recipe",
            code="recipe-is-data",
            where=str(path),
            fix=f"write a recipe for it with `valence init {shlex.quote(str(path))}`, and use the "
            "path of the recipe",
        )
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            "the recipe does not exist",
            code="recipe-not-found",
            where=str(path),
            fix=nearest_file(path, (".yaml", ".yml")),
        ) from None
    except OSError as error:
        raise UserError(
            f"the recipe cannot be read: {error.strerror}",
            code="file-not-readable",
            where=str(path),
            fix="check the file's permissions",
        ) from None
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise UserError(
            "the file starts with a byte order mark",
            code="file-byte-order-mark",
            where=f"{path}:1",
            fix="save it as UTF-8 without a byte order mark (BOM)",
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"the file is not UTF-8 text (byte {data[error.start]:#04x})",
            code="file-encoding",
            where=f"{path}:{line}",
            fix="save it as UTF-8",
        ) from None


def locate_data(path: str, folder: Path | None) -> str:
    """The path of a recipe's data file; a hub id is returned unchanged.

    Looks up a relative path in the current directory, then in the recipe's ``folder``. Raises
    UserError for a file that is in neither.
    """
    file = Path(expand_path(path))
    places = [file] if file.is_absolute() or folder is None else [file, folder / file]
    for place in places:
        if place.exists():
            return os.path.normpath(place)
    if is_hub_dataset(path):
        return path
    hints = list(dict.fromkeys(nearest_file(place) for place in places))
    hints = [hint for hint in hints if hint.endswith("?")] or hints
    raise UserError(
        f"the file {path} does not exist", code="file-not-found", fix="; or ".join(hints)
    )


def read_chat_template(chosen: str, folder: Path | None) -> str:
    """The text of the chat template with this path; a built-in name or the text of a template is
    returned unchanged.

    Looks up the path as that of data. Raises UserError unless it is a Jinja template in UTF-8.
    """
    if chosen == "chatml" or _is_jinja(chosen):
        return chosen
    fix = "set it to a Jinja file or to chatml, or remove it to use the template of the tokenizer"
    if get_close_matches(chosen, ["chatml"], cutoff=0.8):
        fix = f"did you mean chatml? otherwise {fix}"
    try:
        text = Path(locate_data(chosen, folder)).read_text(encoding="utf-8")
    except UserError as error:
        code = "template-not-found" if error.code == "file-not-found" else error.code
        is_near = error.code == "file-not-found" and str(error.fix).endswith("?")
        hint = f"{error.fix} otherwise " if is_near else ""
        raise UserError(error.message, code=code, fix=f"{hint}{fix}") from None
    except UnicodeDecodeError:
        raise UserError(
            f"{chosen} is not UTF-8 text", code="file-not-readable", fix="save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(
            f"{chosen} cannot be read ({error.strerror})", code="file-not-readable", fix=fix
        ) from None
    if not _is_jinja(text):
        raise UserError(
            f"{chosen} is not a Jinja template: it has no {{{{ or {{%",
            code="template-invalid",
            fix=fix,
        )
    return text


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def nearest_file(path: Path, endings: tuple[str, ...] = ("",)) -> str:
    """The fix for a missing file: the nearest name in its folder, of a folder or with one of these
    endings, if there is one.
    """
    folder = path.parent
    if not folder.is_dir():
        return f"correct the path: the folder {folder} does not exist"
    try:
        names = [
            name
            for name in os.listdir(folder)
            if name.endswith(endings) or Path(folder, name).is_dir()
        ]
    except OSError:
        return f"correct the path: the folder {folder} cannot be read"
    near = get_close_matches(path.name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"correct the path: the folder {folder.resolve()} has no file with a similar name"
