"""What a run is measured by on the way: held-out rows, or answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from valence.data.sampler import canonical_order
from valence.errors import UserError
from valence.reports.console import Progress
from valence.reports.sinks import SAMPLES
from valence.rollouts import HFGenerator, Sampling
from valence.terminal import print_message
from valence.training.evaluate import Evaluation
from valence.training.evaluate import evaluate as evaluate_rows
from valence.training.memory import with_memory
from valence.training.setup import Corpus, Prepared, rows_to_measure
from valence.types import Completion, Content, MicroBatch, TokenizedExample

if TYPE_CHECKING:
    from valence.training.loop import Run

SHOWN = (
    "loss",
    "reward/mean",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/auc",
    "rewards/spearman",
    "logps/token",
    "kl",
    "rollout/length",
)
"""Numbers of an evaluation that are printed as soon as they are known."""


BAD = "lower train.learning_rate, or use model.dtype: float32"
"""What would help a policy that is no longer made of numbers."""


def evaluate(run: Run, rows: Any, name: str) -> Evaluation:
    """See ``Run.evaluate``."""
    if rows is not None:
        corpus = rows_to_measure(run.prepared, rows)
        name = "the given rows"
    elif name in run.prepared.corpora:
        corpus = run.prepared.corpora[name]
    else:
        raise UserError(
            f"there are no rows under data.{name}",
            code="rows-missing",
            where=f"data.{name}",
            fix="name a file of rows",
        )
    most = run.recipe.eval.max_examples if name == "eval" else None
    if run.rounds is not None:
        return run.rounds.collector.evaluate(corpus, most)
    return with_memory(
        run,
        "evaluation",
        lambda: _measure(run, corpus.units[:most], corpus, f"evaluating ({name})"),
    )


def evaluate_trained(run: Run) -> Evaluation | None:
    """Some of the training rows (``eval.train_examples``), drawn from all of them; None where there
    are none to measure.

    Raises UserError where these few make no whole, as judgements that share one prompt.
    """
    units = trained_units(run)
    if not units:
        return None
    return with_memory(
        run,
        "evaluation",
        lambda: _measure(run, units, run.prepared.corpora["train"], "measuring training rows"),
    )


def trained_units(run: Run) -> list[TokenizedExample]:
    """The training rows that are measured after training, in the order of the data."""
    most = run.recipe.eval.train_examples
    if run.prepared.method.online or not most or "train" not in run.prepared.corpora:
        return []
    units = run.prepared.corpora["train"].units
    return [units[i] for i in sorted(canonical_order(units, run.recipe.train.seed, 0)[:most])]


def sample(
    run: Run, prompts: Sequence[Content], sampling: Sampling, n: int, quiet: bool
) -> list[list[Completion]]:
    """See ``Run.sample``."""
    if run.prepared.method.is_reward_model:
        raise UserError(
            "a reward model scores answers and gives none",
            code="reward-model-cannot-generate",
            where="sample",
            fix="use `valence score`",
        )
    encoder = run.prepared.encoder
    generator = HFGenerator(run.policy.model, encoder.tokenizer, end_ids=encoder.end_ids)  # type: ignore[arg-type]
    asked = [encoder.encode_prompt(prompt) for prompt in prompts]
    answered = 0
    with (
        run.policy.sampling(),
        Progress(run.console, "answering prompts", n * len(asked), quiet=quiet, brief=True) as bar,
    ):

        def advance(ended: int) -> None:
            nonlocal answered
            answered += ended
            bar.update(answered)

        try:
            return run.policy.within(
                lambda: generator.generate(asked, n, sampling, progress=advance)
            )
        except FloatingPointError as error:
            raise went_bad(error, run.step) from error


def went_bad(error: FloatingPointError, step: int) -> UserError:
    """Of a policy whose answers are no longer numbers."""
    return UserError(
        f"the policy cannot be sampled: {error}",
        code="sampling-failed",
        where=f"step {step}",
        fix=BAD,
    )


def due(run: Run, step: int | None = None) -> bool:
    """Whether a step ends with an evaluation. step: by default the one that the run stands at."""
    step = run.step if step is None else step
    if "eval" not in run.prepared.corpora:
        return False
    if step == 0:
        return run.recipe.eval.at_start
    return (
        step % evaluation_interval(run.prepared) == 0
        or step == run.total_steps
        or bool(run.ended_early)
    )


def evaluation_interval(prepared: Prepared) -> int:
    """Optimizer steps from one evaluation to the next."""
    every = prepared.recipe.eval.every
    return round(every) if every >= 1 else max(1, round(every * prepared.steps_per_epoch))


def evaluate_and_keep(run: Run) -> dict[str, float]:
    """The evaluation of the step that the run stands at, written down; its numbers by their names
    in the log.
    """
    found = run.evaluate()
    if run.folder:
        run.folder.evaluation(run.step, found.metrics, found.rows)
    run.evaluations[run.step] = found.metrics
    run.log.table(SAMPLES, run.step, found.rows)
    if not run.quiet:
        shown = [name for name in SHOWN if name in found.metrics]
        numbers = "  ".join(f"{name} {found.metrics[name]:.4g}" for name in shown)
        print_message(run.console, f"step {run.step}, held out: {numbers}")
    return {f"eval/{name}": value for name, value in found.metrics.items()}


def _measure(run: Run, units: Sequence[TokenizedExample], corpus: Corpus, phase: str) -> Evaluation:
    sequences = sum(len(unit.answers) for unit in units) * (
        2 if run.prepared.method.needs_kl_pairs else 1
    )
    done = tokens = 0
    with Progress(run.console, phase, len(units), quiet=run.quiet) as bar:

        def advance(batch: MicroBatch | None) -> None:
            nonlocal done, tokens
            if run.stops():
                raise run.stop.ended()
            if batch is not None:
                done += batch.sequences * run.group.size  # about what the others have done as well
                tokens += len(batch.tokens) * run.group.size
            bar.update(len(units) * min(done, sequences) // max(1, sequences), tokens=tokens)

        # One process that ended by itself would be waited for.
        with run.stop.waiting() if run.world.size > 1 else nullcontext():
            found = evaluate_rows(
                run.objective, units, corpus.examples, run.prepared.tokenizer, advance
            )
        bar.update(len(units), tokens=tokens)
        return found
