"""Served functions fail, hang, crash and print in separate processes, which affects only their
requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.reward_server.connection import Connection
from tests.errors import raises_error
from tests.rewards.kit import calls_of, has_words, wait_for
from tests.rewards.reward_servers import Served, hash_score, http_get, http_post, served_as_command
from valence import cli
from valence.apps.serve import reward_workers
from valence.apps.serve.reward_batches import Limits

FUNCTIONS = "tests.rewards.served_functions"
ROOT = Path(cli.__file__).parents[2]


def parallel(url: str, queries: list[list[str]]) -> list[tuple[int, Any]]:
    """Status and reply of each request, sent at the same time."""

    async def ask(query: list[str]) -> tuple[int, Any]:
        status, _, reply = await Connection(f"{url}/get_reward").post(
            json.dumps({"query": query}).encode()
        )
        return status, json.loads(reply)

    async def ask_all() -> list[tuple[int, Any]]:
        return await asyncio.gather(*map(ask, queries))

    return asyncio.run(ask_all())


def ready(server: Served) -> tuple[int, str]:
    reply = http_get(f"{server.url}/ready", timeout=30)
    return reply.status_code, reply.json().get("reason", "")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Requests that fail


@pytest.mark.slow
def test_failing_requests_of_many_clients_concern_no_other_client(tmp_path: Path) -> None:
    """Of 200 clients every eighth always sends an answer for which the function raises an error
    that quotes the whole call.
    """
    file = tmp_path / "calls.txt"

    async def client(url: str, k: int) -> None:
        connection = Connection(f"{url}/get_reward")
        for turn in range(6):
            texts = [f"client{k:03} {turn} {i}" for i in range(1 + (k + turn) % 3)]
            is_bad = k % 8 == 0
            texts[0] += " bad" if is_bad else ""
            status, _, body = await connection.post(json.dumps({"query": texts}).encode())
            reply = json.loads(body)
            if is_bad:
                assert status == 500
                assert f"client{k:03}" in reply["error"]
                assert Counter(body.decode().split("client")[1:]).total() > 0
                assert {words[:3] for words in body.decode().split("client")[1:]} == {f"{k:03}"}
            else:
                assert (status, reply["rewards"]) == (200, [hash_score(text) for text in texts])

    async def clients(url: str) -> None:
        await asyncio.gather(*(client(url, k) for k in range(200)))

    limits = Limits(timeout=120.0)
    with served_as_command(
        f"{FUNCTIONS}:dislikes_bad", f"settings.file={file}", limits=limits
    ) as server:
        asyncio.run(clients(server.url))
        assert server.statuses == {200: 175 * 6, 500: 25 * 6}
    # an answer is given to the function at most so often
    assert max(Counter(file.read_text().splitlines()).values()) == 3


@pytest.mark.parametrize(
    "text",
    ["crash", *(pytest.param(text, marks=pytest.mark.slow) for text in ("exit", "leave", "huge"))],
)
def test_a_request_that_ends_the_process_fails_alone(text: str) -> None:
    with served_as_command(f"{FUNCTIONS}:obeys", limits=Limits(max_delay=0.3)) as server:
        replies = parallel(server.url, [["a"], [text], ["b", "c"]])
        assert [status for status, _ in replies] == [200, 500, 200]
        assert replies[2][1]["rewards"] == [hash_score("b"), hash_score("c")]
        assert len(replies[1][1]["error"]) <= 500
        assert server.post(query=["d"]).json()["rewards"] == [hash_score("d")]


# Calls that hang


@pytest.mark.slow
@pytest.mark.parametrize("text", ["hang", "hang holding the interpreter"])
def test_hanging_calls_are_killed_and_the_function_goes_on(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than a process can abandon; requests that come with one are scored all the
    same.
    """
    monkeypatch.setattr(reward_workers, "GRACE_SECONDS", 0.5)
    with served_as_command(
        f"{FUNCTIONS}:obeys", "timeout=0.3", limits=Limits(timeout=60, max_delay=0.2)
    ) as server:
        pids = set[float]()
        for _ in range(2 if " " in text else 6):  # each hangs twice, with the other and alone
            (hung, reply), (status, other) = parallel(server.url, [[text], ["pid"]])
            assert (hung, status) == (500, 200)
            assert has_words(reply["error"], "0.3 s")
            pids.update(other["rewards"])
        assert len(pids) > 1
        wait_for(lambda: ready(server)[0] == 200)
        assert server.post(query=["next"]).json()["rewards"] == [hash_score("next")]
        assert not any(
            is_alive(int(pid)) for pid in pids - {server.post(query=["pid"]).json()["rewards"][0]}
        )


def hangs_for_long(server: Served, number: int) -> None:
    """Once this many calls are under way, they count as having begun long ago."""
    starts = server.service.batcher.call_starts
    wait_for(lambda: len(starts) == number)
    for call in list(starts):
        starts[call] = -1000.0


@pytest.mark.slow
def test_a_server_all_of_whose_calls_hang_is_not_ready() -> None:
    limits = Limits(timeout=4.0, concurrency=2)
    with served_as_command(
        f"{FUNCTIONS}:obeys", "timeout=4", "concurrency=2", limits=limits
    ) as server:
        assert ready(server) == (200, "")
        with httpx.Client(timeout=30) as first, httpx.Client(timeout=30) as second:
            threads = [
                threading.Thread(
                    target=lambda c=c: c.post(f"{server.url}/get_reward", json={"query": ["hang"]})
                )
                for c in (first, second)
            ]
            threads[0].start()
            hangs_for_long(server, 1)
            assert ready(server) == (200, "")  # one of two is left
            threads[1].start()
            hangs_for_long(server, 2)
            code, reason = ready(server)
            assert code == 503
            assert has_words(reason, 2)
            for thread in threads:
                thread.join()
        wait_for(lambda: ready(server) == (200, ""))
        assert server.post(query=["a"]).status_code == 200


@pytest.mark.slow
def test_a_server_whose_queue_is_full_is_not_ready() -> None:
    with served_as_command(
        f"{FUNCTIONS}:obeys", limits=Limits(max_batch=1, max_waiting=2)
    ) as server:
        replies = list[Any]()

        thread = threading.Thread(
            target=lambda: replies.append(server.post(query=["wait 1.5", "a", "b"]))
        )
        thread.start()
        wait_for(lambda: len(server.service.batcher.waiting) == 2)
        code, reason = ready(server)
        assert code == 503
        assert has_words(reason, 2)
        thread.join()
        assert replies[0].status_code == 200
        assert ready(server) == (200, "")


@pytest.mark.slow
def test_a_server_whose_function_cannot_be_imported_any_more_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "function_that_breaks.py"
    module.write_text("import os\ndef f(completions):\n    os._exit(1)\n")
    monkeypatch.chdir(tmp_path)
    with served_as_command("function_that_breaks:f") as server:
        assert ready(server) == (200, "")
        module.write_text("import os\nraise RuntimeError('no license')\n")
        assert server.post(query=["a"]).status_code == 500
        wait_for(lambda: "no license" in ready(server)[1])
        assert ready(server)[0] == 503
        module.write_text("def f(completions):\n    return [1.0] * len(completions)\n")
        wait_for(lambda: ready(server) == (200, ""))
        assert server.post(query=["a"]).json()["rewards"] == [1.0]


NUMBERED = """import os
def f(completions):
    if completions[0].text == "end":
        os._exit(1)
    return [{} for c in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("deterministic=true",)])
def test_workers_and_cached_scores_of_an_older_file_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    module = tmp_path / "function_that_changes.py"
    module.write_text(NUMBERED.format("1.0"))
    monkeypatch.chdir(tmp_path)
    words = ("concurrency=2", *options)
    limits = Limits(concurrency=2)
    with served_as_command("function_that_changes:f", *words, limits=limits) as server:
        pool: Any = calls_of(server.reward).backend
        wait_for(lambda: len(pool.workers) == 2)
        old = {worker.process.pid for worker in pool.workers}
        assert server.post(query=["a"]).json()["rewards"] == [1.0]
        module.write_text(NUMBERED.format("12.0"))
        assert server.post(query=["end"]).status_code == 500
        wait_for(lambda: len({worker.process.pid for worker in pool.workers} - old) == 2)
        for query in ("a", "b", "c", "d"):
            assert server.post(query=[query]).json()["rewards"] == [12.0]


@pytest.mark.slow
def test_a_function_with_another_signature_is_not_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "function_that_awaits.py"
    module.write_text(NUMBERED.format("1.0"))
    monkeypatch.chdir(tmp_path)
    with served_as_command("function_that_awaits:f") as server:
        module.write_text(NUMBERED.format("1.0").replace("def", "async def"))
        assert server.post(query=["end"]).status_code == 500
        wait_for(lambda: "signature" in ready(server)[1])
        assert ready(server)[0] == 503
        module.write_text(NUMBERED.format("1.0"))
        wait_for(lambda: ready(server) == (200, ""))


@pytest.mark.slow
def test_a_worker_that_does_not_answer_a_probe_is_replaced() -> None:
    with served_as_command(f"{FUNCTIONS}:obeys") as server:
        (pid,) = server.post(query=["pid"]).json()["rewards"]
        os.kill(int(pid), signal.SIGSTOP)
        assert ready(server)[0] == 503
        wait_for(lambda: ready(server)[0] == 200)
        assert server.post(query=["pid"]).json()["rewards"] != [pid]
        assert not is_alive(int(pid))


@pytest.mark.slow
def test_workers_killed_during_calls_are_replaced() -> None:
    """Somebody kills them all the time.

    Every reply is the right score or a failure, and in the end all is well.
    """
    with served_as_command(
        f"{FUNCTIONS}:obeys", "concurrency=2", limits=Limits(concurrency=2, timeout=60)
    ) as server:
        backend = server.reward.parts[0].reward.backend
        statuses = Counter[int]()
        for turn in range(12):
            if turn % 3 == 0:
                for worker in list(backend.workers):
                    os.kill(worker.process.pid, signal.SIGKILL)
            texts = [f"{turn} {i}" for i in range(8)]
            for text, (status, reply) in zip(
                texts, parallel(server.url, [[t, "wait 0.01"] for t in texts]), strict=True
            ):
                statuses[status] += 1
                assert (status, reply.get("rewards")) in {
                    200: [(200, [hash_score(text), hash_score("wait 0.01")])],
                    500: [(500, None)],
                }[status]
        assert statuses[200] >= 60
        wait_for(lambda: ready(server)[0] == 200)
        wait_for(lambda: len(backend.workers) == 2)


@pytest.mark.slow
def test_calls_of_an_asynchronous_function_run_together_and_one_that_hangs_ends_alone() -> None:
    words = ("timeout=2", "concurrency=8")
    limits = Limits(max_batch=1, concurrency=8, timeout=60)
    with served_as_command(f"{FUNCTIONS}:obeys_later", *words, limits=limits) as server:
        replies = parallel(server.url, [["pid"]] * 8)
        assert len({tuple(reply["rewards"]) for _, reply in replies}) == 1
        for text in ("wait", "block"):
            replies = parallel(server.url, [[text], ["a"], ["b"]])
            assert [status for status, _ in replies] == [500, 200, 200]
            assert has_words(replies[0][1]["error"], "2 s")
            # What to write instead.
            assert has_words(replies[0][1]["error"], "await") is (text == "block")
        assert server.post(query=["c"]).json()["rewards"] == [hash_score("c")]


# What workers print, what they import, and how they end


def test_what_a_function_prints_reaches_the_log_and_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with served_as_command(f"{FUNCTIONS}:obeys") as server:
        assert server.post(query=["print"]).json()["rewards"] == [hash_score("print")]
        (pid,) = server.post(query=["pid"]).json()["rewards"]
        observed = ""

        def is_there() -> bool:
            nonlocal observed
            shown = capfd.readouterr()
            assert shown.out == ""
            observed += shown.err
            return "by another program" in observed

        wait_for(is_there)
    lines = observed.splitlines()
    assert f"worker {int(pid)}: this is printed" in lines
    assert f"worker {int(pid)}: by another program" in lines
    assert f"worker {int(pid)}: \u241b[31mand this" in lines
    assert max(map(len, lines)) < 2100


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("source", "code", "words"),
    [
        (
            "raise RuntimeError('no license')",
            "reward-import-failed",
            ["wrong_function.py:1", "no license"],
        ),
        ("import os; os._exit(3)", "reward-worker-failed", []),
        pytest.param("import os; os.kill(os.getpid(), 11)", "reward-worker-failed", [], marks=SLOW),
        pytest.param("import sys; sys.exit(3)", "reward-import-failed", ["SystemExit"], marks=SLOW),
        pytest.param("syntax error", "reward-import-failed", ["SyntaxError"], marks=SLOW),
        pytest.param("g = 1", "reward-not-found", ["'f'"], marks=SLOW),
        pytest.param("def f(a, b): pass", "reward-signature", ["b"], marks=SLOW),
        pytest.param(
            "def f(completions, completion_ids): pass", "reward-needs-tokens", [], marks=SLOW
        ),
    ],
)
def test_a_function_that_cannot_be_imported_is_a_mistake_at_the_start(
    source: str, code: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong_function.py").write_text(source + "\n")
    with (
        raises_error(code, where="wrong_function:f") as raised,
        served_as_command("wrong_function:f"),
    ):
        pass
    assert has_words(raised.error.message, *words)


@contextmanager
def command(*words: str, cwd: Path = ROOT) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "valence",
            "serve",
            "--reward",
            f"{FUNCTIONS}:obeys",
            "--port",
            "0",
            *words,
        ],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    url = process.stdout.readline().partition(" at ")[2].partition(",")[0]
    try:
        yield process, url
    finally:
        process.kill()
        process.wait()


def background(work: Callable[[], Any]) -> Any:

    return ThreadPoolExecutor(1).submit(work)


def cpu_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["child {}", "hang holding the interpreter"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_the_server(number: int, text: str, tmp_path: Path) -> None:
    """Neither workers, whatever they are doing, nor what they have started."""
    with command("--timeout", "2") as (process, url), httpx.Client(timeout=30) as client:
        pids = [int(client.post(url, json={"query": ["pid"]}).json()["rewards"][0])]
        file, before = tmp_path / "child.txt", cpu_ticks(pids[0])
        background(lambda: http_post(url, json={"query": [text.format(file)]}, timeout=30))
        if text.startswith("child"):
            wait_for(lambda: file.exists() and file.read_text() != "")
            pids.append(int(file.read_text()))
        else:
            wait_for(lambda: cpu_ticks(pids[0]) >= before + 20)
        assert all(map(is_alive, pids))
        process.send_signal(number)
        process.wait(30)
        wait_for(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
def test_a_signal_to_the_whole_group_lets_calls_end(tmp_path: Path) -> None:
    """As a service manager sends it: workers leave the ending to the server."""
    with command() as (process, url):
        (pid,) = http_post(url, json={"query": ["pid"]}).json()["rewards"]
        query, begun = [f"touch {tmp_path / 'begun'}", "wait 1"], tmp_path / "begun"
        reply = background(lambda: http_post(url, json={"query": query}, timeout=30))
        wait_for(begun.exists)
        os.kill(int(pid), signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert reply.result().json()["rewards"] == list(map(hash_score, query))
        process.wait(30)
        wait_for(lambda: not is_alive(int(pid)))
