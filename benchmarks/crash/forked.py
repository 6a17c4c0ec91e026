"""Start programs as forks of this process, which has already imported their libraries."""

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
    """Inside the block, ``subprocess.Popen`` runs ``program`` in a forked process instead of the
    command, with the environment and the streams of the call.
    """

    original = subprocess.Popen

    class Forked(original):  # type: ignore[type-arg]
        def __init__(
            self,
            command: Sequence[str],
            *,
            env: Mapping[str, str],
            preexec_fn: Callable[[], None],
            pass_fds: Sequence[int],
            **arguments: Any,
        ) -> None:
            def child() -> None:  # Popen's last call before it would execute the command
                # processes that the program starts are real ones again
                subprocess.Popen = original  # type: ignore[misc]
                preexec_fn()
                reset_process(env, pass_fds)
                os._exit(status_of(program))

            super().__init__(command, env=env, preexec_fn=child, pass_fds=pass_fds, **arguments)

    with patch.object(subprocess, "Popen", Forked):
        yield


def reset_process(env: Mapping[str, str], inherited: Sequence[int]) -> None:
    """Close inherited files, reset signal handlers and the environment, and enable the garbage
    collector, as in a process that was started normally.
    """
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *inherited}:
        try:
            os.close(fd)
        except OSError:  # the file descriptor of the listing
            continue
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    gc.enable()


def status_of(program: Callable[[], None]) -> int:
    """Run a program and return its exit status."""
    try:
        program()
        status = 0
    except SystemExit as exit_request:
        status = (
            exit_request.code
            if isinstance(exit_request.code, int)
            else int(exit_request.code is not None)
        )
    except BaseException:  # as the interpreter does
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    return status
