"""Runs published code of OpenRLHF in a separate process: its clients for a server of ours, its
server for a client of ours.

python openrlhf_side.py clients URL,URL FOLDER... asks with the client of each version, prints what
each had as JSON
python openrlhf_side.py server FOLDER PORT        serves with its server
Ray and the language model are stand-ins: neither speaks on the wire. Of its packages, the
``__init__`` files are not run.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import runpy
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

QUERIES = ["What? Paris<|im_end|>", "What? Rome<|im_end|>", "Why? \U0001f600 <|im_end|>"]
PROMPTS = ["What? ", "What? ", "Why? "]
LABELS = ["Paris", "Paris", "\U0001f600 "]
END = 256


def package(folder: str) -> None:
    """Makes ``openrlhf`` importable from this folder, each module by itself."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "openrlhf"]:
        del sys.modules[name]
    for name in ("openrlhf", "openrlhf.utils"):
        stand_in = ModuleType(name)
        stand_in.__path__ = [str(Path(folder, *name.split(".")[1:]))]
        sys.modules[name] = stand_in


def remote(thing: Any) -> Any:
    """ray.remote, in this process."""
    if isinstance(thing, type):
        return thing
    thing.remote = thing
    return thing


# Clients


def _names_of(client: ModuleType) -> Iterator[Callable[[str], Any]]:
    """Ways to ask that a version has."""
    if not hasattr(client, "remote_rm_fn"):
        yield lambda url: client.RemoteRewardModel(SimpleNamespace(), url).get_rewards(
            QUERIES, PROMPTS, LABELS
        )
    elif client.remote_rm_fn.__code__.co_argcount == 3:
        yield lambda url: client.remote_rm_fn(url, QUERIES).tolist()
    else:
        yield lambda url: client.remote_rm_fn(url, QUERIES, PROMPTS, LABELS).tolist()


class Letters:
    """A tokenizer of bytes, with a special token at the end of a turn."""

    def __call__(self, text: str, **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([list(text.encode())])}

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(i for i in ids if i != END).decode() + "<|im_end|>" * (END in ids)


class Policy:
    """Answers with what it is given."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    async def generate(self, *_: Any, **__: Any) -> Any:
        message = SimpleNamespace(
            token_ids=[*self.answer.encode(), END], finish_reason="stop", logprobs=None
        )
        return SimpleNamespace(outputs=[message])


def rollouts(agent: ModuleType, url: str) -> list[Any]:
    """As the newest versions ask: for one answer at a time, as soon as it is sampled."""

    async def all_of_them() -> list[Any]:
        executor = agent.SingleTurnAgentExecutor(url)
        sampling = SimpleNamespace(max_tokens=64, logprobs=None)
        answers = [
            query[len(prompt) :].removesuffix("<|im_end|>")
            for query, prompt in zip(QUERIES, PROMPTS, strict=True)
        ]
        return [
            await executor.execute(prompt, label, sampling, 512, Letters(), Policy(answer))
            for prompt, label, answer in zip(PROMPTS, LABELS, answers, strict=True)
        ]

    result = asyncio.run(all_of_them())
    return [{name: item[name] for name in ("reward", "scores", "extra_logs")} for item in result]


def clients(urls: list[str], folders: list[str]) -> None:
    sys.modules["ray"] = SimpleNamespace(remote=remote, get=lambda refs: refs)  # type: ignore[assignment]
    time.sleep = lambda seconds: None
    pause = asyncio.sleep
    asyncio.sleep = lambda seconds: pause(0)
    print(json.dumps([results_of_clients(url, folders) for url in urls]))


def results_of_clients(url: str, folders: list[str]) -> list[Any]:
    """What the client in each folder has."""
    results: list[Any] = []
    for folder in folders:
        package(folder)
        try:
            if Path(folder, "utils", "remote_rm_utils.py").exists():
                client = importlib.import_module("openrlhf.utils.remote_rm_utils")
                results += [ask(url) for ask in _names_of(client)]
            else:
                results.append(rollouts(importlib.import_module("openrlhf.utils.agent"), url))
        except Exception as error:  # its own clients raise no other
            results.append(f"{type(error).__name__}: {error}")
    return results


# The server


class Sizes:
    """A reward model that gives a text its number of bytes."""

    device = "cpu"

    def eval(self) -> None:
        pass

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        del ids
        return mask.sum(1).float()


class Padded:
    """A tokenizer of bytes."""

    pad_token, eos_token = "<pad>", "</s>"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        mask = torch.zeros(len(texts), max(len(text.encode()) for text in texts), dtype=torch.long)
        for row, text in zip(mask, texts, strict=True):
            row[: len(text.encode())] = 1
        return {"input_ids": mask, "attention_mask": mask}


def server(folder: str, port: str) -> None:
    package(folder)
    models: Any = ModuleType("openrlhf.models")
    models.get_llm_for_sequence_regression = lambda *_, **__: Sizes()
    sys.modules["openrlhf.models"] = models
    utils: Any = sys.modules["openrlhf.utils"]
    utils.get_tokenizer = lambda *_, **__: Padded()
    sys.argv = ["serve_rm", "--host", "127.0.0.1", "--port", port]
    runpy.run_path(str(Path(folder, "cli", "serve_rm.py")), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "clients":
        clients(sys.argv[2].split(","), sys.argv[3:])
    else:
        server(*sys.argv[2:])
