"""Measure the losses of other texts under a policy, before and after training."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from valence.config.needs import other_text
from valence.data.encode import Encoder
from valence.distributed.process_group import gather_objects, run_on_first_rank
from valence.errors import UserError
from valence.evaluation.forgetting import TextLoss, TextLosses, measure_forgetting, read_texts
from valence.models.build import position_limit
from valence.reports.console import Progress
from valence.reports.run_record import EVALUATIONS
from valence.rollouts.hf import evaluating
from valence.storage import add_checksum, read_object
from valence.training.folder import RunFolder
from valence.training.sampling import check_can_generate
from valence.training.scorers import count_tokens, sum_logps
from valence.training.trainer import Trainer
from valence.types import Demonstration, TokenizedExample

FILE = f"{EVALUATIONS}/other_text.json"
"""The losses before training, for a run that is resumed."""
MAX_TOKENS = 1024
"""Texts with more tokens are left out."""


def text_losses(trainer: Trainer, texts: Sequence[Demonstration]) -> TextLosses:
    """Compute the losses of texts under the policy, without the token that ends each text. All
    processes call it.

    Logits, and all that follows from them, are float32. Raises UserError for a reward model, for a
    text that cannot be tokenized, without texts that are short enough, and for a loss that is not
    finite.
    """
    check_can_generate(trainer.prepared.method, "other texts")
    encoder = _encoder(trainer)
    encoded = encoder.encode_all(texts)
    if bad := [row for row in encoded.unusable if not row.dropped]:
        raise UserError(bad[0].reason, code=bad[0].code, where=str(bad[0].origin), fix=bad[0].fix)
    units = [_without_end(unit, encoder.end_ids) for unit in encoded.units]
    if not units:
        raise UserError(
            f"all texts have more than {encoder.max_length} tokens",
            code="no-usable-rows",
            where=texts[0].origin.path,
            fix="split them into shorter texts",
        )
    scores = trainer.retry.run("evaluation", lambda: _score(trainer, units))
    if wrong := [i for i, (logp, _) in scores.items() if not math.isfinite(logp)]:
        raise UserError(
            "the log-likelihood of a text is not finite",
            code="sampling-failed",
            where=str(units[wrong[0]].origin),
            fix="set model.dtype: float32; if the error remains, the weights are not finite",
        )
    losses = {
        unit.id: TextLoss(-scores[i][0], scores[i][1], _num_bytes(encoder, unit))
        for i, unit in enumerate(units)
    }
    return TextLosses(encoder.vocab.digest, losses)


def _encoder(trainer: Trainer) -> Encoder:
    """The encoder of the run, with a limit that does not depend on data.max_length."""
    encoder = trainer.prepared.encoder
    limit, is_learned = position_limit(trainer.policy.causal) or (MAX_TOKENS, False)
    return Encoder(
        encoder.tokenizer,
        max_length=min(MAX_TOKENS, limit) if is_learned else MAX_TOKENS,
        as_chat=encoder.as_chat,
        chat_template_kwargs=encoder.template.kwargs,
        stop_ids=encoder.stop_ids,
    )


def _without_end(unit: TokenizedExample, end_ids: Collection[int]) -> TokenizedExample:
    (answer,) = unit.answers
    if answer.ids[-1] not in end_ids:
        return unit
    shorter = replace(answer, ids=answer.ids[:-1], mask=answer.mask[:-1], columns=())
    return replace(unit, answers=(shorter,))


def _num_bytes(encoder: Encoder, unit: TokenizedExample) -> int:
    """Bytes of the text of the tokens that are predicted."""
    (answer,) = unit.answers
    ids = [id for id, is_read in zip(answer.ids, answer.mask, strict=True) if is_read]
    return len(str(encoder.tokenizer.decode(ids)).encode())


def _score(trainer: Trainer, units: Sequence[TokenizedExample]) -> dict[int, tuple[float, int]]:
    """The log-probability and the tokens of each unit. Each process computes a share."""
    objective, policy = trainer.state.objective, trainer.policy
    local: list[tuple[int, tuple[float, int]]] = []
    with (
        Progress(trainer.messages.console, "other texts", len(units), brief=True) as bar,
        trainer.stop.deferred(),
        trainer.state.evaluation_weights(),
        evaluating(policy),
        policy.tempered(1.0),
        torch.no_grad(),
    ):
        rounds = objective.rounds(objective.divide(units), lambda _: trainer.stop.check())
        for batch, is_dummy in rounds:
            with rounds.running():
                logps = sum_logps(batch, policy(batch).logp).tolist()
                values = zip(logps, count_tokens(batch).tolist(), strict=True)
                if not is_dummy:
                    local += zip(batch.unit.tolist(), values, strict=True)
            bar.update(min(len(local) * objective.group.size, len(units)))
    return dict(pair for share in gather_objects(objective.group, local) for pair in share)


# Runs


def losses_before_training(trainer: Trainer) -> TextLosses | None:
    """The losses before the first step; of a run that is resumed, those in its folder.

    None if they are not to be measured, or unknown.
    """
    path, folder = other_text(trainer.recipe), trainer.folder
    if path is None or folder is None:
        return None
    if trainer.step == 0:
        losses = text_losses(trainer, read_texts(path))
        folder.write(FILE, add_checksum(losses.to_dict()))
        return losses
    content = run_on_first_rank(trainer.world, lambda: _read_losses(trainer, folder))
    return None if content is None else TextLosses.from_dict(content)


def _read_losses(trainer: Trainer, folder: RunFolder) -> dict[str, Any] | None:
    try:
        return TextLosses.from_dict(read_object(folder.path / FILE)).to_dict()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        trainer.messages.warn(
            f"forgetting is not measured, because the losses of other texts before training cannot "
            f"be read ({error})"
        )
        return None


def record_forgetting(trainer: Trainer, folder: RunFolder, before: TextLosses | None) -> None:
    """Record how the losses have changed since before training in run.json."""
    result = None
    if before is not None and (path := other_text(trainer.recipe)) is not None:
        try:
            result = measure_forgetting(before, text_losses(trainer, read_texts(path))).to_dict()
        except UserError as error:  # the run is trained: its model must be written
            trainer.messages.note_once(f"forgetting was not measured: {error}")
    if result is not None or "forgetting" in folder.facts:
        folder.record(forgetting=result)
