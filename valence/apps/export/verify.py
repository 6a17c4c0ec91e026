"""Compare an exported model with its run, and name the causes of differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from valence.apps.export.probes import ArtifactResult, Probe, ProbeResult, log_softmax

FOLDERS = ("model", "adapter", "vllm")
"""Kinds of a folder with weights: in transformers, and in vLLM."""
UNROUNDED = (*FOLDERS, "f32", "f16", "bf16")
"""Kinds of files that contain the weights as they were trained."""
MAX_KL = dict.fromkeys(UNROUNDED, 0.01) | {"q8_0": 0.05}
"""Mean KL divergence (nats per token) up to which a type counts as the same model."""
MAX_KL_QUANTIZED = 1.0
"""The limit for types of fewer than 8 bits, and for runs on a 4-bit base model. Rounding changes
the model much: only a damaged file exceeds it.
"""
MAX_TOKEN_KL = 0.5
"""KL divergence of a single token (nats) up to which a file with weights as they were trained
counts as the same model. A damaged row of the embedding affects few tokens, not the mean.
"""
MAX_KL_BASE = 0.1
MIN_AGREEMENT_BASE = 0.9
"""Limits for a run on a 4-bit base model, whose export has the unquantized one: beyond them the
exported model is right, but not the one that was trained and measured.
"""
MAX_ROUNDING = 0.003
"""Relative error of a tensor that is stored in 16 bits, at most: twice that of bfloat16."""
MAX_SHOWN = 3
"""Differences of one kind that a message names."""
CONTEXT = 24
"""Characters shown before and after the first difference of two texts."""

Status = Literal["verified", "differs", "not verified"]


@dataclass(frozen=True)
class ExportDifference:
    """A difference and its cause. severity: an ``error`` makes the file unfit for use."""

    code: str
    severity: Literal["error", "warning"]
    message: str
    fix: str


@dataclass(frozen=True)
class Verification:
    """How an exported file compares with the run.

    file: its name in the folder. kind: a GGUF type; ``model`` or ``adapter``, for the folder in
    transformers; or ``vllm``, for the folder in vLLM. status: ``not
    verified`` if nothing could run it. same_text, same_tokens: prompts that render to the same text
    and tokens. agreement: fraction of the run's answer tokens that are the most likely ones here
    too. same_answers: greedy answers that are equal, with the way they end. kl_mean, kl_max: KL
    divergence from the run's distribution (nats per token). stops: the end tokens of the run at
    which this file's program stops too, of num_ends.
    """

    file: str
    kind: str
    status: Status
    runtime: str | None = None
    reason: str | None = None
    size: int = 0
    prompts: int = 0
    same_text: int = 0
    same_tokens: int = 0
    answer_tokens: int = 0
    agreement: float = 0.0
    same_answers: int = 0
    kl_mean: float = 0.0
    kl_max: float = 0.0
    stops: int = 0
    num_ends: int = 0
    differences: tuple[ExportDifference, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """All fields, for a JSON file. Numbers that are not finite become None."""
        values = asdict(self)
        for name in ("agreement", "kl_mean", "kl_max"):
            if not np.isfinite(values[name]):
                values[name] = None
        return values


def compare(
    file: str,
    kind: str,
    probes: Sequence[Probe],
    expected: Sequence[ProbeResult],
    artifact: ArtifactResult,
    *,
    end_names: Sequence[str],
    bos: int | None,
    size: int = 0,
    weights_error: float | None = None,
    rounded_base: bool = False,
    contents: Sequence[ExportDifference] = (),
    other_stops: Sequence[tuple[str, bool]] = (),
    notes: Sequence[str] = (),
) -> Verification:
    """Compare the answers of an exported file with those of the run.

    end_names: the tokens at which the run stops. weights_error: the largest relative error of a
    tensor of the file, if known. rounded_base: the run computed with a 4-bit base model, and the
    file has that model's unquantized weights. contents: differences of fields and tensors, which
    explain other logits. other_stops: tokens at which the program stops and the run does not, and
    whether they are special tokens, which answers hardly contain.
    """
    differences = [
        *contents,
        *_prompt_differences(probes, artifact.results, bos, kind),
        *_stop_differences(end_names, artifact.stops, kind),
    ]
    divergences = [
        _divergence(answer.logits, result.logits)
        for answer, result in zip(expected, artifact.results, strict=True)
    ]
    kl = np.concatenate([values for values, _ in divergences])
    matches = np.concatenate([values for _, values in divergences])
    kl_mean, kl_max = float(kl.mean()), float(kl.max())
    limit = MAX_KL_QUANTIZED if rounded_base else MAX_KL.get(kind, MAX_KL_QUANTIZED)
    max_limit = MAX_TOKEN_KL if kind in UNROUNDED and not rounded_base else math.inf
    problem = None
    if not kl_mean <= limit:
        problem = f"the mean KL divergence is {kl_mean:.3g} nats per token; up to {limit:g}"
    elif not kl_max <= max_limit:
        problem = f"the KL divergence of a token is {kl_max:.3g} nats; up to {max_limit:g}"
    if problem is not None and not contents:
        differences.append(_weights_difference(f"{problem} is normal", kind, weights_error))
    if not any(f.code == "stop-token-added" for f in contents):
        differences += _other_stops(other_stops)
    same_prompts = [r.ids == p.ids for p, r in zip(probes, artifact.results, strict=True)]
    same_answers = [
        (a.completion, a.stop) == (r.completion, r.stop)
        for a, r in zip(expected, artifact.results, strict=True)
    ]
    differences += _ending_differences(probes, expected, artifact.results)
    agreement = float(matches.mean())
    reason = None
    if rounded_base and not (kl_mean <= MAX_KL_BASE and agreement >= MIN_AGREEMENT_BASE):
        reason = (
            f"the run computed with a 4-bit base model, and this file has its unquantized weights: "
            f"{agreement:.0%} of the run's tokens are the most likely ones here (KL divergence "
            f"{kl_mean:.2g} nats per token), and {MIN_AGREEMENT_BASE:.0%} and {MAX_KL_BASE:g} are "
            "required. Evaluate the exported folder before you use it"
        )
    is_equal = not any(f.severity == "error" for f in differences)
    return Verification(
        file=file,
        kind=kind,
        status="differs" if not is_equal else "not verified" if reason else "verified",
        runtime=artifact.runtime,
        reason=reason,
        size=size,
        prompts=len(probes),
        same_text=sum(r.text == p.text for p, r in zip(probes, artifact.results, strict=True)),
        same_tokens=sum(same_prompts),
        answer_tokens=len(kl),
        agreement=agreement,
        same_answers=sum(same_answers),
        kl_mean=kl_mean,
        kl_max=kl_max,
        stops=sum(artifact.stops),
        num_ends=len(artifact.stops),
        differences=tuple(differences),
        notes=tuple(notes),
    )


def _divergence(
    expected: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """KL divergence of each token (nats), and whether the most likely tokens agree.

    expected, logits [N, V]; logits that are missing give an infinite divergence.
    """
    if logits.shape != expected.shape:
        return np.full(len(expected), np.inf), np.zeros(len(expected), bool)
    p, q = log_softmax(expected), log_softmax(logits)
    with np.errstate(invalid="ignore"):
        kl = (np.exp(p) * (p - q)).sum(axis=1)
    kl = np.where(np.isfinite(kl), np.maximum(kl, 0), np.inf)
    return kl, expected.argmax(axis=1) == logits.argmax(axis=1)


def _prompt_differences(
    probes: Sequence[Probe], results: Sequence[ProbeResult], bos: int | None, kind: str
) -> list[ExportDifference]:
    """Why prompts differ: each cause once, with the first prompt that it affects."""
    differences: dict[str, ExportDifference] = {}
    for probe, result in zip(probes, results, strict=True):
        difference = _prompt_difference(probe, result, bos, kind)
        if difference is not None:
            differences.setdefault(difference.code, difference)
    return list(differences.values())


BOS_FIXES = {
    "double-bos": (
        "set tokenizer.ggml.add_bos_token to false, or remove the BOS from the chat template",
        "print one BOS less in chat_template.jinja",
    ),
    "extra-bos": (
        "set tokenizer.ggml.add_bos_token to false",
        "remove the BOS from chat_template.jinja, or from the post-processor in tokenizer.json",
    ),
    "missing-bos": (
        "set tokenizer.ggml.add_bos_token to true",
        "print the BOS in chat_template.jinja, as the run's template does",
    ),
}
"""How to fix a wrong number of BOS tokens in a GGUF file, and in a folder."""


def _prompt_difference(
    probe: Probe, result: ProbeResult, bos: int | None, kind: str
) -> ExportDifference | None:
    def bos_difference(code: str, message: str) -> ExportDifference:
        return ExportDifference(code, "error", message, BOS_FIXES[code][kind in FOLDERS])

    if result.error is not None:
        return ExportDifference(
            "template-failed",
            "error",
            f"the chat template of the file fails on the prompt '{probe.name}': {result.error}",
            "render prompts yourself, or correct the template: "
            + ("chat_template.jinja" if kind in FOLDERS else "llama.cpp supports a part of Jinja"),
        )
    if result.ids == probe.ids and result.text == probe.text:
        return None
    if bos is not None and result.ids[:2] == (bos, bos) and probe.ids[:2] != (bos, bos):
        count = "one" if probe.ids[:1] == (bos,) else "none"
        return bos_difference(
            "double-bos", f"prompts start with two BOS tokens, and the run trained with {count}"
        )
    if bos is not None and result.ids == (bos, *probe.ids):
        return bos_difference(
            "extra-bos", "prompts start with a BOS token, and the run trained without one"
        )
    if bos is not None and probe.ids == (bos, *result.ids):
        return bos_difference("missing-bos", "prompts lack the BOS token that the run trained with")
    if result.text != probe.text:
        expected, actual = _around_mismatch(probe.text, result.text or "")
        return ExportDifference(
            "template-differs",
            "error",
            f"the chat template renders the prompt '{probe.name}' differently: "
            f"{actual!r} instead of {expected!r}",
            "write the template that the run trained with into the file",
        )
    if result.ids == probe.ids:
        return None
    first = _first_mismatch(probe.ids, result.ids)
    return ExportDifference(
        "tokens-differ",
        "error",
        f"the tokenizer splits the prompt '{probe.name}' differently from token {first + 1} of "
        f"{len(probe.ids)}: {list(result.ids[first : first + 4])} instead of "
        f"{list(probe.ids[first : first + 4])}",
        "the tokenizer has another pre-tokenizer or other added tokens; "
        + ("export the run again" if kind in FOLDERS else "convert the exported folder again"),
    )


def _first_mismatch(a: Sequence[Any], b: Sequence[Any]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _around_mismatch(expected: str, actual: str) -> tuple[str, str]:
    """Both texts around their first difference."""
    first = _first_mismatch(expected, actual)
    start = max(0, first - CONTEXT)
    return expected[start : first + CONTEXT], actual[start : first + CONTEXT]


def _stop_differences(
    end_names: Sequence[str], stops: Sequence[bool], kind: str
) -> list[ExportDifference]:
    missing = [name for name, stop in zip(end_names, stops, strict=True) if not stop]
    if not missing:
        return []
    # The first one ends the answers that the run trained on.
    severity = "error" if not stops[0] else "warning"
    return [
        ExportDifference(
            "stop-token-missing",
            severity,
            f"generation does not stop at {', '.join(missing)}, where the run stops",
            "add these to eos_token_id in generation_config.json"
            if kind in FOLDERS
            else "pass these as stop strings, as the Modelfile does",
        )
    ]


def extra_stop(
    names: Sequence[str], severity: Literal["error", "warning"] = "error"
) -> ExportDifference:
    """The difference of a file with which answers end at further tokens."""
    shown = ", ".join(repr(name) for name in names[:MAX_SHOWN])
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return ExportDifference(
        "stop-token-added",
        severity,
        f"generation stops at {shown}{more}, where the run does not stop",
        "remove these from the end tokens of the file, or export the run again",
    )


def _other_stops(tokens: Sequence[tuple[str, bool]]) -> list[ExportDifference]:
    texts = [name for name, is_special in tokens if not is_special]
    special = [name for name, is_special in tokens if is_special]
    return [
        *([extra_stop(texts)] if texts else []),
        *([extra_stop(special, "warning")] if special else []),
    ]


def _ending_differences(
    probes: Sequence[Probe], expected: Sequence[ProbeResult], results: Sequence[ProbeResult]
) -> list[ExportDifference]:
    """Answers that go on behind the token at which the run stops."""
    for probe, answer, result in zip(probes, expected, results, strict=True):
        n = len(answer.completion)
        if (
            answer.stop == "stop"
            and answer.completion == result.completion[:n] != result.completion
        ):
            return [
                ExportDifference(
                    "runs-on",
                    "error",
                    f"the answer to '{probe.name}' continues after the token where the run stops",
                    "write the run's end tokens into the file",
                )
            ]
    return []


def _weights_difference(problem: str, kind: str, weights_error: float | None) -> ExportDifference:
    rounding = kind not in UNROUNDED
    if weights_error is None:
        cause, fix = "the weights or settings differ from those of the run", "export the run again"
    elif weights_error > (0.5 if rounding else MAX_ROUNDING):
        cause = f"stored weights differ from the exported ones (relative error {weights_error:.2g})"
        fix = "write the file again"
    elif rounding:
        cause = f"rounding to {kind} (relative error of the weights {weights_error:.2g})"
        fix = "use a type with more bits"
    else:
        cause = (
            "stored weights are right, so the program computes the model differently (RoPE, norms, "
            "attention windows or soft-capping)"
        )
        others = "transformers" if kind == "vllm" else "vLLM or transformers"
        fix = f"do not use this program; use {others}, and report the architecture"
    return ExportDifference("logits-differ", "error", f"{problem}. Cause: {cause}", fix)
