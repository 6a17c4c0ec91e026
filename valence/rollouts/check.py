"""Check that a server has the trainer's weights: the same tokens must have the same
log-probabilities on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from valence.errors import UserError
from valence.rollouts.protocol import Pair, Sampling, Served

Rows = Sequence[Sequence[float]]
"""Log-probabilities (nats) of the tokens of several completions."""

Measure = Callable[[Sequence[Pair], float], Rows]
"""Computes the trainer's log-probabilities of completions at a temperature."""

MAX_TOKENS_COMPARED = 16
"""Maximum number of tokens of a completion to compare."""

ROUNDING_ERROR = 0.3
"""Mean difference in nats per token that 16-bit weights alone can cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts that distinguish the causes of a difference; unknown facts have their defaults.

    read, trainer_read: log-probabilities of the same tokens at temperature 1, by the server as part
    of a prompt, without its prefix cache, and by the trainer. dtypes: of the trainer and the
    server. tied: the output head shares the embeddings' weights. agreed: an earlier version was the
    same. adapter: an adapter is sent. url: address of the server, if there are several.
    """

    temperature: float = 1.0
    read: Rows = ()
    trainer_read: Rows = ()
    dtypes: tuple[str, str] = ("", "")
    tied: bool = False
    agreed: bool = False
    adapter: bool = False
    url: str = ""


def check(
    generator: Served,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    measure: Measure,
    threshold: float,
    *,
    evidence: Evidence = Evidence(),
) -> float:
    """Sample completions of ``prompts`` on the server, and return the mean |difference| of its
    log-probabilities from the trainer's (nats per token).

    If it exceeds ``threshold``, collect evidence from the server: see ``compare``.
    """
    short = replace(
        sampling, max_new_tokens=min(MAX_TOKENS_COMPARED, sampling.max_new_tokens), top_p=1.0
    )
    completions = [row[0] for row in generator.generate(prompts, 1, short)]
    pairs = [(prompt, c.tokens) for prompt, c in zip(prompts, completions, strict=True)]
    server_logps = [c.logps for c in completions]
    # at temperature 0, log-probabilities are those at temperature 1
    temperature = sampling.temperature or 1.0
    trainer_logps = measure(pairs, temperature)
    if difference(trainer_logps, server_logps) <= threshold:
        return difference(trainer_logps, server_logps)
    full_evidence = replace(
        evidence,
        temperature=temperature,
        read=generator.logps(pairs),
        trainer_read=measure(pairs, 1.0),
        dtypes=(evidence.dtypes[0], generator.dtype),
    )
    return compare(trainer_logps, server_logps, threshold, evidence=full_evidence)


def compare(
    trainer_logps: Rows, server_logps: Rows, threshold: float, *, evidence: Evidence = Evidence()
) -> float:
    """Mean |trainer_logps - server_logps| (nats per token).

    Raises UserError with the most likely cause if it exceeds ``threshold``.
    """
    mean = difference(trainer_logps, server_logps)
    if mean <= threshold:
        return mean
    cause, fix = explain(trainer_logps, server_logps, threshold, evidence)
    worst = max(
        abs(a - b) for a, b in zip(flatten(trainer_logps), flatten(server_logps), strict=True)
    )
    raise UserError(
        f"the server's log-probabilities differ from the trainer's by {mean:.3g} nats per token "
        f"(maximum {worst:.3g}). {cause}",
        code="rollout-logps-mismatch",
        where=f"rollout.max_mismatch{evidence.url and f' ({evidence.url})'}",
        fix=fix,
    )


def explain(
    trainer_logps: Rows, server_logps: Rows, threshold: float, evidence: Evidence
) -> tuple[str, str]:
    """The most likely cause, and its fix."""
    read = difference(evidence.trainer_read, evidence.read) if evidence.read else math.inf
    trainer, server = evidence.dtypes
    if evidence.read and read <= threshold:
        if evidence.temperature != 1.0 and difference(evidence.read, server_logps) <= threshold:
            return (
                f"The server reports log-probabilities at temperature 1, but rollout.temperature "
                f"is {evidence.temperature:g}",
                "start the server with --logprobs-mode processed_logprobs",
            )
        return (
            "The weights agree, but the server used a stale prefix cache: its weights were changed "
            "without a pause, or by another program",
            "restart the server and let no other program change its weights; if the problem "
            "recurs, start it with --no-enable-prefix-caching",
        )
    if (
        trainer != server
        and all(evidence.dtypes)
        and difference(trainer_logps, server_logps) <= ROUNDING_ERROR
    ):
        return (
            f"The trainer computes in {trainer} and the server in {server}, which can cause a "
            f"difference of this size",
            f"start the server with --dtype {trainer}, or raise rollout.max_mismatch and do not "
            f"turn off loss.correction",
        )
    if not evidence.agreed:
        return (
            "They have never agreed: the server may have another model or tokenizer than the "
            "trainer"
            + (", or an adapter with settings that vLLM ignores" if evidence.adapter else ""),
            "start the server with the model of the recipe (model.name)"
            + (", or with a rollout.transport for full weights" if evidence.adapter else ""),
        )
    if evidence.tied:
        return (
            "An earlier version of the weights agreed, and the model's output head is tied to its "
            "embeddings: on a CPU it keeps its old values unless it is packed again after an "
            "update, as Valence's plugin does",
            "install the plugin of the same version of Valence on the server (`valence docs "
            "vllm`), and "
            "restart it",
        )
    return (
        "An earlier version of the weights agreed: the last update reached only some of them",
        "restart the server, which then receives all weights; if the problem recurs, use another "
        "rollout.transport",
    )


def difference(trainer_logps: Rows, server_logps: Rows) -> float:
    """Mean absolute difference over all tokens; infinite if one side is not finite."""
    gaps = [abs(a - b) for a, b in zip(flatten(trainer_logps), flatten(server_logps), strict=True)]
    mean = sum(gaps) / max(1, len(gaps))
    return mean if math.isfinite(mean) else math.inf


def flatten(rows: Rows) -> list[float]:
    """All tokens of all completions."""
    return [value for row in rows for value in row]
