"""Run commands with the package of a tree, and record what users get.

``outputs.json`` of a recording maps the name of a command to its exit status, the code of its error
(or null), standard output and error, the files that it removed, and those that it wrote: their
text, or a checksum. ``errors.json`` maps it to the exit status and the error: code, place,
sentence, and code and place of each problem if there are several. ``normalizing.py`` lists what is
left out.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from tests.regression.commands import OUTPUTS, Change, Command
from tests.regression.mistakes import ERRORS, SETUP
from tests.regression.normalizing import STDERR, STDOUT, Normalizer
from tests.regression.recording import drive

OUTPUTS_FILE, ERRORS_FILE, MESSAGES_FILE = "outputs.json", "errors.json", "commands.txt"


def record_commands(
    out: Path,
    tree: Path,
    inputs: Path,
    outputs: Sequence[Command] = OUTPUTS,
    errors: Sequence[Command] = ERRORS,
) -> None:
    """Write ``outputs.json`` and ``errors.json`` into the folder ``out``, unless one has no
    commands.

    tree: the folder that holds the package. inputs: the folder that ``write_inputs`` wrote.
    Raises RuntimeError when the package cannot be imported from the tree, or the commands that
    make the place for the errors fail.
    """
    with TemporaryDirectory() as name:
        work = Path(name).resolve()
        place = work / "errors"
        setup = SETUP if errors else ()
        plan = [_plan(command, work, work / "outputs") for command in outputs]
        plan += [_plan(command, work, place) for command in setup]
        plan += [_plan(item, work, work / "places" / item.name, place) for item in errors]
        for folder in (work / "outputs", place):
            shutil.copytree(inputs, folder)
        began = datetime.now(UTC)
        result = drive(work, tree, work, out / MESSAGES_FILE, commands=plan)
        ended = datetime.now(UTC)
        for command in setup:
            if result[command.name]["status"]:
                stderr = (_results(work, command) / STDERR).read_text(encoding="utf-8")
                raise RuntimeError(f"the command {command.name} of SETUP failed\n{stderr}")

        def normalizer(folder: Path) -> Normalizer:
            paths = {folder: "<folder>", work: "<work>", tree.resolve(): "<tree>"}
            return Normalizer(paths | {Path(sys.prefix): "<python>"}, began, ended)

        records = {
            OUTPUTS_FILE: {
                item.name: _output(
                    result[item.name], _results(work, item), normalizer(work / "outputs")
                )
                for item in outputs
            },
            ERRORS_FILE: {
                item.name: _error(result[item.name], normalizer(work / "places" / item.name))
                for item in errors
            },
        }
        for file, record in records.items():
            if record:
                text = json.dumps(record, indent=1, ensure_ascii=False)
                (out / file).write_text(text, encoding="utf-8", errors="surrogateescape")


def _plan(
    command: Command, work: Path, folder: Path, copy_of: Path | None = None
) -> dict[str, Any]:
    return {
        "name": command.name,
        "words": command.words,
        "folder": str(folder),
        "copy_of": copy_of and str(copy_of),
        "changes": [_plan_change(path, change) for path, change in command.changes.items()],
        "results": str(_results(work, command)),
    }


def _results(work: Path, command: Command) -> Path:
    return work / "results" / command.name


def _plan_change(path: str, change: Change) -> tuple[str, str, Any]:
    match change:
        case None:
            return path, "remove", None
        case str():
            return path, "write", change.encode().hex()
        case bytes():
            return path, "write", change.hex()
        case float():
            return path, "cut", change
        case PurePosixPath():
            return path, "copy", str(change)
        case _:
            return path, "replace", change


def _output(result: Mapping[str, Any], results: Path, normalizer: Normalizer) -> dict[str, Any]:
    error, files = result["error"], results / "files"
    paths = sorted(path for path in files.rglob("*") if path.is_file())
    names = {path.relative_to(files).as_posix(): path for path in paths}
    return {
        "status": result["status"],
        "code": error and error["code"],
        STDOUT: normalizer.file(results / STDOUT, STDOUT),
        STDERR: normalizer.file(results / STDERR, STDERR),
        "removed": result["removed"],
        "files": {name: normalizer.file(path, name) for name, path in names.items()},
    }


def _error(result: Mapping[str, Any], normalizer: Normalizer) -> dict[str, Any]:
    """Of a command that has no error, only the status."""
    error = result["error"] or {"code": None, "where": None, "sentence": "", "problems": []}

    def place(text: str | None) -> str | None:
        return text and normalizer.text(text)

    return {
        "status": result["status"],
        "code": error["code"],
        "place": place(error["where"]),
        "problems": [[code, place(where)] for code, where in error["problems"]],
        "sentence": normalizer.text(error["sentence"]),
    }
