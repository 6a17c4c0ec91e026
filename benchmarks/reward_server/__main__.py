"""python -m benchmarks.reward_server [--quick]: throughput and latency of `valence serve --reward`
with 200 concurrent clients.

The server runs in a separate process and serves a function whose scores follow from the text alone;
every returned score is compared with the expected one. Clients keep their connections and send one
request after the other. The output has requests and answers per second, and the median and the 99th
percentile of the seconds per request.

    small    one answer per request, as samplers send that score each answer when it ends
    large    64 answers per request, as Valence's client sends
    slow     one answer per request, and a reward that takes 50 ms per call for any number of
             answers: without batching it would serve 20 answers per second
    over     like large, with four times as many concurrent requests as may wait: refused requests
             are sent again after the time that the server states
    kill     like large; the server is killed and restarted in the middle, and clients retry

Server and clients share the cores of one machine. Exit status: 0 all figures reach their bars, 1
some do not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.reward_server.connection import Connection
from benchmarks.reward_server.hash_reward import hash_score

CLIENTS = 200
QUESTION = "A question of some length, as they are, with a few words that do not matter at all? "
AGAIN = (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Load:
    """requests: of each client. answers: of each request. pause: seconds of a call of the reward.
    words: of the command.
    """

    requests: int
    answers: int
    pause: float = 0.0
    words: tuple[str, ...] = ()
    kill: bool = False


@dataclass
class Result:
    latencies: list[float] = field(default_factory=list[float])
    answers: int = 0
    wrong: int = 0
    again: int = 0
    seconds: float = 0.0

    def at(self, share: float) -> float:
        return sorted(self.latencies)[
            min(int(share * len(self.latencies)), len(self.latencies) - 1)
        ]


LOADS = {
    "small": Load(40, 1),
    "large": Load(10, 64),
    "slow": Load(10, 1, pause=0.05),
    "over": Load(4, 64, words=("--max-waiting", str(CLIENTS * 64 // 4))),
    "kill": Load(10, 64, kill=True),
}
HEADS = (
    ("requests", 10),
    ("answers", 9),
    ("s", 7),
    ("requests/s", 12),
    ("answers/s", 11),
    ("median s", 10),
    ("p99 s", 8),
    ("retries", 8),
)
BARS = (
    ("wrong scores", lambda results: float(sum(f.wrong for f in results.values())), "<=", 0.0),
    (
        "small: requests/s",
        lambda results: len(results["small"].latencies) / results["small"].seconds,
        ">=",
        250.0,
    ),
    ("small: p99 s", lambda results: results["small"].at(0.99), "<=", 2.0),
    (
        "large: answers/s",
        lambda results: results["large"].answers / results["large"].seconds,
        ">=",
        5000.0,
    ),
    (
        "slow: answers/s",
        lambda results: results["slow"].answers / results["slow"].seconds,
        ">=",
        200.0,
    ),
    ("over: refused, then scored", lambda results: float(results["over"].again), ">=", 1.0),
    ("kill: asked again, then scored", lambda results: float(results["kill"].again), ">=", 1.0),
)


@contextmanager
def server(load: Load, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = ("benchmarks.reward_server.hash_reward:score", "--port", str(port), *load.words)
    process = subprocess.Popen(
        [sys.executable, "-m", "valence", "serve", "--reward", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PAUSE": str(load.pause)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+/get_reward", line)
        assert address, f"it did not start: {line}"
        yield process, address[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def client(k: int, load: Load, url: str, result: Result) -> None:
    connection = Connection(url)
    for turn in range(load.requests):
        texts = [
            f"{k} {turn} {i}: an answer of some words, none of them long"
            for i in range(load.answers)
        ]
        queries, n = [QUESTION + text for text in texts], len(texts)
        body = json.dumps(
            {"query": queries, "prompts": [QUESTION] * n, "labels": [""] * n}
        ).encode()
        started = time.perf_counter()
        while True:
            try:
                status, headers, reply = await connection.post(body)
            except (OSError, asyncio.IncompleteReadError):
                result.again += 1
                await asyncio.sleep(0.2)
                continue
            if status == 200:
                break
            assert status in AGAIN, reply
            result.again += 1
            await asyncio.sleep(float(headers.get("retry-after", 0.2)))
        result.latencies.append(time.perf_counter() - started)
        result.answers += n
        rewards = json.loads(reply)["rewards"]
        result.wrong += len(rewards) != n or sum(
            a != hash_score(t) for a, t in zip(rewards, texts, strict=False)
        )


async def run(load: Load) -> Result:
    result = Result()
    with server(load) as (process, url):
        started = time.perf_counter()
        work = asyncio.gather(*(client(k, load, url, result) for k in range(CLIENTS)))
        if not load.kill:
            await work
        else:
            while len(result.latencies) < CLIENTS * load.requests // 3:
                await asyncio.sleep(0.01)
            process.kill()
            process.wait()
            with server(load, int(url.split(":")[2].partition("/")[0])):
                await work
        result.seconds = time.perf_counter() - started
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_server", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    part = 4 if parser.parse_args().quick else 1
    results: dict[str, Result] = {}
    print(f"{CLIENTS} clients" + "".join(f"{head:>{width}}" for head, width in HEADS))
    for name, load in LOADS.items():
        results[name] = one = asyncio.run(
            run(replace(load, requests=max(load.requests // part, 2)))
        )
        n = len(one.latencies)
        print(
            f"{name:<11}{n:>10}{one.answers:>9}{one.seconds:>7.1f}"
            f"{n / one.seconds:>12.0f}{one.answers / one.seconds:>11.0f}"
            f"{one.at(0.5):>10.3f}{one.at(0.99):>8.3f}{one.again:>8}",
            flush=True,
        )
    lines, held = list[str](), True
    for name, figure, sign, bar in BARS:
        value = figure(results)
        good = value <= bar if sign == "<=" else value >= bar
        lines.append(f"{name} {value:.4g} (bar {bar:g}) {'held' if good else 'short'}")
        held &= good
    print("; ".join(lines))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
