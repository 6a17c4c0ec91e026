"""How much worse the candidate predicts other texts than the baseline.

The losses under each model are a file in the folder of the comparison, and are not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from valence.apps.compare.run_benchmarks import ComparedModel
from valence.distributed.process_group import SingleProcess
from valence.errors import UserError
from valence.evaluation.forgetting import (
    SHIPPED,
    Forgetting,
    TextLosses,
    measure_forgetting,
    read_texts,
)
from valence.jobs.row_job import replace_file
from valence.jobs.sample_rows import model_files
from valence.options import CompareOptions
from valence.storage import add_checksum, read_json, verify
from valence.targets import load_target, without_rows
from valence.terminal import print_message
from valence.training.open_run import open_run
from valence.training.text_losses import text_losses
from valence.types import Demonstration, content_id


def needs_texts(options: CompareOptions) -> bool:
    """Whether the options name texts, or a limit of forgetting."""
    return options.max_forgetting is not None or options.other_text not in ("auto", "off")


def compare_texts(
    options: CompareOptions,
    models: Sequence[ComparedModel],
    folder: Path,
    *,
    has_prompts: bool,
    overrides: Sequence[str],
    notes: list[str],
    console: Console,
) -> Forgetting | None:
    """Compare the losses of texts under a baseline and a candidate; None if that is off, or if
    neither the options nor prompts need the models.

    Raises UserError for a text that cannot be read, and for reward models. Adds to notes instead if
    the options do not name texts.
    """
    is_needed = needs_texts(options)
    if options.other_text == "off" or not (is_needed or has_prompts):
        return None
    try:
        rows = read_texts(SHIPPED if options.other_text == "auto" else options.other_text)
        baseline, candidate = (_losses(model, rows, folder, overrides, console) for model in models)
        return measure_forgetting(baseline, candidate)
    except UserError as error:
        if is_needed:
            raise
        notes.append(f"forgetting was not measured: {error.message}")
        return None


def _losses(
    model: ComparedModel,
    rows: Sequence[Demonstration],
    folder: Path,
    overrides: Sequence[str],
    console: Console,
) -> TextLosses:
    source = without_rows(load_target(model.target, overrides))
    key = model_files(model.target, source, model.at)
    id = content_id(key, [row.id for row in rows])
    path = folder / f"other_text.{model.side}.{id[:8]}.json"
    if key is not None:
        try:
            return TextLosses.from_dict(verify(read_json(path), required=True))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            message = f"{path} is damaged ({error}): the losses are computed again"
            print_message(console, message, "yellow")
    run = open_run(
        model.target,
        overrides,
        group=SingleProcess(),
        at=model.at,
        console=console,
        tools=False,
    )
    losses = text_losses(run, rows)
    replace_file(path, json.dumps(add_checksum(losses.to_dict()), indent=1))
    return losses
