"""The folder of a run: who may write into it, and what is written where."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from valence.errors import UserError


class RunFolder:
    """config.yaml, audit.json, metrics.jsonl, run.json, eval/, checkpoints/, model/, report.html."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Looks whether the folder can be had. ``fresh`` allows for a run that is there; without it that is a UserError.

        A run that ended before its first step leaves nothing worth keeping: its folder is free. A folder that holds anything
        but a run is never written into: a run replaces what is there under the names it uses.
        """
        self.path = path
        if path.exists() and not path.is_dir():
            raise UserError("this is a file", where=f"run.dir: {path}", fix="name a folder")
        if path.is_dir() and any(path.iterdir()):
            if not (path / "run.json").is_file():
                raise UserError("the folder holds other files", where=f"run.dir: {path}", fix="name a new or an empty folder")
            if _holds_work(path) and not fresh:
                raise UserError(
                    "the folder holds a run already",
                    where=f"run.dir: {path}",
                    fix="choose another run.dir, or start anew with --fresh, which moves the old run aside",
                )
        self.facts: dict[str, Any] = {}

    def claim(self) -> None:
        """Makes the folder, moving an earlier run aside. Raises UserError when it cannot."""
        path = self.path
        try:
            if path.is_dir() and _holds_work(path):
                path.rename(_free_name(path))
            (path / "eval").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot make the folder ({error.strerror})", where=f"run.dir: {path}", fix="choose another run.dir"
            ) from error

    def write(self, name: str, content: str | Mapping[str, Any] | Sequence[Any]) -> Path:
        """Writes a file as a whole: text, or anything JSON can say."""
        text = (
            content
            if isinstance(content, str)
            else json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)
        )
        target = self.path / name
        aside = target.with_name(f".{target.name}.part")
        try:
            aside.write_text(text, encoding="utf-8", errors="backslashreplace")
            aside.replace(target)
        except OSError as error:
            raise UserError(
                f"cannot be written ({error.strerror})", where=str(target), fix="make room, or restore the folder"
            ) from error
        return target

    def state(self, **facts: Any) -> None:
        """Adds to run.json: the command, versions, times, status."""
        self.facts |= facts
        self.write("run.json", self.facts)

    def note(self, kind: str, message: str) -> None:
        """Adds a line to the notes or warnings in run.json."""
        self.state(**{kind: [*self.facts.get(kind, []), message]})

    def evaluation(self, step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> None:
        """eval/step-N.json with every row and number, and the same to read as eval/step-N.txt."""
        self.write(f"eval/step-{step}.json", {"step": step, "metrics": finite(metrics), "rows": [finite(row) for row in rows]})
        self.write(f"eval/step-{step}.txt", "\n".join(_readable(step, metrics, rows)))


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with numbers that are not finite as strings, since JSON has no word for them."""
    return {k: str(v) if isinstance(v, float) and v - v != 0 else v for k, v in row.items()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Of what the numbers of a run depend on."""
    import torch
    import transformers

    from valence import __version__

    return {
        "valence": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def refuse_own_inputs(run_dir: Path, inputs: Mapping[str, str | None]) -> None:
    """Raises UserError when something that the run reads (setting -> path) lies in the folder that it writes."""
    for setting, name in inputs.items():
        if name and Path(name).exists() and Path(name).resolve().is_relative_to(run_dir.resolve()):
            raise UserError(
                f"{name} lies in the run's own folder, which the run writes", where=setting, fix="choose another run.dir"
            )


def _holds_work(path: Path) -> bool:
    log = path / "metrics.jsonl"
    return (path / "model").exists() or (path / "checkpoints").exists() or (log.is_file() and log.stat().st_size > 0)


def _free_name(path: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return path.with_name(f"{path.name}.{stamp}-{os.getpid()}")


def _readable(step: int, metrics: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"evaluation after {step} steps", *(f"  {name}: {value:.6g}" for name, value in metrics.items()), ""]
    for row in rows:
        numbers = "  ".join(
            f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items() if isinstance(v, float | bool | int)
        )
        lines.append(f"{row['origin']}  {numbers}")
        lines += [f"  {name}: {row[name]}" for name in ("prompt", "completion", "chosen", "rejected") if name in row]
    return [*lines, ""]
