"""A real vLLM server: tokens in and out, and new weights of tiny models, which must be the
trainer's to the last digits.

Three servers at once: tied weights through a folder, untied weights through gloo, adapters. The
first and the last are started as docs/online/vllm.md shows. Their processes are forked (see
``forked/``); one that starts them as it does by itself is in
tests/training/online/test_vllm_run.py.
"""

from __future__ import annotations

import copy
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.docs.walk import all_lines
from tests.errors import raises_error
from tests.rollouts.vllm_server import FORKED, HERE, needs_vllm
from tests.tiny import tiny_tokenizer
from tests.units import unit
from valence.batching.micro_batches import make_micro_batch
from valence.rollouts.check import Evidence, check, difference
from valence.rollouts.openai import OpenAIGenerator
from valence.rollouts.protocol import Sampling
from valence.rollouts.servers import REQUIRED_VARIABLES, Server
from valence.rollouts.transports import DiskTransfer, GlooTransfer, LoraTransfer, WeightTransfer
from valence.rollouts.vllm import VLLMGenerator
from valence.training.server_teacher import ServerTeacher
from valence.types import Completion

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    needs_vllm,
]

CLOSE = 1e-4
"""Nats."""

TOKENIZER = tiny_tokenizer()
END = int(TOKENIZER.eos_token_id)  # type: ignore[arg-type]
PROMPTS = [tuple(range(5 + i, 25 + i)) for i in range(3)] + [
    tuple((7 * i) % 300 + 5 for i in range(300))
]
"""The last one is longer than the blocks in which prefixes are cached."""
OFFLINE = ("VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM")
"""Of what Valence tells every server: what only keeps it from the network, and quiet."""
FREE = Sampling(temperature=0.8, max_new_tokens=16, seed=1)


@dataclass
class Side:
    """A model here, its server, and what passes between them."""

    model: Any
    server: Server
    transport: WeightTransfer
    save: Callable[[Path], None] | None = None
    notes: list[str] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self.generator = VLLMGenerator(
            self.server.url,
            self.transport,
            TOKENIZER,
            end_ids=[END],
            timeout=180,
            revive=self.server.revive,
            log=self.notes.append,
        )

    def step(self) -> None:
        """Moves every trained weight, as an optimizer's step would, and sends the new version."""
        with torch.no_grad():
            for weights in self.trained():
                weights.add_(0.1 * weights.std() * torch.randn_like(weights))
        self.version += 1
        self.generator.sync(self.version, lambda: self.model.named_parameters(), self.save)

    def trained(self) -> list[torch.Tensor]:
        return [
            weights
            for weights in self.model.parameters()
            if weights.requires_grad and weights.ndim == 2
        ]

    def measure(
        self, pairs: Sequence[Any], temperature: float, model: Any = None
    ) -> list[list[float]]:
        """Log-probabilities as the library has them."""
        rows = []
        for prompt, answer in pairs:
            with torch.no_grad():
                logits = (model or self.model)(torch.tensor([[*prompt, *answer]])).logits[
                    0
                ].float() / temperature
            before = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            rows.append(before.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
        return rows

    def furthest(self, rows: list[list[Completion]], temperature: float) -> float:
        """Largest difference of a sampled token's log-probability."""
        pairs = [
            (prompt, answer.tokens)
            for prompt, row in zip(PROMPTS, rows, strict=True)
            for answer in row
        ]
        ours, theirs = (
            self.measure(pairs, temperature),
            [answer.logps for row in rows for answer in row],
        )
        return max(
            abs(a - b)
            for mine, other in zip(ours, theirs, strict=True)
            for a, b in zip(mine, other, strict=True)
        )


class Shown(Server):
    """A server with the variables and arguments that docs/online/vllm.md shows, and those that it
    names for a CPU.
    """

    def __init__(self, line: str, model: Path, **args: Any) -> None:
        super().__init__(model, **args)
        words = shlex.split(line.replace("MODEL", str(model)))
        at = words.index("vllm.entrypoints.openai.api_server")
        assert words[at - 2 : at] == ["python", "-m"]
        self.named = dict(word.split("=") for word in words[: at - 2])
        self.arguments = [
            *words[at + 1 :],
            "--dtype",
            "float32",
            "--enforce-eager",
            "--no-enable-chunked-prefill",
        ]

    def variables(self) -> dict[str, str]:
        result = super().variables()
        return {
            name: value
            for name, value in result.items()
            if name not in REQUIRED_VARIABLES or name in OFFLINE
        } | self.named


def tiny(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,  # heads of fewer than 32 have no kernel on a CPU
            num_key_value_heads=1,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
            eos_token_id=END,
            pad_token_id=0,
            bos_token_id=1,
        )
    )
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim == 2:
                weights.mul_(5)
    return model.eval()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory, forking_vllm: str) -> Iterator[dict[str, Side]]:
    root = tmp_path_factory.mktemp("vllm")

    shown = dict(
        zip(
            ["disk", "lora"],
            [line.text for line in all_lines("docs/online/vllm.md") if "api_server" in line.text],
            strict=True,
        )
    )

    def start(name: str) -> Server:
        # they share two cores
        few = {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
        settings: dict[str, Any] = {
            "folder": root / f"{name}-log",
            "environment": few,
        }
        if name in shown:
            return Shown(shown[name], root / name, python=forking_vllm, **settings).start()
        # a test kills the processes of this one
        server = Server(
            root / name, transport=name, python=HERE, rank=4, dtype="float32", **settings
        )
        server.environment["PYTHONPATH"] = f"{server.folder / 'plugin'}{os.pathsep}{FORKED}"
        return server.start()

    models = {"disk": tiny(tied=True), "gloo": tiny(tied=False), "lora": tiny(tied=True)}
    for name, model in models.items():
        model.save_pretrained(root / name)
        TOKENIZER.save_pretrained(root / name)
    with ThreadPoolExecutor() as pool:
        starts = {name: pool.submit(start, name) for name in models}
    try:
        servers = {name: started.result() for name, started in starts.items()}
        adapted = get_peft_model(
            models["lora"], LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        ).eval()  # type: ignore[arg-type]
        yield {
            "disk": Side(models["disk"], servers["disk"], DiskTransfer(root / "weights")),
            "gloo": Side(models["gloo"], servers["gloo"], GlooTransfer(60)),
            "lora": Side(
                adapted, servers["lora"], LoraTransfer(root / "adapters"), adapted.save_pretrained
            ),
        }
    finally:
        for started in starts.values():
            if not started.exception():
                started.result().stop()


@pytest.mark.parametrize("name", ["disk", "gloo", "lora"])
def test_eight_updates(sides: dict[str, Side], name: str) -> None:
    side = sides[name]
    before: Any = None
    noted = len(side.notes)
    for _ in range(8):
        side.step()
        rows = side.generator.generate(PROMPTS, 2, FREE)
        assert side.furthest(rows, FREE.temperature) < CLOSE
        assert {answer.version for row in rows for answer in row} == {side.version}
        assert [[answer.tokens for answer in row] for row in rows] != before
        before = [[answer.tokens for answer in row] for row in rows]
        pairs = [(prompt, row[0].tokens) for prompt, row in zip(PROMPTS, rows, strict=True)]
        assert difference(side.measure(pairs, 1.0), side.generator.logps(pairs)) < CLOSE
    assert check(side.generator, PROMPTS, FREE, side.measure, CLOSE) < CLOSE
    assert len(side.notes) == noted


def test_tokens_in_and_out(sides: dict[str, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side = sides["disk"]
    ends = {END, *range(100, 160)}
    monkeypatch.setattr(side.generator, "end_ids", sorted(ends))
    heard: list[int] = []
    warm = Sampling(temperature=1.2, max_new_tokens=10, seed=5)
    rows = side.generator.generate(PROMPTS, 10, warm, progress=heard.append)
    assert sum(heard) == 40
    answers = [answer for row in rows for answer in row]
    assert {answer.stop for answer in answers} == {"eos", "length"}
    for answer in answers:
        assert not ends & set(answer.tokens[:-1])
        assert (answer.tokens[-1] in ends) == (answer.stop == "eos")
        assert answer.stop == "eos" or len(answer.tokens) == 10
        assert answer.text == TOKENIZER.decode(list(answer.tokens), skip_special_tokens=True)
    assert len({answer.tokens for answer in answers}) > 30
    again = side.generator.generate(PROMPTS, 10, warm)
    assert [answer.tokens for row in again for answer in row] == [
        answer.tokens for answer in answers
    ]


def test_more_prompts_than_are_read_at_once(sides: dict[str, Side]) -> None:
    """Without a setting for it, a seeded answer whose prompt is read in two parts ends the engine
    of a server on a CPU.
    """
    side = sides["disk"]
    prompts = [tuple((7 * i + k) % 300 + 5 for i in range(300)) for k in range(40)]
    rows = side.generator.generate(prompts, 1, Sampling(temperature=0.8, max_new_tokens=2))
    pairs = [(prompt, row[0].tokens) for prompt, row in zip(prompts, rows, strict=True)]
    assert difference(side.measure(pairs, 0.8), [row[0].logps for row in rows]) < CLOSE
    assert side.notes == []


def test_a_part_of_the_vocabulary(sides: dict[str, Side]) -> None:
    """Log-probabilities are of the distribution that was drawn from: the nucleus, renormalised."""
    from valence.rollouts.hf import nucleus

    side = sides["disk"]
    (answer,) = side.generator.generate(
        [PROMPTS[0]], 1, Sampling(temperature=0.9, top_p=0.5, max_new_tokens=12)
    )[0]
    with torch.no_grad():
        logits = (
            side.model(torch.tensor([[*PROMPTS[0], *answer.tokens]])).logits[
                0, len(PROMPTS[0]) - 1 : -1
            ]
            / 0.9
        )
    remaining = nucleus(logits.log_softmax(-1), 0.5).gather(
        1, torch.tensor(answer.tokens)[:, None]
    )[:, 0]
    assert answer.logps == pytest.approx(remaining.tolist(), abs=CLOSE)


def test_greedy_answers_are_the_librarys(sides: dict[str, Side]) -> None:
    side = sides["disk"]
    for prompt, row in zip(
        PROMPTS,
        side.generator.generate(PROMPTS, 1, Sampling(temperature=0.0, max_new_tokens=8)),
        strict=True,
    ):
        with torch.no_grad():
            ids = torch.tensor([prompt])
            out = side.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
            )
        assert list(row[0].tokens) == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["disk", "gloo"])
def test_updates_in_the_middle_of_answers(
    sides: dict[str, Side], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is labelled with the weights that it came from, and has their log-probability,
    whatever came before it.
    """
    side = sides[name]
    monkeypatch.setattr(side.generator, "end_ids", [])  # answers last for as long as they may
    mixed = 0
    for _ in range(5):
        models, answers = updated_meanwhile(side, PROMPTS[:3] * 8)
        for prompt, answer in answers:
            versions = answer.versions or (answer.version,) * len(answer.tokens)
            assert len(versions) == len(answer.tokens)
            assert list(versions) == sorted(versions)
            assert answer.version == versions[0]
            mixed += len(set(versions)) > 1
            message = {
                v: side.measure([(prompt, answer.tokens)], 1.0, models[v])[0] for v in set(versions)
            }
            assert answer.logps == pytest.approx(
                [message[v][t] for t, v in enumerate(versions)], abs=CLOSE
            )
        if mixed:
            return
    pytest.fail("no update came in the middle of an answer")


def updated_meanwhile(
    side: Side, prompts: list[tuple[int, ...]]
) -> tuple[dict[int, Any], list[tuple[tuple[int, ...], Completion]]]:
    """Long answers to each prompt, during which the weights change several times; and the model of
    each version.
    """
    side.step()
    models = {side.version: copy.deepcopy(side.model)}
    answers: list[tuple[tuple[int, ...], Completion]] = []
    long = Sampling(temperature=1.0, max_new_tokens=480, seed=side.version)

    def answer() -> None:
        # on a busy machine all may be said before an update gets its turn
        while not answers or len(models) == 1:
            rows = side.generator.generate(prompts, 1, long)
            answers.extend((prompt, row[0]) for prompt, row in zip(prompts, rows, strict=True))

    thread = threading.Thread(target=answer)
    thread.start()
    while thread.join(0.2) or thread.is_alive():
        side.step()
        models[side.version] = copy.deepcopy(side.model)
    return models, answers


def test_another_models_weights_are_noticed(sides: dict[str, Side]) -> None:
    side = sides["disk"]
    side.step()
    other = tiny(tied=True)
    with raises_error("rollout-logps-mismatch", where="rollout.max_mismatch"):
        check(
            side.generator,
            PROMPTS,
            FREE,
            lambda pairs, t: side.measure(pairs, t, other),
            CLOSE,
            evidence=Evidence(agreed=True),
        )


def test_weights_that_do_not_fit_are_refused_and_the_server_goes_on(sides: dict[str, Side]) -> None:
    side = sides["disk"]
    lacking = [
        (name, weights)
        for name, weights in side.model.named_parameters()
        if "down_proj" not in name
    ]
    with raises_error("rollout-weights-refused", where=side.server.url) as raised:
        side.generator.sync(99, lambda: lacking)
    assert "down_proj" in raised.error.message
    side.step()
    assert side.furthest(side.generator.generate(PROMPTS, 1, FREE), FREE.temperature) < CLOSE


def test_what_the_server_refuses(sides: dict[str, Side], tmp_path: Path) -> None:
    side = sides["disk"]
    with raises_error("rollout-server-refused", fix="rollout.max_new_tokens") as raised:
        side.generator.generate([(5,) * 600], 1, FREE)
    assert "512" in raised.error.message
    lora = VLLMGenerator(
        side.server.url, LoraTransfer(tmp_path), TOKENIZER, end_ids=[END], timeout=30
    )
    with raises_error("rollout-weights-refused", fix="--enable-lora"):
        lora.sync(1, lambda: [], lambda folder: None)
    url = sides["lora"].server.url
    gloo = VLLMGenerator(url, GlooTransfer(20), TOKENIZER, end_ids=[END], timeout=20)
    with raises_error("rollout-weights-refused", where=url, fix="--weight-transfer-config"):
        gloo.sync(1, lambda: [])


def test_as_a_completions_endpoint(sides: dict[str, Side]) -> None:
    side = sides["disk"]
    sampler = OpenAIGenerator(side.server.url, TOKENIZER, end_ids=[END], timeout=60)
    assert sampler.gives_tokens
    rows = sampler.generate(PROMPTS, 2, FREE)
    assert side.furthest(rows, FREE.temperature) < CLOSE
    sampler.close()


def num_running(server: Server) -> float:
    """How many answers the server is writing at this moment."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def test_killed_and_started_again(sides: dict[str, Side]) -> None:
    """Answers under way when a server dies are asked for again, of the newest weights: all that
    shows is the time it takes.
    """
    side = sides["gloo"]
    side.step()
    expected = side.generator.generate(PROMPTS, 2, FREE)
    process = side.server.process
    assert process is not None
    rows: list[list[Completion]] = []
    long = Sampling(temperature=1.0, max_new_tokens=200, seed=3)
    thread = threading.Thread(target=lambda: rows.extend(side.generator.generate(PROMPTS, 8, long)))
    thread.start()
    until = time.monotonic() + 60
    while thread.is_alive() and not num_running(side.server) and time.monotonic() < until:
        pass
    os.killpg(process.pid, signal.SIGKILL)
    thread.join()
    assert side.furthest(rows, 1.0) < CLOSE
    assert {answer.version for row in rows for answer in row} == {side.version}
    again = side.generator.generate(PROMPTS, 2, FREE)
    assert any(f"version {side.version}" in note for note in side.notes)
    assert [[a.tokens for a in row] for row in again] == [
        [a.tokens for a in row] for row in expected
    ]
    side.step()
    assert side.furthest(side.generator.generate(PROMPTS, 1, FREE), FREE.temperature) < CLOSE


def test_a_teacher(sides: dict[str, Side]) -> None:
    """Log-probabilities of given tokens and of the likeliest ones, and the texts of tokens."""
    side = sides["disk"]
    if not side.version:
        side.step()
    teacher = ServerTeacher(side.server.url, TOKENIZER, len(TOKENIZER))
    pairs = [(tuple(range(40 + i, 52 + i)), tuple(range(90, 97 + i))) for i in range(3)]
    rows = [unit(f"row{i}", "demonstration", *pair) for i, pair in enumerate(pairs)]
    batch = make_micro_batch(rows)
    by_sequence = batch.sequence_ids[batch.scored]
    logps = teacher(batch)[batch.scored]
    top = teacher.distributions(batch, batch.scored, 5)
    assert top.of_tokens == pytest.approx(logps, abs=CLOSE)
    for s, (prompt, answer) in enumerate(pairs):
        with torch.no_grad():
            logits = side.model(torch.tensor([[*prompt, *answer]])).logits[0].float()
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        mine = by_sequence == s
        [measured] = side.measure([(prompt, answer)], 1.0)
        assert logps[mine].tolist() == pytest.approx(measured, abs=CLOSE)
        torch.testing.assert_close(top.logps[mine], expected.topk(5).values, atol=CLOSE, rtol=0)
        assert (top.ids[mine] == expected.topk(5).indices).float().mean() > 0.9  # close to ties
    assert teacher.digests() == teacher.digests()
    with raises_error("vocabulary-mismatch", where="teacher.model"):
        ServerTeacher(side.server.url, tiny_tokenizer(chatml_tokens=False), len(TOKENIZER))
