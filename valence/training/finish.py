"""What surrounds the loop: answers sampled before and after, the exported model with its card, the
page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from valence.checksums import add_checksum, verify
from valence.data.sampler import canonical_order
from valence.data.targets import ONE
from valence.distributed.fsdp2 import local
from valence.distributed.together import by_first, gathered
from valence.errors import UserError
from valence.models.adapters import merged
from valence.models.build import DTYPES, load_model
from valence.models.cache import CachedReference
from valence.models.scores import Scorer, with_padding
from valence.reports.card import CardFacts, last_record, license_of, model_card
from valence.rollouts.protocol import Sampling
from valence.runs.export import export
from valence.runs.folder import RunFolder, as_json, now, versions
from valence.runs.store import Snapshot
from valence.terminal import output_errors, print_message
from valence.training import measure
from valence.training.evaluate import as_text
from valence.training.loop import Interrupted, Run
from valence.training.online.rounds import describe_exclusions
from valence.training.rendering import in_short
from valence.training.saving import HEAVY
from valence.training.score import passes

LOOKED_AT = 1024
"""Training rows whose scores tell the mean and spread of all: by then the mean is known to a
thirtieth of the spread.
"""


def run_to_end(run: Run) -> Run:
    """Samples, trains, tests, samples again, exports, and writes the page, whatever happens on the
    way.

    What has been trained is saved as soon as it is, and whenever something stops the run. Then the
    folder is free for others.
    """
    folder = run.folder
    assert folder is not None
    began, earlier = time.monotonic(), float(folder.facts.get("seconds", 0.0))

    def seconds() -> float:
        return earlier + time.monotonic() - began

    status, at_once = "failed", False
    try:
        # what cannot be saved is found out now
        Snapshot(run.registry.state_dict(leaving_out=HEAVY))
        # One process that ended by itself would be waited for.
        with run.stop.waiting() if run.world.size > 1 else nullcontext():
            _open_cache(run)
            before = _samples_before(run)
            run.fit()
            run.save()
            _tell_of_the_end(run, folder)
            _refuse_broken(run)
            for phase in (_test, _measure_trained, partial(_samples_after, before=before)):
                _stop_if_asked(run)
                phase(run, folder)
            _report_cache(run)
            _stop_if_asked(run)
            folder.state(finished=now(), seconds=seconds(), steps=run.step)
            if not run.quiet:
                print_message(run.console, "writing the model")
            write_model(run, folder.path / "model", run.recipe.run.export)
        status = "done"
    except KeyboardInterrupt as stopped:
        status, at_once = "interrupted", isinstance(stopped, Interrupted) and stopped.at_once
        raise
    finally:
        if run.rounds is not None:
            run.rounds.collector.close()
        if not at_once:
            with run.stop.waiting():  # only a second signal breaks this off
                if status != "done":
                    _save_what_there_is(run)
                run.log.close(status)
                for message in output_errors():
                    folder.note("warnings", message)
                folder.state(finished=now(), seconds=seconds(), steps=run.step)
                if run.pages is not None:
                    run.pages.write(status)
                folder.state(status=status)  # last: what is done is not done again
        folder.close()
    return run


def _stop_if_asked(run: Run) -> None:
    if run.stops():
        raise run.stop.ended()


def _tell_of_the_end(run: Run, folder: RunFolder) -> None:
    """How the training ended, where it was best, and what was not trained on."""
    if reason := run.ended_early:
        message = f"training ended at step {run.step} of {run.total_steps}: {reason}"
        (run.say_once if run.early.exhausted else run.warn)(message)
        folder.state(ended_early=reason)
    if run.rounds is not None and run.rounds.exclusions:
        run.say_once(f"not imitated: {describe_exclusions(run.rounds.exclusions)}")
        folder.state(exclusions=dict(run.rounds.exclusions))
    if run.best.step not in (None, run.step):
        best = f"{run.best.wanted.metric if run.best.wanted else ''} {run.best.best:.4g}"
        run.say_once(
            f"the best evaluation was at step {run.best.step} ({best}): use `--step best`; "
            f"model/ has the last weights"
        )


def _test(run: Run, folder: RunFolder) -> None:
    if "test" in run.prepared.corpora:
        found = run.evaluate(name="test")
        folder.write("eval/test.json", as_json(run.step, found.metrics, found.rows))
        run.log.log(
            {"step": run.step} | {f"test/{name}": value for name, value in found.metrics.items()}
        )


def _samples_after(run: Run, folder: RunFolder, before: Sequence[Mapping[str, str]]) -> None:
    """Answers of the trained policy beside those of before."""
    if before:
        answers = {row["prompt"]: row["before"] for row in _samples(run)}
        both = [
            {**row, "after": answers[row["prompt"]]} for row in before if row["prompt"] in answers
        ]
        if len(both) < len(before):  # other held-out rows were allowed since
            run.warn(
                f"{len(before) - len(both)} of {len(before)} prompts that were answered before "
                f"training are gone"
            )
        folder.write("samples.json", [add_checksum(row) for row in both])


def _measure_trained(run: Run, folder: RunFolder) -> None:
    """Some of the training rows, as the trained model sees them."""
    try:
        found = measure.evaluate_trained(run)
    except UserError as error:
        run.say_once(f"the training rows were not measured for the report: {error}")
        return
    if found is not None:
        folder.write("eval/train.json", as_json(run.step, found.metrics, found.rows))


def _open_cache(run: Run) -> None:
    """Says when the reference cache is of no use, and frees the reference's memory when it holds
    all that the run will ask.
    """
    if not isinstance(run.reference, CachedReference):
        return
    if run.reference.note:
        run.say_once(run.reference.note)
    if not run.world.any(not run.reference.knows(unit for units in passes(run) for unit in units)):
        run.reference.let_go()


def _report_cache(run: Run) -> None:
    if isinstance(run.reference, CachedReference) and run.folder:
        cached = run.reference
        cached.hits, cached.misses = map(
            sum, zip(*gathered(run.group, [cached.hits, cached.misses]), strict=True)
        )
        run.folder.state(
            reference_cache={
                "folder": str(cached.folder),
                "hits": cached.hits,
                "misses": cached.misses,
            }
        )


def _save_what_there_is(run: Run) -> None:
    """Saves after something went wrong, unless that was while the weights changed, or other
    processes may not know of it. That this fails as well must not hide what went wrong first.
    """
    try:
        assert run.saver is not None
        run.saver.checkpoints.wait()
        if run.step > 0 and run.whole and run.together:
            run.save()
    except UserError as error:
        print_message(run.console, f"the state could not be saved either: {error}", "red")


def _refuse_broken(run: Run) -> None:
    """A model whose last steps were not finite is not written as if it were one."""
    broken = [name for name, p in run.trained.items() if not bool(torch.isfinite(local(p)).all())]
    if names := [name for names in gathered(run.world, broken[:1]) for name in names]:
        raise UserError(
            f"the run ended badly: weights are not finite ({names[0]}); no model was written",
            code="weights-not-finite",
            where=f"step {run.step}",
            fix=measure.BAD,
        )


def _samples_before(run: Run) -> list[dict[str, str]]:
    """Answers of the policy before its first step: those that were kept, when the run is taken up
    later.
    """
    assert run.folder is not None
    kept = run.folder.path / "samples.json"
    if run.step == 0:
        found = _samples(run)
        if found:
            run.folder.write(kept.name, [add_checksum(row) for row in found])
        return found
    return (
        by_first(run.world, partial(_read_samples, run, kept))
        if run.recipe.run.samples.prompts
        else []
    )


def _read_samples(run: Run, kept: Path) -> list[dict[str, str]]:
    try:
        rows = [verify(row) for row in json.loads(kept.read_text(encoding="utf-8"))]
        return [{name: row[name] for name in ("prompt", "before")} for row in rows]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        run.warn(
            f"{kept}: the answers from before the first step are lost ({error}), and none are "
            f"compared"
        )
        return []


def _samples(run: Run) -> list[dict[str, str]]:
    """The first held-out prompts, answered by the policy as it is."""
    wanted = run.recipe.run.samples
    held_out = run.prepared.corpora.get("eval") or run.prepared.corpora.get("test")
    if not wanted.prompts or held_out is None:
        return []
    usable = {unit.id for unit in held_out.units}
    prompts = [example.prompt for example in held_out.loaded.examples if example.id in usable]
    distinct = list({repr(prompt): prompt for prompt in prompts}.values())[: wanted.prompts]
    how = Sampling(
        temperature=wanted.temperature,
        max_new_tokens=wanted.max_new_tokens,
        seed=run.recipe.train.seed,
    )
    answers = run.sample(distinct, how, quiet=run.quiet)
    shown = [as_text(prompt, run.prepared.tokenizer) for prompt in distinct]
    return [
        {"prompt": prompt, "before": answer[0].text}
        for prompt, answer in zip(shown, answers, strict=True)
    ]


About = tuple[PreTrainedTokenizerBase, Mapping[str, Any] | None]
"""What is saved with a model: its tokenizer, and entries of its configuration."""


def about_model(run: Run) -> About:
    """All processes call it."""
    if isinstance(run.policy, Scorer):
        return _of_reward_model(run, run.policy)
    return run.prepared.encoder.tokenizer, None


def write_model(
    run: Run,
    target: Path,
    what: Literal["auto", "merged", "adapter"],
    about: About | None = None,
    log: Path | None = None,
) -> None:
    """The policy as it is, for others to load, with its card.

    All processes call it, but where each holds all weights and ``about`` is known: then one is
    enough. log: of a run without a folder, its metrics.jsonl.
    """
    recipe, encoder = run.recipe, run.prepared.encoder
    scores = isinstance(run.policy, Scorer)
    if scores and what == "adapter":
        raise UserError(
            "an adapter does not say what a reward model's scores are of",
            code="adapter-not-exportable",
            where="run.export",
            fix="write it merged",
        )
    adapted = recipe.model.lora is not None or recipe.model.adapter is not None
    steps = sorted(run.evaluations)
    log = run.folder.path / "metrics.jsonl" if run.folder else log
    card = CardFacts(
        name=Path(recipe.run.dir).name,
        base_model=recipe.model.name,
        method=" + ".join([recipe.method, *(part.method for part in recipe.mix)]),
        loss=recipe.loss,
        settings=_settings_of_the_card(run),
        adapter=adapted and what == "adapter",
        chat=run.prepared.uses_template,
        chat_template_kwargs=encoder.template.kwargs,
        audit=run.audit,
        before=run.evaluations[steps[0]] if len(steps) > 1 else None,
        after=run.evaluations[steps[-1]] if steps else None,
        last=last_record(log, run.step) if log else {},
        license={} if run.world.rank else license_of(recipe.model.name),
        command=str(run.facts.get("command", "")),
        versions=versions(),
        steps=run.step,
        seconds=float(run.facts.get("seconds", 0.0)),
        reward_model=scores,
        finished=run.facts.get("status") != "interrupted",
    )
    tokenizer, config = about or about_model(run)
    if run.world.rank and not run.divided:
        return
    with run.policy.stock():
        export(
            run.policy.model,
            tokenizer,
            target,
            what=what,
            card=model_card(card),
            ends=encoder.end_ids,
            config=config,
            group=run.world if run.divided else None,
            merge=partial(_merged, run) if recipe.model.quantize else None,
        )


def _merged(run: Run, model: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """An adapter on weights of 4 bits merged into what these were made of: the model that the
    recipe names, in its type, which takes the host's memory for all of it. To merge it into 4 bits
    would round most of it away.
    """
    spec = run.recipe.model
    attributes = (spec.attributes or ONE) if isinstance(run.policy, Scorer) else None
    more = {"attributes": attributes, "trust_remote_code": spec.trust_remote_code}
    return merged(load_model(spec.name, dtype=DTYPES[spec.dtype], **more), model, weights)


@torch.no_grad()
def _of_reward_model(run: Run, policy: Scorer) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """The tokenizer to save with a reward model, and what its configuration says: how training
    answers score, where to read.
    """
    encoder, units = run.prepared.encoder, run.prepared.corpora["train"].units
    looked_at = [units[i] for i in canonical_order(units, run.recipe.train.seed, 0)[:LOOKED_AT]]
    policy.eval()
    try:
        ours = run.objective
        found = ours.run_micro_batches(
            ours.divide(looked_at), lambda batch: policy(batch).score, ours.join_collectives
        )
    finally:
        policy.train()
    own = [row for scores in found if scores is not None for row in scores.tolist()]
    scores = [row for rows in gathered(run.group, own) for row in rows]
    ends = {*encoder.end_ids, *(answer.ids[-1] for unit in units for answer in unit.answers)}
    tokenizer = with_padding(
        encoder.tokenizer, ends, policy.causal.get_input_embeddings().weight.shape[0]
    )
    described = policy.description(torch.tensor(scores))
    return tokenizer, described | {"pad_token_id": tokenizer.pad_token_id}


def _settings_of_the_card(run: Run) -> dict[str, Any]:
    """The settings that the recipe itself says, and those every reader asks for."""
    always = (
        "train.learning_rate",
        "train.batch_size",
        "train.epochs",
        "train.seed",
        "model.dtype",
        "model.lora.rank",
        "data.as_chat",
    )
    settings = run.prepared.source.settings
    return {
        name: in_short(setting.value)
        for name, setting in settings.items()
        if (name in always or not setting.is_default)
        and name.split(".")[0] in ("model", "reference", "train", "data")
    }
