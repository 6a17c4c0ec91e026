"""Compare the outputs and the errors of commands in two recordings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from difflib import SequenceMatcher
from itertools import takewhile
from pathlib import Path
from typing import Any

from tests.regression.command_recording import ERRORS_FILE, OUTPUTS_FILE
from tests.regression.normalizing import STDERR, STDOUT

MAX_LINES, MAX_WIDTH = 12, 200
"""Of the diff of a text."""


def compare_outputs(ours: Path, theirs: Path, say: Callable[[str], None]) -> bool:
    """Print which outputs differ, and how. Returns whether all agree."""
    return _compare("outputs", OUTPUTS_FILE, _output_differences, ours, theirs, say)


def compare_errors(ours: Path, theirs: Path, say: Callable[[str], None]) -> bool:
    """Print which errors differ. A sentence that differs is printed, and is no difference."""
    return _compare("errors", ERRORS_FILE, _error_differences, ours, theirs, say)


def _compare(
    part: str,
    file: str,
    differences: Callable[[Any, Any], Iterator[str]],
    ours: Path,
    theirs: Path,
    say: Callable[[str], None],
) -> bool:
    """Returns whether both recordings lack the file, or all of its commands agree."""
    if not ((ours / file).exists() or (theirs / file).exists()):
        return True
    first, second = (_read(folder / file) for folder in (ours, theirs))
    num_different = 0
    for name in [*first, *(name for name in second if name not in first)]:
        if name not in first or name not in second:
            lines = [f"missing in the {'second' if name in first else 'first'} recording"]
        else:
            lines = list(differences(first[name], second[name]))
        if lines:
            num_different += 1
            say(f"{name:<40}DIFFERENT")
            for line in lines:
                say(f"    {line}")
        elif first[name].get("sentence") != second[name].get("sentence"):
            say(f"{name:<40}sentence changed")
            for line in _diff(first[name]["sentence"], second[name]["sentence"]):
                say(f"    {line}")
    total = len(first.keys() | second.keys())
    say(f"{total} {part}: {total - num_different} identical, {num_different} different")
    return not num_different


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _error_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in ("status", "code", "place", "problems"):
        if first[name] != second[name]:
            yield f"{name}: {first[name]} and {second[name]}"


def _output_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    for name in ("status", "code", "removed"):
        if first[name] != second[name]:
            yield f"{name}: {first[name]} and {second[name]}"
    for name in (STDOUT, STDERR):
        yield from _text_differences(name, first[name], second[name])
    files = first["files"], second["files"]
    for name in sorted(files[0].keys() | files[1].keys()):
        if name not in files[0] or name not in files[1]:
            yield f"{name}: only in the {'first' if name in files[0] else 'second'} recording"
        else:
            yield from _text_differences(name, files[0][name], files[1][name])


def _text_differences(name: str, first: str, second: str) -> Iterator[str]:
    if first != second:
        yield f"{name}:"
        yield from (f"  {line}" for line in _diff(first, second))


def _diff(first: str, second: str) -> list[str]:
    """The lines that differ, as many as are useful."""
    ours, theirs = first.splitlines(keepends=True), second.splitlines(keepends=True)
    lines = list[str]()
    for _, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if ours[a:b] != theirs[c:d]:
            pairs = zip("".join(ours[a:b]), "".join(theirs[c:d]), strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            lines += [f"- {_around(line, same)}" for line in ours[a:b]]
            lines += [f"+ {_around(line, same)}" for line in theirs[c:d]]
    rest = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], f"({rest} more lines differ)"] if rest > 0 else lines


def _around(line: str, position: int) -> str:
    """A part of a long line."""
    start = max(0, position - MAX_WIDTH // 2)
    return repr(line[start : start + MAX_WIDTH])[1:-1]
