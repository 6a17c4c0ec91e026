"""The process that runs a served function. The server kills it when a call does not end.

It reads messages from one socket and replies on it. Messages to the function are pickled, since
only the server writes there. Replies are lines of JSON, so that the server executes nothing that
the function returns.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from valence.errors import UserError
from valence.rewards.calls import RewardError, checked
from valence.rewards.functions import Function, function_of
from valence.types import Completion, Score
from valence.user_code.attempt import (
    Raised,
    attempt,
    describe,
    describe_error,
    restored_working_directory,
)


def main(message_fd: int, lifeline_fd: int) -> None:
    """message_fd: the socket. lifeline_fd: an empty pipe; only the server has its other end."""
    _end_with_server(lifeline_fd)
    # the server ends its calls first, and then kills its workers
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    connection = socket.socket(fileno=message_fd)
    with connection.makefile("rb") as messages:
        target, settings, seconds, where = pickle.load(messages)
        try:
            function = function_of(target, settings, seconds, where.removesuffix(".reward"))
        except UserError as error:
            _send(connection, {"error": error.facts})
            return
        has_json_identity = not isinstance(attempt(lambda: json.dumps(function.identity)), Raised)
        facts = {
            "blocking": function.blocking,
            "parameters": [*function.parameters],
            "identity": function.identity if has_json_identity else None,
        }
        _send(connection, {"loaded": facts})
        asyncio.run(_serve(function, connection, messages))


def _end_with_server(lifeline_fd: int) -> None:
    """Let the kernel end this process and its children when the server ends, even while a call
    blocks the interpreter.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(lifeline_fd, False)


async def _serve(function: Function, connection: socket.socket, messages: Any) -> None:
    loop = asyncio.get_running_loop()
    inbox = asyncio.Queue[tuple[int, Sequence[Completion] | None]]()

    def receive() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(inbox.put_nowait, pickle.load(messages))
        finally:  # the server has ended
            os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=receive, name="messages of the server", daemon=True).start()
    tasks = set[asyncio.Task[None]]()
    while True:
        number, completions = await inbox.get()
        if completions is None:
            _send(connection, {"id": number})
            continue
        task = asyncio.create_task(_answer(function, connection, number, completions))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(
    function: Function, connection: socket.socket, number: int, completions: Sequence[Completion]
) -> None:
    with restored_working_directory():
        (scores,) = await asyncio.gather(function.attempt(completions), return_exceptions=True)
    is_hung = False
    if isinstance(scores, RewardError):
        is_hung = scores.late and not scores.passes
        reply = {"failed": str(scores), "late": scores.late, "hung": is_hung}
    elif isinstance(scores, BaseException):  # a defect must not end other calls
        reply = {"failed": f"raised {describe_error(scores)}", "late": False, "hung": False}
    else:
        reply = {"scores": [_encode(score) for score in scores]}
    _send(connection, {"id": number, **reply})
    if is_hung:  # end before calls that this one blocks fail as well; the server repeats them
        os._exit(1)


def _encode(score: Score) -> list[Any]:
    """``Score.record`` as JSON."""
    score = checked(score)
    parts = attempt(lambda: {str(name): float(value) for name, value in score.parts.items()})
    error = score.error if isinstance(score.error, str) else describe(score.error)
    if isinstance(parts, Raised):
        error = f"the parts of the score are not numbers: {describe_error(parts.error)}"
        return Score(None, error=error).record
    value = None if score.value is None else float(score.value)
    return Score(value, parts, error, score.feedback, score.turn_rewards).record


def _send(connection: socket.socket, reply: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(reply).encode() + b"\n")
