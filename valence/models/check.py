"""What is asked of a model before it is used: that it is causal, and that its packed layout equals
its own forward.

Where influence must be absent, gradients are asked: what is said of one token (its log-probability,
or its sequence's score) has exactly no slope in the embedding of another. Rounding cannot hide a
leak from that, nor look like one, whatever the type of the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from valence.errors import UserError
from valence.models.attention import CannotPackError
from valence.models.policy_model import PolicyModel, rotary_by_length
from valence.types import MicroBatch, sent

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference (nats per token, or of a score) between the layouts that rounding explains.

Another computation shows as more.
"""

PROMPT, CUT = 6, 14  # tokens of the prompt, and with the first answer, of 24
FAILURES = (
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    NotImplementedError,
    IndexError,
    KeyError,
)


class PackingWarning(UserWarning):
    """A model runs one sequence at a time. code: a short name of the reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def check_layout(engine: PolicyModel) -> None:
    """Choose the layout of the engine: packed where that equals the model's own forward, else (with
    a PackingWarning) one sequence at a time.

    Raises UserError when the model is not causal.
    """
    size = int(engine.causal.get_input_embeddings().weight.shape[0])
    with torch.inference_mode(False), torch.enable_grad():
        tokens = torch.randint(0, size, (24,), generator=torch.Generator().manual_seed(0)).to(
            engine.device
        )
        engine.lay_out(packed=False)
        _check_causal(engine, tokens)
        batch = plain_batch([tokens[PROMPT:CUT], tokens[CUT:]], tokens[:PROMPT])
        why = _why_not_packed(engine, batch)
    # all of them run alike, or those in lockstep would never meet again
    if engine.most(int(why is not None)) and why is None:
        why = CannotPackError("another process reported it", code="other-process")
    if why:
        engine.lay_out(packed=False)
        message = (
            f"{type(engine.causal).__name__} does not run with packed sequences ({why}): "
            "each sequence runs by itself, which is exact and slower"
        )
        warnings.warn(PackingWarning(message, why.code), stacklevel=4)
    # after a pass that no backward pass followed, weights that it put together are still there
    if engine.is_sharded:
        with torch.no_grad():
            said(engine, batch)


def _check_causal(engine: PolicyModel, tokens: Tensor) -> None:
    """Raises UserError when a token's probability depends on tokens after it."""
    with _embedding(engine.causal) as seen:
        outputs = engine.outputs(tokens)[:-1]
    (slope,) = torch.autograd.grad(outputs.sum(), seen[0])
    if _influence(slope[:, -1]):
        raise UserError(
            f"{type(engine.causal).__name__} is not a causal language model: a token's "
            f"probability depends on later tokens",
            code="model-not-causal",
            where="model.name",
            fix="use a decoder, such as Llama, Qwen, Gemma or GPT-2; an encoder such as BERT "
            "has no next-token probabilities",
        )


def _why_not_packed(engine: PolicyModel, batch: MicroBatch) -> CannotPackError | None:
    """Why two answers behind one prompt are not what they are one by one; None, and the packed
    layout, when they are.
    """
    if rotary_by_length(engine.causal):
        what = "its rotary positions depend on the longest sequence that runs with it"
        return CannotPackError(what, code="rotary-by-length")
    with torch.no_grad():
        alone = said(engine, batch)
    engine.lay_out(packed=True)
    try:
        packed, slopes = _influences(engine, batch)
        engine.along = 0  # the second answer is now read over the first pass's keys and values
        behind = said(engine, replace(batch, requires_grad=(True, False))).detach()
    except torch.OutOfMemoryError:
        raise
    except CannotPackError as error:
        return error
    except FAILURES as error:
        return CannotPackError(
            f"it fails with {type(error).__name__}: {error}", code="packing-fails"
        )
    finally:
        engine.along = type(engine).along
    if _influence(slopes[0][:, CUT:]) or _influence(slopes[1][:, PROMPT:CUT]):
        return CannotPackError(
            "the tokens of one sequence change the results of another", code="sequences-leak"
        )
    difference = max((found - alone).abs().max().item() for found in (packed, behind))
    dtype = engine.compute or next(engine.model.parameters()).dtype
    if difference <= TOLERANCE[dtype]:
        return None
    return CannotPackError(
        f"log-probabilities or scores differ by {difference:.2g}", code="layouts-differ"
    )


def _influences(engine: PolicyModel, batch: MicroBatch) -> tuple[Tensor, list[Tensor]]:
    """What is said of both answers, and of each its slope in the embeddings [1, T, h].

    Each in a pass of its own: a backward pass of compiled attention overwrites what it has read.
    """
    found: list[Tensor] = []
    slopes: list[Tensor] = []
    for answer in range(2):
        with _embedding(engine.causal) as seen:
            found.append(said(engine, batch))
        part = found[-1].tensor_split([CUT if found[-1].ndim == 1 else 1])[answer]
        slopes += torch.autograd.grad(part.sum(), seen[0])
    return found[0].detach(), slopes


def said(engine: PolicyModel, batch: MicroBatch) -> Tensor:
    """What the engine says of a micro-batch: log-probabilities [T], or under a reward model scores
    [S, A].
    """
    out = engine(batch)
    return out.logp if out.score is None else out.score


@contextmanager
def _embedding(model: Any) -> Iterator[list[Tensor]]:
    """Collects what the input embedding gives inside the block ([1, T, h] each), with a
    gradient.
    """
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        seen.append(out.detach().requires_grad_())
        return seen[-1].clone()  # some models scale it in place

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


def _influence(slope: Tensor) -> bool:
    """Whether any slope is there; one that is not a number tells nothing."""
    return bool((slope.nan_to_num() != 0).any())


def plain_batch(sequences: list[Tensor], prompt: Tensor | None = None) -> MicroBatch:
    """A micro-batch of token sequences without anything else to know about them; or of answers to
    one prompt, that it shares.

    Every token is measured that has one before it, but not those of a prompt.
    """
    device = sequences[0].device
    above = 0 if prompt is None else len(prompt)
    lengths = torch.tensor([len(s) for s in sequences])
    spans = list(pairwise([above, *(above + lengths.cumsum(0)).tolist()]))
    rows = torch.arange(spans[-1][1])
    starts = torch.tensor([start for start, _ in spans])
    own = torch.repeat_interleave(torch.arange(len(spans)), lengths)
    source, pos, seq = rows - 1, rows.clone(), torch.cat([own.new_zeros(above), own])
    source[starts] = above - 1
    pos[above:] += above - starts[own]
    mask = (rows >= above) & (source >= 0)
    trunk = [] if prompt is None else [prompt]
    tokens = torch.cat([*trunk, *sequences])
    each, numbers = sent(torch.zeros_like(lengths), device), sent(torch.zeros(len(spans)), device)
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
        unit=each,
        side=each,
        label=None,
        weight=numbers + 1,
        margin=numbers,
        soft=numbers + torch.nan,
        target=None,
        group=each,
        num_groups=1,
        ids=("",) * len(spans),
    )
