"""The HTTP API of OpenRLHF, tested with its published code, which is downloaded once into the
cache.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest

from examples.demo.assets import cache_folder
from tests.rewards.kit import wait_for
from tests.rewards.openrlhf_side import LABELS, PROMPTS, QUERIES
from tests.rewards.reward_servers import Numbers, served
from valence.config.load import load_reward
from valence.rewards import reward_of, score_all
from valence.types import Completion, Score

pytestmark = pytest.mark.slow
SIDE = Path(__file__).with_name("openrlhf_side.py")
CACHE = cache_folder() / "openrlhf"
VERSIONS = ("0.5.7", "0.6.4", "0.8.5", "0.11.2")
"""Clients that send queries alone; prompts and labels too; that read all of the reply; that ask for
one answer at a time.
"""
PIP = (
    sys.executable,
    "-m",
    "pip",
    "--disable-pip-version-check",
    "-q",
    "--retries",
    "0",
    "--timeout",
    "20",
)


def pip(*words: str) -> None:
    done = subprocess.run([*PIP, *words], capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        pytest.skip(f"cannot be fetched: {words[-1]}: {done.stderr.strip().splitlines()[-1]}")


def published(version: str) -> str:
    """The folder of its package."""
    place = CACHE / version
    if not place.exists():
        pip("download", "--no-deps", "--dest", str(CACHE / "wheels"), f"openrlhf=={version}")
        (wheel,) = (CACHE / "wheels").glob(f"openrlhf-{version}-*.whl")
        with ZipFile(wheel) as file:
            file.extractall(place.with_suffix(f".{os.getpid()}"))
        place.with_suffix(f".{os.getpid()}").rename(place)
    return str(next(place.rglob("openrlhf/cli")).parent)


@pytest.fixture(scope="module")
def aiohttp() -> str:
    """A folder with the library that its newest client asks with."""
    place = CACHE / f"aiohttp-{sys.version_info.major}.{sys.version_info.minor}"
    if not (place / "aiohttp").exists():
        pip("install", "--target", str(place), "aiohttp")
    return str(place)


def ask(aiohttp: str, *urls: str) -> list[list[Any]]:
    """What the clients of all versions have of each server."""
    folders = [published(version) for version in VERSIONS]
    done = subprocess.run(
        [sys.executable, str(SIDE), "clients", ",".join(urls), *folders],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": aiohttp},
    )
    return json.loads(done.stdout.splitlines()[-1])


def judged(c: Completion) -> Score:
    """1 for the label, else 0; with its length as a part."""
    return Score(float(c.text == c.info.get("label")), {"length": float(len(c.text))})


def fails(c: Completion) -> Score:
    return Score(float("nan")) if "Rome" in c.text else Score(1.0)


def test_its_clients_have_our_scores_or_none(aiohttp: str) -> None:
    """Where an answer has no score they ask five times and raise, or leave it without a reward."""
    with (
        served(Numbers(judged)) as good,
        served(Numbers(fails)) as bad,
    ):
        result, failed = ask(aiohttp, f"{good.url}/get_reward", f"{bad.url}/get_reward")
        calls = [(c.prompt, c.text, dict(c.info)) for call in good.reward.calls for c in call]
        assert bad.statuses == {500: 4 * 5, 200: 2}
    answers = ("Paris", "Rome", "\U0001f600 ")
    known = [
        (prompt, text, {"label": label})
        for prompt, text, label in zip(PROMPTS, answers, LABELS, strict=True)
    ]
    assert calls == [("", query.removesuffix("<|im_end|>"), {}) for query in QUERIES] + known * 3
    oldest, older, old, newest = result
    assert oldest == [0.0, 0.0, 0.0]
    assert older == [1.0, 0.0, 1.0]
    assert old == [
        {
            "rewards": [1.0, 0.0, 1.0],
            "scores": [1.0, 0.0, 1.0],
            "extra_logs": {"length": [5.0, 4.0, 2.0]},
        }
    ]
    assert newest == [
        {"reward": [value], "scores": [value], "extra_logs": {"length": [length]}}
        for value, length in ((1.0, 5.0), (0.0, 4.0), (1.0, 2.0))
    ]
    *others, newest = failed
    assert len(others) == 3
    assert all(str(other).startswith("Exception: Request error for 5 times") for other in others)
    assert [item["reward"] for item in newest] == [[1.0], None, [1.0]]


@pytest.fixture
def theirs() -> Iterator[dict[str, str]]:
    """Addresses of its servers by their versions. Their model gives a text its number of bytes."""
    urls, processes = dict[str, str](), list[subprocess.Popen[bytes]]()
    for version in ("0.5.7", "0.11.2"):
        with socket.create_server(("127.0.0.1", 0)) as place:
            port = place.getsockname()[1]
        words = [sys.executable, str(SIDE), "server", published(version), str(port)]
        processes.append(
            subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        urls[version] = f"http://127.0.0.1:{port}"

    def answers(url: str) -> bool:
        assert all(process.poll() is None for process in processes), "it ended"
        try:
            return httpx.get(f"{url}/docs").status_code > 0
        except httpx.TransportError:
            return False

    try:
        wait_for(lambda: all(map(answers, urls.values())))
        yield {version: f"{url}/get_reward" for version, url in urls.items()}
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_our_client_has_the_scores_of_its_servers(theirs: dict[str, str]) -> None:
    completions = [
        Completion(
            str(i),
            (1,),
            (0.0,),
            "word " * i,
            "eos",
            prompt=f"question {i} ",
            rendered=f"<s>question {i} ",
        )
        for i in range(40)
    ]
    for version, url in theirs.items():
        result = score_all(
            reward_of([load_reward(url, ["batch_size=7", "retries=0"])]), completions
        )
        end = len("</s>") if version == "0.5.7" else 0  # which that version puts behind a text
        assert [score.value for score in result] == [
            len(c.rendered + c.text) + end for c in completions
        ]
