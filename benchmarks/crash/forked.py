"""Programs that start as a fork of this process, which has loaded their libraries."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def popen_forks(program: Callable[[], None]):
    """Inside the block ``subprocess.Popen`` calls ``program`` in a forked process, in the
    environment and with the streams that it is given, whatever the command is.
    """

    plain = subprocess.Popen

    class Forked(plain):  # type: ignore[type-arg]
        def __init__(
            self,
            command: Sequence[str],
            *,
            env: Mapping[str, str],
            preexec_fn: Callable[[], None],
            pass_fds: Sequence[int],
            **arguments: Any,
        ) -> None:
            def child() -> None:  # the last that Popen calls before it would start another program
                subprocess.Popen = plain  # type: ignore[misc]  # what the program itself starts is no copy of it
                preexec_fn()
                as_if_new(env, pass_fds)
                os._exit(status_of(program))

            super().__init__(command, env=env, preexec_fn=child, pass_fds=pass_fds, **arguments)

    with patch.object(subprocess, "Popen", Forked):
        yield


def as_if_new(env: Mapping[str, str], inherited: Sequence[int]) -> None:
    """No more files are open, signals do what they do by default, and objects are collected."""
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *inherited}:
        try:
            os.close(fd)
        except OSError:  # that of the listing itself
            continue
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    gc.enable()


def status_of(program: Callable[[], None]) -> int:
    """Of a program, to its end."""
    try:
        program()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # as Python would
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return status
