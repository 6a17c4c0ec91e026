"""Run an exported folder through a vLLM server that is started for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from valence.apps.export.probes import (
    MAX_NEW_TOKENS,
    ArtifactResult,
    Probe,
    ProbeResult,
    log_softmax,
)
from valence.errors import UserError
from valence.rollouts.client import RequestRefused, ServerClient, ServerLost
from valence.rollouts.servers import LORA_RANKS, PYTHON, Server, is_cpu_build
from valence.storage import read_json

NAME = "exported"
"""Name of the model, or of the adapter, in requests."""
MAX_LOGPROBS = 256
"""Most likely tokens of a position whose log-probabilities are requested."""
START_SECONDS = 600.0
GREEDY = {"temperature": 0.0, "repetition_penalty": 1.0, "return_token_ids": True}
MEMORY_ERRORS = ("out of memory", "No available memory", "Free memory on device", "cannot allocate")
"""Texts in the log of a server that stopped for lack of memory, whatever the folder contains."""


def find_vllm() -> str | None:
    """The Python of an environment with vLLM: VALENCE_VLLM_PYTHON, or this one; None without vLLM.

    Raises UserError if the environment variable names a Python without it.
    """
    if python := os.environ.get(PYTHON):
        is_cpu_build(os.path.abspath(python))
        return python
    return sys.executable if find_spec("vllm") else None


def run_vllm(
    python: str,
    folder: Path,
    probes: Sequence[Probe],
    expected: Sequence[ProbeResult],
    *,
    decode: Callable[[Sequence[int]], str],
    variables: Mapping[str, Any],
    end_ids: Collection[int],
    base: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    on_probe: Callable[[int], None] = lambda done: None,
) -> ArtifactResult:
    """Answers of an exported folder in a vLLM server.

    decode: returns the text of tokens in the run's vocabulary. variables: of the chat template.
    base: the base model of an adapter's folder. on_probe: called with the number of prompts done,
    0 once the server is ready. Raises UserError if the folder cannot be served (``vllm-failed``),
    or if the server lacks memory or does not start in time (``vllm-broken``).
    """
    longest = max(len(p.ids) + len(a.completion) for p, a in zip(probes, expected, strict=True))
    with TemporaryDirectory() as name:
        server = Server(
            base or folder,
            folder=Path(name),
            python=python,
            transport=None,
            dtype=dtype,
            length=_context(folder, 2 * longest + MAX_NEW_TOKENS),
            timeout=START_SECONDS,
            extra=_arguments(folder, base, trust_remote_code),
        )
        client = ServerClient(server.url, START_SECONDS)
        try:
            with server:
                on_probe(0)
                runtime = f"vLLM {client.get('/version')['version']}"
                stops = tuple(_stops_at(client, probes[0].ids, end) for end in end_ids)
                results: list[ProbeResult] = []
                for i, (probe, answer) in enumerate(zip(probes, expected, strict=True)):
                    logits = _logits(client, probe, answer)
                    results.append(_complete(client, probe, decode, variables, logits))
                    on_probe(i + 1)
        except (UserError, ServerLost) as error:
            raise _failure(error, server, folder) from error
        finally:
            client.close()
    return ArtifactResult(runtime, stops, tuple(results))


def _arguments(folder: Path, base: str | None, trust_remote_code: bool) -> list[str]:
    """Arguments of the server besides the model. An adapter has its own tokenizer and template."""
    path = str(folder.absolute())
    arguments = ["--max-logprobs", str(MAX_LOGPROBS)]
    if base is None:
        arguments += ["--served-model-name", NAME]
    else:
        rank = int(_read_json(folder / "adapter_config.json").get("r", LORA_RANKS[0]))
        max_rank = next((size for size in LORA_RANKS if size >= rank), rank)
        arguments += ["--tokenizer", path, "--enable-lora", "--max-lora-rank", str(max_rank)]
        arguments += ["--lora-modules", f"{NAME}={path}"]
    return [*arguments, *(["--trust-remote-code"] if trust_remote_code else [])]


def _context(folder: Path, length: int) -> int | None:
    """Tokens that the server must have room for; None for the model's own limit."""
    limit = _read_json(folder / "config.json").get("max_position_embeddings")
    return length if limit is None or length < limit else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _stops_at(client: ServerClient, ids: Sequence[int], end: int) -> bool:
    """Whether an answer ends at a token: the server samples this token only."""
    body = {"model": NAME, "prompt": list(ids), "max_tokens": 2, "allowed_token_ids": [end]}
    (choice,) = client.post("/v1/completions", body | GREEDY)["choices"]
    return choice["finish_reason"] == "stop" and len(choice["token_ids"]) == 1


def _complete(
    client: ServerClient,
    probe: Probe,
    decode: Callable[[Sequence[int]], str],
    variables: Mapping[str, Any],
    logits: np.ndarray[Any, Any],
) -> ProbeResult:
    """The greedy answer to a prompt that the server renders and tokenizes."""
    body = {"model": NAME, "max_tokens": MAX_NEW_TOKENS, **GREEDY}
    try:
        if probe.messages is None:
            body |= {"prompt": probe.text}
            (choice,) = client.post("/v1/completions", body)["choices"]
            ids = tuple(choice["prompt_token_ids"])
        else:
            body |= {"messages": [dict(m) for m in probe.messages]}
            body |= {"chat_template_kwargs": dict(variables)}
            reply = client.post("/v1/chat/completions", body)
            (choice,) = reply["choices"]
            ids = tuple(reply["prompt_token_ids"])
    except RequestRefused as error:
        return ProbeResult(error.message, None, (), (), None, logits)
    text = probe.text
    if ids != probe.ids:
        reply = client.post("/detokenize", {"model": NAME, "tokens": list(ids)})
        text = text if reply["prompt"] == decode(probe.ids) else reply["prompt"]
    completion = tuple(choice["token_ids"])
    return ProbeResult(None, text, ids, completion, choice["finish_reason"], logits)


def _logits(client: ServerClient, probe: Probe, answer: ProbeResult) -> np.ndarray[Any, Any]:
    """Log-probabilities [N, V] at the run's answer tokens, from the most likely tokens."""
    size = answer.logits.shape[1]
    body = {"model": NAME, "prompt": [*probe.ids, *answer.completion], "max_tokens": 1}
    body |= {"prompt_logprobs": min(size, MAX_LOGPROBS)}
    (choice,) = client.post("/v1/completions", body | GREEDY)["choices"]
    rows = choice["prompt_logprobs"][len(probe.ids) :]
    return np.stack(
        [
            complete_distribution(
                {int(token): entry["logprob"] for token, entry in row.items()}, logits
            )
            for row, logits in zip(rows, answer.logits, strict=True)
        ]
    )


def complete_distribution(
    logps: Mapping[int, float], logits: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Log-probabilities [V] of all tokens, from those of the most likely ones.

    logits [V]: of the run. The other tokens share the remaining probability as in the run, so that
    the KL divergence is that of the distribution over the most likely tokens and the rest, which
    is at most the complete one. None of them is likelier than the most likely ones. logps may
    have an unlikely token as well: the one that follows.
    """
    values = np.full(len(logits), -np.inf)
    tokens = [token for token in logps if token < len(logits)]
    values[tokens] = [logps[token] for token in tokens]
    others = np.isneginf(values)
    if others.any() and tokens:
        run = log_softmax(logits[None])[0, others]
        rest = max(1.0 - float(np.exp(values[tokens]).sum()), 1e-9)
        run_rest = max(float(np.exp(run).sum()), 1e-300)
        shared = run + np.log(rest) - np.log(run_rest)
        values[others] = np.minimum(shared, sorted(logps.values())[-MAX_LOGPROBS:][0])
    return values


def _failure(error: UserError | ServerLost, server: Server, folder: Path) -> UserError:
    """Why a folder could not be served, with the line of the server's log that names the error."""
    lines = server.log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line.strip() for line in lines if "Error: " in line]
    message = error.message.partition("\n")[0] if isinstance(error, UserError) else str(error)
    reason = named[-1].rpartition(") ")[2] if named else message
    is_memory = any(text in line for line in lines for text in MEMORY_ERRORS)
    if is_memory or getattr(error, "code", "") == "rollout-server-not-started":
        return UserError(
            f"vLLM could not start ({reason})",
            code="vllm-broken",
            where=PYTHON,
            fix="free memory, then use --verify-only --vllm",
        )
    return UserError(
        f"vLLM cannot serve this folder ({reason})",
        code="vllm-failed",
        where=folder.name,
        fix=f"run `vllm serve {folder.name}` to read its log, and use transformers until it starts",
    )
