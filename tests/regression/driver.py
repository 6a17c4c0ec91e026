"""Runs recipes in one process, with the package that PYTHONPATH names.

A separate program: it imports the standard library and ``valence``, of which it calls
``valence.train`` and ``python -m valence train``. Its argument is a JSON file with

    tree     the folder that ``valence`` is to be imported from
    runs     [{name, recipe, folder, processes, starts: [{overrides, killed_after}]}, ...]
    result   the file for the result: name -> {seconds, error}, where error is null or a text
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import valence


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    package = Path(valence.__file__ or "").resolve()
    if not package.is_relative_to(Path(plan["tree"]).resolve()):
        sys.exit(f"valence was imported from {package}, not from {plan['tree']}")
    # Processes that are to be killed are forked, which has to come before runs that start threads.
    runs = sorted(plan["runs"], key=lambda run: not _is_killed(run))
    result = {run["name"]: _run(run) for run in runs}
    Path(plan["result"]).write_text(json.dumps(result), encoding="utf-8")


def _is_killed(run: Mapping[str, Any]) -> bool:
    return any(start["killed_after"] is not None for start in run["starts"])


def _run(run: Mapping[str, Any]) -> dict[str, Any]:
    began, error = time.monotonic(), None
    try:
        with redirect_stdout(sys.stderr):
            for start in run["starts"]:
                _start(run, start)
    except (Exception, SystemExit):
        error = traceback.format_exc()
    seconds = time.monotonic() - began
    print(f"  {run['name']:<20}{seconds:6.1f} s{'  failed' if error else ''}", flush=True)
    return {"seconds": seconds, "error": error}


def _start(run: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    overrides = [*start["overrides"], f"run.dir={json.dumps(run['folder'])}"]
    if run["processes"] > 1:
        words = ["train", run["recipe"], *overrides, "--nproc", str(run["processes"]), "--quiet"]
        command = [sys.executable, "-m", "valence", *words]
        ended = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        if ended.returncode:
            raise RuntimeError(f"exit status {ended.returncode}\n{ended.stderr}")
    elif start["killed_after"] is not None:
        _train_and_be_killed(run["recipe"], overrides, start["killed_after"])
    else:
        valence.train(run["recipe"], overrides=overrides, quiet=True)


def _train_and_be_killed(recipe: str, overrides: list[str], step: int) -> None:
    """Train in a forked process that kills itself when the log has a record of this step."""

    def kill(_: Any, record: Mapping[str, Any]) -> None:
        if record["step"] >= step:
            os.kill(os.getpid(), signal.SIGKILL)

    train = valence.train  # which imports what the process needs, once
    if not (child := os.fork()):
        try:
            train(recipe, overrides=overrides, quiet=True, callbacks=[kill])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        raise RuntimeError(f"the run was to be killed after step {step}, and ended with {status}")


if __name__ == "__main__":
    main()
