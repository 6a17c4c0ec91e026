"""Runs recipes and commands with the package that PYTHONPATH names.

A separate program: it imports the standard library, libraries that most commands import anyway, and
``valence``, of which it calls ``valence.train`` and what ``python -m valence`` runs. Its argument
is a JSON file with

    tree      the folder that ``valence`` is to be imported from
    runs      [{name, recipe, folder, processes, starts: [{overrides, killed_after}]}, ...]
    commands  [{name, words, folder, copy_of, changes, results}, ...]
    result    the file for the result: name -> {seconds, error} of a run, where error is null or a
              text, and name -> {seconds, status, error, removed} of a command

A command runs in a forked process, as imports take longer than most commands do. copy_of: a folder
that is copied to its folder before, and removed after it. changes: [[path or pattern, change,
argument]], before the command. results: a new folder for ``stdout``, ``stderr`` and ``files``,
those that the command wrote. error: the exception with a code that ended it, or null.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import valence


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    package = Path(valence.__file__ or "").resolve()
    if not package.is_relative_to(Path(plan["tree"]).resolve()):
        sys.exit(f"valence was imported from {package}, not from {plan['tree']}")
    # Processes are forked, which has to come before runs that start threads.
    if plan["commands"]:
        _import_libraries()
    result = {command["name"]: _run_command(command) for command in plan["commands"]}
    runs = sorted(plan["runs"], key=lambda run: not _is_killed(run))
    result |= {run["name"]: _run(run) for run in runs}
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


# -------------------------------------------------------------------------------------- commands

LIBRARIES = ("torch", "transformers.models.llama.modeling_llama", "peft", "plotly")
LIMIT = 120
"""Seconds after which a command is killed."""


def _import_libraries() -> None:
    for name in LIBRARIES:
        with suppress(ImportError):
            import_module(name)
    with redirect_stdout(StringIO()), suppress(SystemExit):
        _run_module(["--version"])  # which imports the modules of all commands


def _run_command(command: Mapping[str, Any]) -> dict[str, Any]:
    began, folder, results = time.monotonic(), Path(command["folder"]), Path(command["results"])
    results.mkdir(parents=True)
    if command["copy_of"]:
        shutil.copytree(command["copy_of"], folder, symlinks=True)
    for path, change, argument in command["changes"]:
        _change(folder, path, change, argument)
    before = _list_files(folder)
    error_file, modules_file = results / "error.json", results / "modules.json"
    gc.freeze()  # as the child would spend time, and copy memory, to look at each object
    if not (child := os.fork()):
        _become(command["words"], folder, results)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"  {command['name']:<40}{time.monotonic() - began:6.1f} s", file=sys.stderr, flush=True)
    after = _list_files(folder)
    for name in json.loads(modules_file.read_text()) if modules_file.exists() else ():
        with suppress(Exception):  # the next command would import it itself
            import_module(name)
    for path in after:
        if before.get(path) != after[path]:
            (results / "files" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / path, results / "files" / path)
    if command["copy_of"]:
        shutil.rmtree(folder)
    return {
        "seconds": time.monotonic() - began,
        "status": status,
        "error": json.loads(error_file.read_text()) if error_file.exists() else None,
        "removed": sorted(before.keys() - after.keys()),
    }


def _change(folder: Path, pattern: str, change: str, argument: Any) -> None:
    """Change the file, or each that matches the pattern, of which there must be one."""
    if change == "write":
        path = folder / pattern
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes.fromhex(argument))
        return
    if change == "copy":
        shutil.copytree(folder / argument, folder / pattern)
        return
    paths = list(folder.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"{folder / pattern} is to be changed, and does not exist")
    for path in paths:
        if change == "remove":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif change == "cut":
            content = path.read_bytes()
            path.write_bytes(content[: int(len(content) * argument)])
        else:
            text, (old, new) = path.read_text(encoding="utf-8"), argument
            if old not in text:
                raise ValueError(f"{path} does not contain {old!r}")
            path.write_text(text.replace(old, new), encoding="utf-8")


def _list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Path -> what differs once a file has been written again."""
    facts = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            if path.suffix != ".pyc":
                status = path.stat()
                identity = (status.st_ino, status.st_size, status.st_mtime_ns)
                facts[path.relative_to(folder).as_posix()] = identity
    return facts


def _become(words: list[str], folder: Path, results: Path) -> NoReturn:
    """Continue this process as ``python -m valence`` in a folder, and end it."""
    signal.alarm(LIMIT)
    os.chdir(folder)
    for number, path in ((0, os.devnull), (1, results / "stdout"), (2, results / "stderr")):
        flags = os.O_WRONLY | os.O_CREAT if number else os.O_RDONLY
        os.dup2(os.open(path, flags, 0o644), number)
    _seed()
    before = set(sys.modules)
    try:
        _run_module(words)
        status = 0
    except BaseException as error:
        status = _write_error(error, results / "error.json")
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
    (results / "modules.json").write_text(json.dumps(_installed(before)))
    _exit(status)


def _installed(before: set[str]) -> list[str]:
    """The modules that were imported since, without those of users."""
    folders = tuple(str(Path(path)) for path in (sys.prefix, *valence.__path__))
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    return [
        name for name, file in files.items() if name not in before and str(file).startswith(folders)
    ]


def _run_module(words: list[str]) -> None:
    sys.argv = ["valence", *words]
    runpy.run_module("valence", run_name="__main__", alter_sys=True)


def _exit(status: int) -> NoReturn:
    """Do what the interpreter does at its end, without freeing all objects, which takes seconds."""
    for module, function in ((threading, "_shutdown"), (atexit, "_run_exitfuncs")):
        getattr(module, function)()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _seed() -> None:
    """Seed the generators that checkpoints contain, and that processes seed at random."""
    random.seed(0)
    with suppress(ImportError):
        __import__("numpy").random.seed(0)


def _write_error(error: BaseException, path: Path) -> int:
    """Returns the exit status."""
    path.write_text(json.dumps(_describe(error)), encoding="utf-8")
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    return code if isinstance(code, int) else int(code is not None)


def _describe(error: BaseException) -> dict[str, Any] | None:
    """The error of the user in a chain of exceptions, or that of the program."""
    cause: BaseException | None = error
    while cause is not None:
        facts: Any = cause
        if hasattr(facts, "code") and hasattr(facts, "where"):
            problems = [[item.code, item.where] for item in getattr(facts, "problems", ())]
            return {
                "code": facts.code,
                "where": facts.where,
                "sentence": str(cause),
                "problems": problems if len(problems) > 1 else [],
            }
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, SystemExit):
        return None
    return {"code": type(error).__name__, "where": None, "sentence": str(error), "problems": []}


if __name__ == "__main__":
    main()
