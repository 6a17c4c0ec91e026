"""Checks of a model before it is used: it is causal, and its packed layout equals its own forward.

The absence of influence is checked by gradients: the gradient of a token's log-probability (or of a
sequence's score) with respect to the embedding of another token is exactly zero. Rounding can
neither hide an influence nor look like one, in any dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor, nn

from valence.errors import UserError, out_of_memory
from valence.models.attention import CannotPackError
from valence.models.context import TokenShard
from valence.models.policy_model import PolicyModel, rotary_by_length
from valence.types import MicroBatch, sent

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference (nats per token, or of a score) between the layouts that rounding explains."""

PROMPT_END, FIRST_END = 6, 14
"""Ends of the prompt and of the first completion among the 24 tokens of the check."""
FAILURES = (
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    IndexError,
    KeyError,
    AssertionError,
    ArithmeticError,
    SubprocessError,
)
"""Errors of a model that does not support what it is asked for, and of compilers, which Triton runs
as programs. Those of Triton itself are in ``compiler_failures``.
"""
BACKEND_PROBLEMS = ("packing-fails", "sequences-leak", "layouts-differ", "other-process")
"""Problems of packing that another attention backend may not have. The others are of the model."""


class PackingWarning(UserWarning):
    """A model computes one sequence at a time, or packed with a slower attention backend. code: a
    short name of the reason.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def check_layout(engine: PolicyModel, where: str = "model.name") -> None:
    """Choose the layout of the engine: packed, with the first attention backend that equals the
    model's own forward; otherwise one sequence at a time. Warn unless it is the first backend.

    where: the setting that names the model, for messages.

    Raises UserError when the model is not causal, or no attention backend runs on a CUDA device and
    VALENCE_ATTENTION does not allow one sequence at a time, which is several times slower.
    """
    size = int(engine.causal.get_input_embeddings().weight.shape[0])
    problems: dict[str, CannotPackError] = {}
    with torch.inference_mode(False), torch.enable_grad():
        tokens = torch.randint(0, size, (24,), generator=torch.Generator().manual_seed(0)).to(
            engine.device
        )
        engine.lay_out(packed=False)
        _check_causal(engine, tokens, where)
        batch = plain_batch([tokens[PROMPT_END:FIRST_END], tokens[FIRST_END:]], tokens[:PROMPT_END])
        if engine.attention_candidates != ("one_by_one",):
            problems = _choose_backend(engine, batch)
    if engine.packs and problems:
        backend, reason = next(iter(problems.items()))
        message = (
            f"the attention backend {backend} does not work for {type(engine.causal).__name__} "
            f"here ({reason}): {engine.attention_backend} is used, which is exact and may be slower"
        )
        warnings.warn(PackingWarning(message, "attention-fallback"), stacklevel=4)
    elif engine.context is not None and not engine.packs:
        reason = next((str(problem) for problem in problems.values()), "VALENCE_ATTENTION")
        raise UserError(
            f"tokens of {type(engine.causal).__name__} cannot be shared by processes, because its "
            f"sequences are not packed ({reason})",
            code="context-unsupported",
            where="parallel.context",
            fix="set parallel.context: 1",
        )
    elif problems:
        engine.lay_out(packed=False)
        _warn_or_refuse(engine, problems)
    # FSDP keeps weights gathered after a forward with a gradient that no backward pass follows.
    if engine.is_sharded:
        with torch.no_grad():
            scores_or_logps(engine, batch)


def _choose_backend(engine: PolicyModel, batch: MicroBatch) -> dict[str, CannotPackError]:
    """Try the attention backends in order, and leave the engine packed with the first one that
    works. Return the problems of the others by their names.
    """
    problems: dict[str, CannotPackError] = {}
    for backend in engine.attention_candidates:
        engine.lay_out(packed=False, attention=backend)
        problem = _packing_problem(engine, batch)
        # All processes use the same layout, since sharded weights need equally many forwards.
        if engine.max_over_ranks(int(problem is not None)) and problem is None:
            problem = CannotPackError("packing fails in another process", code="other-process")
        if problem is None:
            break
        engine.lay_out(packed=False)
        problems[backend] = problem
        if problem.code not in BACKEND_PROBLEMS:
            break
    return problems


def _warn_or_refuse(engine: PolicyModel, problems: Mapping[str, CannotPackError]) -> None:
    """Warn that the engine runs one sequence at a time; raise UserError if the reason is that no
    attention backend runs on a CUDA device.
    """
    model, problem = type(engine.causal).__name__, list(problems.values())[-1]
    if engine.device.type == "cuda" and problem.code == "packing-fails":
        reasons = "; ".join(f"{backend}: {reason}" for backend, reason in problems.items())
        raise UserError(
            f"no attention backend computes packed sequences of {model} on this device ({reasons})",
            code="packing-fails",
            where="VALENCE_ATTENTION",
            fix="fix the first problem (Triton needs a C compiler), or set "
            "VALENCE_ATTENTION=one_by_one: each sequence is computed separately, which is exact "
            "but several times slower",
        )
    message = (
        f"{model} does not support packed sequences ({problem}): "
        "each sequence is computed separately, which is exact but slower"
    )
    warnings.warn(PackingWarning(message, problem.code), stacklevel=5)


def _check_causal(engine: PolicyModel, tokens: Tensor, where: str) -> None:
    """Raise UserError when a token's probability depends on tokens after it."""
    with _record_embeddings(engine.causal) as embeddings:
        outputs = engine.outputs(tokens)[:-1]
    (grad,) = torch.autograd.grad(outputs.sum(), embeddings[0])
    if _has_influence(grad[:, -1]):
        raise UserError(
            f"{type(engine.causal).__name__} is not a causal language model: a token's "
            f"probability depends on later tokens",
            code="model-not-causal",
            where=where,
            fix="use a decoder, such as Llama, Qwen, Gemma or GPT-2; an encoder such as BERT "
            "has no next-token probabilities",
        )


def _packing_problem(engine: PolicyModel, batch: MicroBatch) -> CannotPackError | None:
    """Compare two completions of one prompt, packed and one by one. Return the problem, or None and
    leave the engine packed.
    """
    if rotary_by_length(engine.causal):
        message = "its rotary positions depend on the longest sequence of the micro-batch"
        return CannotPackError(message, code="rotary-by-length")
    with torch.no_grad():
        expected = scores_or_logps(engine, batch)
    engine.lay_out(packed=True)
    try:
        packed, grads = _influences(engine, batch)
        engine.max_joint_rows = 0  # the second completion now needs a second pass
        two_passes = scores_or_logps(engine, replace(batch, requires_grad=(True, False))).detach()
    except CannotPackError as error:
        return error
    except compiler_failures() as error:
        if out_of_memory(error):
            raise
        return CannotPackError(
            f"it fails with {type(error).__name__}: {error}", code="packing-fails"
        )
    finally:
        engine.max_joint_rows = type(engine).max_joint_rows
    if _has_influence(grads[0][:, FIRST_END:]) or _has_influence(grads[1][:, PROMPT_END:FIRST_END]):
        return CannotPackError(
            "the tokens of one sequence influence another", code="sequences-leak"
        )
    difference = max((x - expected).abs().max().item() for x in (packed, two_passes))
    dtype = engine.compute or next(engine.model.parameters()).dtype
    if difference <= TOLERANCE[dtype]:
        return None
    return CannotPackError(
        f"log-probabilities or scores differ by {difference:.2g}", code="layouts-differ"
    )


def compiler_failures() -> tuple[type[Exception], ...]:
    """Return FAILURES, and the base class of Triton's errors if it is installed."""
    try:
        from triton.errors import TritonError  # pyright: ignore[reportMissingImports]
    except ImportError:
        return FAILURES
    return (*FAILURES, TritonError)


def _influences(engine: PolicyModel, batch: MicroBatch) -> tuple[Tensor, list[Tensor]]:
    """Return the log-probabilities or scores of both completions, and for each their gradient with
    respect to the embeddings [1, T, h].

    Each gradient has a separate pass, since the backward pass of compiled attention overwrites its
    saved tensors.
    """
    outputs: list[Tensor] = []
    grads: list[Tensor] = []
    for completion in range(2):
        with _record_embeddings(engine.causal) as embeddings:
            outputs.append(scores_or_logps(engine, batch))
        part = outputs[-1].tensor_split([FIRST_END if outputs[-1].ndim == 1 else 1])[completion]
        (grad,) = torch.autograd.grad(part.sum(), embeddings[0])
        grads.append(_of_all_rows(engine, grad))
    return outputs[0].detach(), grads


def _of_all_rows(engine: PolicyModel, grad: Tensor) -> Tensor:
    """Return the gradient [1, T, h] of all rows of a pass from that of the rows of this process; 0
    for the others.
    """
    if engine.context is None:
        return grad
    total = engine.context.size * grad.shape[1]
    shard = TokenShard.of(engine.context, total, grad.device)
    full = grad.new_zeros(1, total, grad.shape[2])
    full[:, sent(shard.rows, grad.device)] = grad
    return full


def scores_or_logps(engine: PolicyModel, batch: MicroBatch) -> Tensor:
    """Return the log-probabilities [T] of a micro-batch, or the scores [S, A] of a reward model."""
    out = engine(batch)
    return out.logp if out.score is None else out.score


@contextmanager
def _record_embeddings(model: Any) -> Iterator[list[Tensor]]:
    """Collect the outputs [1, T, h] of the input embedding inside the block, as leaves with a
    gradient.
    """
    embeddings: list[Tensor] = []

    def record(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        embeddings.append(out.detach().requires_grad_())
        return embeddings[-1].clone()  # some models scale it in place

    handle = model.get_input_embeddings().register_forward_hook(record)
    try:
        yield embeddings
    finally:
        handle.remove()


def _has_influence(grad: Tensor) -> bool:
    """Return whether any gradient is not zero; NaN counts as zero."""
    return bool((grad.nan_to_num() != 0).any())


def plain_batch(sequences: list[Tensor], prompt: Tensor | None = None) -> MicroBatch:
    """Return a micro-batch of token sequences, or of completions that share one prompt.

    The loss mask has every token that follows another one, except those of a prompt.
    """
    device = sequences[0].device
    above = 0 if prompt is None else len(prompt)
    lengths = torch.tensor([len(s) for s in sequences])
    spans = list(pairwise([above, *(above + lengths.cumsum(0)).tolist()]))
    rows = torch.arange(spans[-1][1])
    starts = torch.tensor([start for start, _ in spans])
    owner = torch.repeat_interleave(torch.arange(len(spans)), lengths)
    source, pos, seq = rows - 1, rows.clone(), torch.cat([owner.new_zeros(above), owner])
    source[starts] = above - 1
    pos[above:] += above - starts[owner]
    mask = (rows >= above) & (source >= 0)
    trunk = [] if prompt is None else [prompt]
    tokens = torch.cat([*trunk, *sequences])
    zeros, numbers = sent(torch.zeros_like(lengths), device), sent(torch.zeros(len(spans)), device)
    return MicroBatch(
        tokens=tokens,
        cpu_tokens=tokens.cpu(),
        position_ids=sent(pos, device),
        previous=sent(source, device),
        sequence_ids=sent(seq, device),
        loss_mask=sent(mask, device),
        scored=sent(rows[mask], device),
        cpu_scored=torch.stack([rows[mask], seq[mask]]),
        segments=(*((0, len(t), -1) for t in trunk), *((a, b, len(trunk) - 1) for a, b in spans)),
        leaves=tuple(range(len(trunk), len(trunk) + len(spans))),
        requires_grad=(True,) * len(spans),
        unit=zeros,
        side=zeros,
        label=None,
        weight=numbers + 1,
        margin=numbers,
        soft=numbers + torch.nan,
        target=None,
        group=zeros,
        num_groups=1,
        ids=("",) * len(spans),
    )
