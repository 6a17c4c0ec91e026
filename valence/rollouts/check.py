"""Whether a server's weights are the trainer's: the same tokens must have the same
log-probabilities on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from valence.errors import UserError
from valence.rollouts.protocol import Pair, Sampling, Served

Rows = Sequence[Sequence[float]]
"""Log-probabilities (nats) of the tokens of several answers."""

Measure = Callable[[Sequence[Pair], float], Rows]
"""The trainer's log-probabilities of answers at a temperature."""

LENGTH = 16
"""Tokens of an answer that are compared."""

ROUNDED = 0.3
"""Nats per token, on average, that rounding weights to 16 bits can make on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What tells one cause of a difference from another. Whatever is not known is left out.

    read, ours_read: log-probabilities at temperature 1 of the same tokens, the server's as it reads
    a prompt, without its prefix cache, and the trainer's. dtypes: the trainer's and the server's,
    which ``check`` asks for. tied: whether the output head shares the embeddings' weights. agreed:
    whether an earlier version was the same. adapter: whether one is what is sent.
    """

    temperature: float = 1.0
    read: Rows = ()
    ours_read: Rows = ()
    dtypes: tuple[str, str] = ("", "")
    tied: bool = False
    agreed: bool = False
    adapter: bool = False


def check(
    generator: Served,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sampling,
    measure: Measure,
    threshold: float,
    *,
    evidence: Evidence = Evidence(),
) -> float:
    """Lets the server answer ``prompts``; mean |difference| of its log-probabilities from the
    trainer's (nats per token).

    Only on a difference beyond ``threshold`` is more asked of the server, to say where it comes
    from: see ``compare``.
    """
    short = replace(sampling, max_new_tokens=min(LENGTH, sampling.max_new_tokens), top_p=1.0)
    answers = [row[0] for row in generator.generate(prompts, 1, short)]
    pairs = [(prompt, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    theirs = [answer.logps for answer in answers]
    # At temperature 0 log-probabilities are those at temperature 1.
    temperature = sampling.temperature or 1.0
    ours = measure(pairs, temperature)
    if difference(ours, theirs) <= threshold:
        return difference(ours, theirs)
    more = replace(
        evidence,
        temperature=temperature,
        read=generator.logps(pairs),
        ours_read=measure(pairs, 1.0),
        dtypes=(evidence.dtypes[0], generator.dtype),
    )
    return compare(ours, theirs, threshold, evidence=more)


def compare(
    ours: Rows, theirs: Rows, threshold: float, *, evidence: Evidence = Evidence()
) -> float:
    """Mean |ours - theirs| (nats per token).

    Raises UserError beyond ``threshold``, saying which known cause fits.
    """
    mean = difference(ours, theirs)
    if mean <= threshold:
        return mean
    cause, fix = explained(ours, theirs, threshold, evidence)
    worst = max(abs(a - b) for a, b in zip(flat(ours), flat(theirs), strict=True))
    raise UserError(
        f"the server's log-probabilities differ from the trainer's by {mean:.3g} nats per token "
        f"(at most {worst:.3g}). {cause}",
        code="rollout-logps-mismatch",
        where="rollout.max_mismatch",
        fix=fix,
    )


def explained(ours: Rows, theirs: Rows, threshold: float, evidence: Evidence) -> tuple[str, str]:
    """The known cause that fits best, and what would mend it."""
    read = difference(evidence.ours_read, evidence.read) if evidence.read else math.inf
    trainer, server = evidence.dtypes
    if evidence.read and read <= threshold:
        if evidence.temperature != 1.0 and difference(evidence.read, theirs) <= threshold:
            return (
                f"They are those at temperature 1, and rollout.temperature is "
                f"{evidence.temperature:g}",
                "start the server with --logprobs-mode processed_logprobs",
            )
        return (
            "The weights agree when a prompt is read afresh, so that answers came from stale "
            "prefix caches: weights were changed "
            "without a pause, or by another program",
            "restart the server, let nothing else change its weights, and start it with "
            "--no-enable-prefix-caching if it recurs",
        )
    if trainer != server and all(evidence.dtypes) and difference(ours, theirs) <= ROUNDED:
        return (
            f"The trainer computes in {trainer} and the server in {server}, which fits a "
            f"difference of this size",
            f"start the server with --dtype {trainer}, or raise rollout.max_mismatch and leave "
            f"loss.correction on",
        )
    if not evidence.agreed:
        return (
            "They have never agreed, so that this may be another model or another tokenizer than "
            "the trainer's"
            + (", or an adapter with settings that vLLM does not take" if evidence.adapter else ""),
            "start the server with the model that the recipe names in model.name"
            + (", or with a rollout.transport for whole weights" if evidence.adapter else ""),
        )
    if evidence.tied:
        return (
            "An earlier version agreed and the model's output head is tied to its embeddings, "
            "which on a CPU keeps its old "
            "values unless it is packed again after an update, as Valence's plugin does",
            "see that the server loads Valence's plugin of the same version as the trainer's "
            "(docs/vllm.md), and restart it",
        )
    return (
        "An earlier version agreed, so that the update reached only a part of the weights",
        "restart the server: it is then sent everything; if it recurs, use another "
        "rollout.transport",
    )


def difference(ours: Rows, theirs: Rows) -> float:
    """Mean absolute difference over all tokens; infinite where one side is not finite."""
    gaps = [abs(a - b) for a, b in zip(flat(ours), flat(theirs), strict=True)]
    mean = sum(gaps) / max(1, len(gaps))
    return mean if math.isfinite(mean) else math.inf


def flat(rows: Rows) -> list[float]:
    """All tokens of all answers."""
    return [value for row in rows for value in row]
