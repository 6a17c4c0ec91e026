"""The model card: ``README.md`` of an exported model, written from the facts of its run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from valence.files import is_hub_id
from valence.reports.formatting import audit_tables, audit_warnings, compare, exact, text, visible
from valence.reports.rendering import render
from valence.reports.run_record import read_log
from valence.storage import read_json

MAX_ROWS = 30
"""Rows shown of one table of the data."""

NOT_RESULTS = (
    "step",
    "epoch",
    "eval/",
    "test/",
    "tokens",
    "examples_seen",
    "seconds",
    "micro_batches",
    "waste",
    "memory",
    "ranks",
    "rounds",
    "prompts",
)
"""Prefixes of names in the log that are no results on training rows: counters, measurements of the
machine, results on other rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """The facts that a model card states.

    settings: of the training, by dotted name. audit: of the training rows, as in ``audit.json``;
    its warnings become limitations. before, after: metrics on held-out rows at the first and at the
    last evaluation. verdict: on these, in words; empty if unknown. last: the last record of
    training, from ``last_record``. feedback_test: the tests of the feedback before training, as in
    run.json. license: from the card of the base model, under the hub's names
    (``license_of``); empty if unknown. chat: prompts go through the chat template, with the
    variables ``chat_template_kwargs``. steps: optimizer steps. finished: False if the training was
    stopped early. reward_model: the model scores answers.
    """

    name: str
    base_model: str
    method: str
    loss: Mapping[str, object]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    adapter: bool
    chat: bool
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict[str, object])
    audit: Mapping[str, Any]
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None
    verdict: str = ""
    last: Mapping[str, object] = field(default_factory=dict[str, object])
    feedback_test: Mapping[str, Any] = field(default_factory=dict[str, Any])
    license: Mapping[str, str] = field(default_factory=dict[str, str])
    command: str
    versions: Mapping[str, str]
    steps: int
    seconds: float
    finished: bool = True
    reward_model: bool = False


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with a YAML head, as the Hugging Face hub reads it."""
    is_folder = facts.base_model.startswith(("/", "~")) or Path(facts.base_model).is_dir()
    if is_folder:
        facts = replace(facts, base_model=Path(facts.base_model).name)
    facts = _without_absolute_paths(facts)
    settings = {**{f"loss.{name}": value for name, value in facts.loss.items()}, **facts.settings}
    compared = facts.before is not None and facts.after is not None
    body = render(
        "model_card.md.j2",
        facts=facts,
        settings=[(name, exact(value)) for name, value in settings.items()],
        data=audit_tables(facts.audit),
        max_rows=MAX_ROWS,
        comparison=compare(facts.before or {}, facts.after or {}) if compared else None,
        test=[(n.removeprefix("test/"), v) for n, v in facts.last.items() if n.startswith("test/")],
        end=[(n, v) for n, v in facts.last.items() if not n.startswith(NOT_RESULTS)],
        usage=usage(
            facts.chat,
            facts.chat_template_kwargs,
            reward_model=facts.reward_model,
            adapter=facts.adapter,
            base=f"path/to/{visible(facts.base_model)}" if facts.adapter and is_folder else "",
        ),
        limitations=_limitations(facts),
    )
    return f"---\n{_metadata(facts, is_folder)}\n---\n\n{body.strip()}\n"


def usage(
    chat: bool,
    chat_template_kwargs: Mapping[str, object] | None = None,
    *,
    reward_model: bool = False,
    adapter: bool = False,
    base: str = "",
) -> str:
    """Python code that loads an exported model and generates, or scores with a reward model.

    base: the folder of the base model of an adapter whose configuration does not name it.
    """
    return render(
        "usage.py.j2",
        chat=chat,
        template_kwargs=chat_template_kwargs or {},
        reward_model=reward_model,
        adapter=adapter,
        base=base,
    )


ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:~[\w-]*)?/(?:[^\s/`'\"|]+/)+([^\s/`'\"|]+)")
"""An absolute path within a text, but no URL and no relative path."""
QUOTED = re.compile(r"""(["'])(?:~[\w-]*)?/[^"'\n]*/([^"'/\n]+)\1""")
"""The same in quotation marks, where it may have spaces."""


def _without_absolute_paths(facts: CardFacts) -> CardFacts:
    """The facts with only the last part of each absolute path: folders of this machine are
    private.
    """

    def shorten(value: Any) -> Any:
        if isinstance(value, str):
            is_path = (
                value.startswith(("/", "~/"))
                and Path(value.rpartition(":")[0] or value).expanduser().exists()
            )
            if is_path:
                return Path(value).name
            return ABSOLUTE.sub(r"\1", QUOTED.sub(r"\1\2\1", value))
        if isinstance(value, Mapping):
            return {shorten(key): shorten(item) for key, item in value.items()}
        return [shorten(item) for item in value] if isinstance(value, list | tuple) else value

    return CardFacts(**{field.name: shorten(getattr(facts, field.name)) for field in fields(facts)})


def _metadata(facts: CardFacts, is_folder: bool) -> str:
    """The YAML head."""
    from huggingface_hub import ModelCardData

    optional: dict[str, Any] = {name: visible(value) for name, value in facts.license.items()}
    if not is_folder and is_hub_id(facts.base_model):  # the hub refuses a folder as a base model
        relation = "adapter" if facts.adapter else "finetune"
        optional |= {"base_model": facts.base_model, "base_model_relation": relation}
    data = ModelCardData(
        library_name="peft" if facts.adapter else "transformers",
        pipeline_tag="text-classification" if facts.reward_model else "text-generation",
        tags=["valence", visible(facts.method), *["lora"] * facts.adapter],
        **optional,
    )
    return data.to_yaml()


def _limitations(facts: CardFacts) -> list[str]:
    lines: list[str] = []
    if not facts.finished:
        lines.append(f"Training was stopped early, after {text(facts.steps)} optimizer steps.")
    if facts.after is None:
        lines.append("The model was not evaluated on held-out rows.")
    lines += [
        f"Before training: {test['sentence']}."
        for test in facts.feedback_test.values()
        if not test["is_used"]
    ]
    return lines + [f"Training rows: {warning}" for warning in audit_warnings(facts.audit)]


def last_record(log: Path, step: int) -> dict[str, Any]:
    """The last record of training up to a step in a run's log (metrics.jsonl), with the results on
    test rows; empty if there is none. Incomplete lines are skipped.
    """
    test: dict[str, Any] = {}
    for record in reversed(read_log(log)):
        at = record["step"]
        results = {name: value for name, value in record.items() if name.startswith("test/")}
        if at == step:
            test = results | test
        if at <= step and any(not name.startswith(NOT_RESULTS) for name in record):
            return test | {name: value for name, value in record.items() if name not in results}
    return test


def license_of(model: str) -> dict[str, str]:
    """The licence that a model's card states, under the hub's names: ``license``, and
    ``license_name`` and ``license_link`` for a custom licence.

    model: a folder, or a hub id, whose card is downloaded unless it is cached. A folder's
    config.json is read if its card states none. Empty if unknown.
    """
    folder = Path(model)
    card = folder / "README.md" if folder.is_dir() else _download_card(model)
    metadata = _read_metadata(card) if card else {}
    if not metadata.get("license") and folder.is_dir():
        metadata = _read_config(folder / "config.json")
    names = ("license", "license_name", "license_link")
    values = {name: metadata.get(name) for name in names}
    texts = {n: v.strip() for n, v in values.items() if isinstance(v, str) and v.strip()}
    return texts if "license" in texts else {}


@cache
def _download_card(model: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if "/" not in model or not is_hub_id(model):
        return None
    try:
        path = cached_file(model, "README.md", _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError):  # no network and no cached copy: the licence is unknown
        return None
    return Path(path) if path else None


def _read_metadata(card: Path) -> Mapping[str, Any]:
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard import REGEX_YAML_BLOCK
    from yaml import YAMLError

    try:
        content = card.read_text(encoding="utf-8-sig")
        if not REGEX_YAML_BLOCK.search(content):  # the library logs a warning about such a card
            return {}
        return ModelCard(content, ignore_metadata_errors=True).data.to_dict()
    except (OSError, ValueError, TypeError, YAMLError):
        return {}


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = read_json(path)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, Mapping) else {}
