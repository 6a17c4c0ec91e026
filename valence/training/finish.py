"""Train a run to its end: samples before and after, test rows, the exported model, the report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from valence.distributed.process_group import gather_objects, run_on_first_rank
from valence.distributed.tensor_parallel import local
from valence.errors import UserError, for_interface
from valence.models.cache import CachedReference
from valence.reports.run_record import MODEL, SAMPLES, read_samples
from valence.rollouts.protocol import Sampling
from valence.storage import add_checksum
from valence.terminal import output_errors, print_message
from valence.training.evaluate import answer_text, as_text
from valence.training.folder import RunFolder, as_json, now
from valence.training.reference_cache import passes
from valence.training.rounds import Rounds, describe_exclusions
from valence.training.sampling import NOT_FINITE_FIX
from valence.training.signals import Interrupted
from valence.training.state import HEAVY
from valence.training.state_files import Snapshot
from valence.training.text_losses import losses_before_training, record_forgetting
from valence.training.trainer import Trainer
from valence.types import Prompt


def run_to_end(trainer: Trainer) -> Trainer:
    """Sample, train, test, sample again, export the model, and write the report.

    The state is saved after training, and whenever something stops the run. At the end the folder
    is released.
    """
    folder = trainer.folder
    assert folder is not None
    began, earlier = time.monotonic(), float(folder.facts.get("seconds", 0.0))

    def seconds() -> float:
        return earlier + time.monotonic() - began

    status, at_once = "failed", False
    try:
        # State that cannot be saved raises now.
        Snapshot(trainer.state.registry.state_dict(leaving_out=HEAVY))
        with trainer.stop.deferred():
            _open_cache(trainer)
            before, losses = _samples_before(trainer), losses_before_training(trainer)
            trainer.fit()
            _report_end(trainer, folder)
            _check_weights(trainer)
            for phase in (
                _test,
                _measure_trained,
                partial(_samples_after, before=before),
                partial(record_forgetting, before=losses),
            ):
                trainer.stop.check()
                phase(trainer, folder)
            _report_cache(trainer)
            trainer.stop.check()
            folder.record(finished=now(), seconds=seconds(), steps=trainer.step)
            trainer.messages.print("writing the model")
            trainer.model_writer.write(folder.path / MODEL, trainer.recipe.run.export)
        status = "done"
    except KeyboardInterrupt as stopped:
        status, at_once = "interrupted", isinstance(stopped, Interrupted) and stopped.at_once
        raise
    finally:
        trainer.examples.close()
        if not at_once:
            with trainer.stop.local.waiting():  # only a second signal breaks this off
                if status != "done":
                    _save_after_failure(trainer)
                trainer.log.close(status)
                for message in output_errors():
                    folder.note("warnings", message)
                folder.record(finished=now(), seconds=seconds(), steps=trainer.step)
                if trainer.pages is not None:
                    trainer.pages.write(status)
                folder.record(status=status)  # last: what is done is not done again
        try:
            if not at_once:
                trainer.callbacks.on_end(trainer, status)
        finally:
            folder.close()
    return trainer


def _report_end(trainer: Trainer, folder: RunFolder) -> None:
    """Report why training ended, the best evaluation, and what was not trained on."""
    if reason := trainer.ended_early:
        is_planned = bool(trainer.state.early_stop.exhausted)
        report = trainer.messages.note_once if is_planned else trainer.messages.warn
        report(f"training ended at step {trainer.step} of {trainer.total_steps}: {reason}")
        folder.record(ended_early=reason)
    if isinstance(trainer.examples, Rounds) and trainer.examples.exclusions:
        exclusions = trainer.examples.exclusions
        trainer.messages.note_once(f"not trained on: {describe_exclusions(exclusions)}")
        folder.record(exclusions=dict(exclusions))
    best = trainer.state.best
    if best.criterion is not None and best.step not in (None, trainer.step):
        trainer.messages.note_once(
            f"the best evaluation was at step {best.step} ({best.criterion.metric} "
            f"{best.best:.4g}): use `--step best`; model/ has the last weights"
        )


def _test(trainer: Trainer, folder: RunFolder) -> None:
    if "test" in trainer.prepared.corpora:
        result = trainer.evaluate(name="test")
        folder.write("eval/test.json", as_json(trainer.step, result.metrics, result.rows))
        metrics = {f"test/{name}": value for name, value in result.metrics.items()}
        trainer.log.log({"step": trainer.step} | metrics)


def _samples_after(
    trainer: Trainer, folder: RunFolder, before: Sequence[Mapping[str, str]]
) -> None:
    """Write the answers of the trained policy next to those from before training."""
    if before:
        answers = {row["prompt"]: row["before"] for row in _samples(trainer)}
        both = [
            {**row, "after": answers[row["prompt"]]} for row in before if row["prompt"] in answers
        ]
        if len(both) < len(before):  # other held-out rows were allowed since
            trainer.messages.warn(
                f"{len(before) - len(both)} of {len(before)} prompts answered before training "
                f"are no longer in the held-out rows"
            )
        folder.write(SAMPLES, [add_checksum(row) for row in both])


def _measure_trained(trainer: Trainer, folder: RunFolder) -> None:
    """Measure some of the training rows with the trained model."""
    try:
        result = trainer.evaluate_training_rows()
    except UserError as error:
        trainer.messages.note_once(f"the training rows were not measured for the report: {error}")
        return
    if result is not None:
        folder.write("eval/train.json", as_json(trainer.step, result.metrics, result.rows))


def _open_cache(trainer: Trainer) -> None:
    """Free the reference's memory if the cache holds everything that the run will read.

    Prints a note if the cache cannot be used.
    """
    if not isinstance(trainer.reference, CachedReference):
        return
    if trainer.reference.note:
        trainer.messages.note_once(trainer.reference.note)
    units = (unit for group in passes(trainer) for unit in group)
    if not trainer.world.any(not trainer.reference.has_all(units)):
        trainer.reference.unload()


def _report_cache(trainer: Trainer) -> None:
    if isinstance(trainer.reference, CachedReference) and trainer.folder:
        cached = trainer.reference
        cached.hits, cached.misses = map(
            sum,
            zip(*gather_objects(trainer.state.group, [cached.hits, cached.misses]), strict=True),
        )
        trainer.folder.record(
            reference_cache={
                "folder": str(cached.folder),
                "hits": cached.hits,
                "misses": cached.misses,
            }
        )


def _save_after_failure(trainer: Trainer) -> None:
    """Save after a failure, unless an update was under way or the processes are out of sync.

    A failed save must not hide the first failure.
    """
    try:
        assert trainer.saver is not None
        trainer.saver.checkpoints.wait()
        if trainer.step > 0 and trainer.state.is_consistent and trainer.stop.is_synchronized:
            trainer.save()
    except UserError as error:
        message = for_interface(f"the state could not be saved either: {error}")
        print_message(trainer.messages.console, message, "red")


def _check_weights(trainer: Trainer) -> None:
    """Raise UserError when weights are not finite."""
    broken = [
        name
        for name, p in trainer.state.trained_weights.items()
        if not bool(torch.isfinite(local(p)).all())
    ]
    if names := [name for names in gather_objects(trainer.world, broken[:1]) for name in names]:
        raise UserError(
            f"training failed: weights are not finite ({names[0]}); no model was written",
            code="weights-not-finite",
            where=f"step {trainer.step}",
            fix=NOT_FINITE_FIX,
        )


def _samples_before(trainer: Trainer) -> list[dict[str, str]]:
    """Answers of the policy before its first step; when resuming, those saved in the folder."""
    assert trainer.folder is not None
    path = trainer.folder.path / SAMPLES
    if trainer.step == 0:
        samples = _samples(trainer)
        if samples:
            trainer.folder.write(path.name, [add_checksum(row) for row in samples])
        return samples
    return (
        run_on_first_rank(trainer.world, partial(_read_samples, trainer, path))
        if trainer.recipe.run.samples.prompts
        else []
    )


def _read_samples(trainer: Trainer, path: Path) -> list[dict[str, str]]:
    try:
        rows = read_samples(path.parent)
        return [{name: row[name] for name in ("prompt", "before")} for row in rows]
    except (OSError, ValueError, KeyError) as error:
        trainer.messages.warn(
            f"{path}: the answers from before training cannot be read ({error}); the report does "
            f"not compare them with the answers after training"
        )
        return []


def _samples(trainer: Trainer) -> list[dict[str, str]]:
    """Answers of the policy to the first held-out prompts."""
    wanted = trainer.recipe.run.samples
    held_out = trainer.prepared.corpora.get("eval") or trainer.prepared.corpora.get("test")
    if not wanted.prompts or held_out is None:
        return []
    usable = {unit.id for unit in held_out.units}
    rows = [
        Prompt(prompt=example.prompt, info=example.info, origin=example.origin)
        for example in held_out.loaded.examples
        if example.id in usable
    ]
    distinct = list({repr(row.prompt): row for row in rows}.values())[: wanted.prompts]
    sampling = Sampling(
        temperature=wanted.temperature,
        max_new_tokens=wanted.max_new_tokens,
        seed=trainer.recipe.train.seed,
    )
    answers = trainer.sample(distinct, sampling, quiet=False)
    shown = [as_text(row.prompt, trainer.prepared.tokenizer) for row in distinct]
    return [
        {"prompt": prompt, "before": answer_text(answer[0])}
        for prompt, answer in zip(shown, answers, strict=True)
    ]
