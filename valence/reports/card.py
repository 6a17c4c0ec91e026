"""The model card: ``README.md`` of an exported model, written from the facts of its run alone."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from valence.files import is_hub_id
from valence.reports.console import (
    as_tables,
    audit_in_words,
    audit_warnings,
    compare,
    duration,
    exact,
    text,
    visible,
)

ROWS = 30
"""Most rows of one table of the data."""


NO_RESULTS = (
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
"""How names in the log begin that are no results of training rows: they count, measure the machine,
or are of other rows.
"""

LOAD_MERGED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
"""

LOAD_ADAPTER = """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoPeftModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
"""

LOAD_ADAPTER_ON_FOLDER = """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
base = AutoModelForCausalLM.from_pretrained({base!r}, dtype="auto")  # the folder that the adapter was trained on
model = PeftModel.from_pretrained(base, "path/to/this/folder")
"""

LOAD_REWARD_MODEL = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", dtype="float32")
"""

KWARGS = "{kwargs}"
"""Stands for the variables of the chat template."""

ENCODE_CHAT = """\
messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{kwargs})
"""

ENCODE_TEXT = """\
inputs = tokenizer("The capital of France is", return_tensors="pt")
"""

SCORE_CHAT = """\
messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
text = tokenizer.apply_chat_template(messages, tokenize=False{kwargs}).rstrip()  # the score is read at the end of the turn
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
"""

SCORE_TEXT = """\
inputs = tokenizer("The capital of France is Paris." + (tokenizer.eos_token or ""), return_tensors="pt")
"""

SCORE = """\
score = model(**inputs).logits[0]
normalised = (score - score.new_tensor(model.config.reward_mean)) / score.new_tensor(model.config.reward_std)
print({model.config.id2label[i]: number for i, number in enumerate(normalised.tolist())})
"""

GENERATE = """\
output = model.generate(**inputs, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a model card says.

    settings: those of the training worth a line (dotted names). audit: of the training rows, as in
    ``audit.json``; what it holds against them becomes limitations. before, after: metrics on
    held-out rows at the first and at the last evaluation. last: of the last record of training, as
    ``last_record`` finds it. license: what the base model's card says, under the hub's names
    (``license_of``); empty when that is not known. chat: prompts go through the chat template, with
    the variables ``chat_template_kwargs``. steps: optimizer steps. finished: False when the
    training was stopped before its end. reward_model: it scores answers instead of giving them.
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
    last: Mapping[str, object] = field(default_factory=dict[str, object])
    license: Mapping[str, str] = field(default_factory=dict[str, str])
    command: str
    versions: Mapping[str, str]
    steps: int
    seconds: float
    finished: bool = True
    reward_model: bool = False


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with a YAML head, as the Hugging Face hub reads it."""
    is_folder = facts.base_model.startswith(("/", "~"))
    facts = _without_absolute_paths(facts)
    kind = "An adapter (LoRA) for" if facts.adapter else "A fine-tuned version of"
    intro = (
        f"{kind} {markdown(facts.base_model)}, trained by Valence with the method "
        f"**{markdown(facts.method)}** "
        f"for {text(facts.steps)} optimizer steps ({duration(facts.seconds)})."
    )
    settings = {**{f"loss.{name}": value for name, value in facts.loss.items()}, **facts.settings}
    versions = table(("package", "version"), facts.versions.items())
    sections = (
        (
            "Method",
            table(("setting", "value"), ((name, exact(value)) for name, value in settings.items())),
        ),
        ("Data", _data(facts.audit)),
        ("Results on held-out rows", _results(facts)),
        ("Results on test rows", table(("metric", "after"), _of_test(facts.last))),
        ("The end of training", _end(facts.last)),
        ("How to load it", fenced(_usage(facts, is_folder), "python")),
        ("How it was made", f"{fenced(facts.command, 'sh')}\n\n{versions}"),
        ("Base model and licence", _licence(facts)),
        ("Limitations", "\n".join(f"- {markdown(line)}" for line in _limitations(facts))),
    )
    body = "\n\n".join(f"## {title}\n\n{part}" for title, part in sections if part)
    return f"---\n{_head(facts, is_folder)}---\n\n# {markdown(facts.name)}\n\n{intro}\n\n{body}\n"


def _usage(facts: CardFacts, is_folder: bool) -> str:
    base = f"path/to/{visible(facts.base_model)}" if facts.adapter and is_folder else ""
    return usage(
        facts.chat,
        facts.chat_template_kwargs,
        reward_model=facts.reward_model,
        adapter=facts.adapter,
        base=base,
    )


def usage(
    chat: bool,
    chat_template_kwargs: Mapping[str, object] | None = None,
    *,
    reward_model: bool = False,
    adapter: bool = False,
    base: str = "",
) -> str:
    """Python code that loads an exported model and asks it, or a reward model for a score.

    Arguments are those of the facts. base: the folder to name for the model below an adapter that
    does not name it itself.
    """
    kwargs = "".join(f", {name}={value!r}" for name, value in (chat_template_kwargs or {}).items())
    if reward_model:
        return f"{LOAD_REWARD_MODEL}\n{SCORE_CHAT.replace(KWARGS, kwargs) if chat else SCORE_TEXT}{SCORE}"
    encode = ENCODE_CHAT.replace(KWARGS, kwargs) if chat else ENCODE_TEXT
    load = (
        LOAD_ADAPTER_ON_FOLDER.format(base=base)
        if base
        else LOAD_ADAPTER
        if adapter
        else LOAD_MERGED
    )
    return f"{load}\n{encode}{GENERATE}"


ABSOLUTE = re.compile(r"(?<![\w.:/~-])(?:~[\w-]*)?/(?:[^\s/`'\"|]+/)+([^\s/`'\"|]+)")
"""An absolute path within a text; URLs and relative paths are not."""
QUOTED = re.compile(r"""(["'])(?:~[\w-]*)?/[^"'\n]*/([^"'/\n]+)\1""")
"""The same in quotation marks, where it may have spaces."""


def _without_absolute_paths(facts: CardFacts) -> CardFacts:
    """The facts with the last part alone of each absolute path: folders of this machine are nobody
    else's business.
    """

    def shorten(value: Any) -> Any:
        if isinstance(value, str):
            whole = (
                value.startswith(("/", "~/"))
                and Path(value.rpartition(":")[0] or value).expanduser().exists()
            )
            return Path(value).name if whole else ABSOLUTE.sub(r"\1", QUOTED.sub(r"\1\2\1", value))
        if isinstance(value, Mapping):
            return {shorten(key): shorten(item) for key, item in value.items()}
        return [shorten(item) for item in value] if isinstance(value, list | tuple) else value

    return CardFacts(**{field.name: shorten(getattr(facts, field.name)) for field in fields(facts)})


def _head(facts: CardFacts, is_folder: bool) -> str:
    from ruamel.yaml import YAML

    head: dict[str, object] = {"library_name": "peft" if facts.adapter else "transformers"}
    if not is_folder and is_hub_id(facts.base_model):  # the hub refuses a folder as a base model
        head["base_model"] = facts.base_model
        head["base_model_relation"] = "adapter" if facts.adapter else "finetune"
    head |= {name: visible(value) for name, value in facts.license.items()}
    task = "text-classification" if facts.reward_model else "text-generation"
    head |= {
        "pipeline_tag": task,
        "tags": ["valence", visible(facts.method)] + ["lora"] * facts.adapter,
    }
    out = io.StringIO()
    YAML(typ="safe", pure=True).dump(head, out)
    return out.getvalue()


def _data(audit: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for title, header, rows in as_tables(audit_in_words(audit)):
        more = f"\n\nand {len(rows) - ROWS} more" if len(rows) > ROWS else ""
        parts.append(
            (f"### {markdown(title)}\n\n" if title else "") + table(header, rows[:ROWS]) + more
        )
    return "\n\n".join(parts)


def _results(facts: CardFacts) -> str:
    if facts.after is None:
        return ""
    if facts.before is None:
        return table(("metric", "after"), facts.after.items())
    return table(("metric", "before", "after", "change"), compare(facts.before, facts.after))


def _of_test(last: Mapping[str, object]) -> list[tuple[str, object]]:
    return [
        (name.removeprefix("test/"), value)
        for name, value in last.items()
        if name.startswith("test/")
    ]


def _end(last: Mapping[str, object]) -> str:
    """The numbers of the last steps that were logged, without held-out ones and those that only
    count or measure the machine.
    """
    rows = [(name, value) for name, value in last.items() if not name.startswith(NO_RESULTS)]
    made = table(("metric", "value"), rows)
    return (
        f"The last record of the log on training rows, at step {text(last.get('step'))}:\n\n{made}"
        if made
        else ""
    )


def _licence(facts: CardFacts) -> str:
    base, said = markdown(facts.base_model), facts.license
    if not said:
        return (
            f"The licence of {base} is not known here. Look it up, and name it above, before "
            f"you give this model to others."
        )
    name = said.get("license_name") or said["license"]
    link = f" ({markdown(said['license_link'])})" if said.get("license_link") else ""
    return (
        f"{base} comes under the licence {markdown(name)}{link}, as its card says, and this "
        f"model is made of it."
    )


def _limitations(facts: CardFacts) -> list[str]:
    said: list[str] = []
    if not facts.finished:
        said.append(
            f"The training was stopped before its end, after {text(facts.steps)} optimizer steps."
        )
    if facts.after is None:
        said.append("The model was not evaluated on held-out rows.")
    return said + [f"Training rows: {warning}" for warning in audit_warnings(facts.audit)]


def last_record(log: Path, step: int) -> dict[str, Any]:
    """What a run's log (metrics.jsonl) says last of its training up to a step, and of its test
    rows; empty when it says nothing. Lines that are not whole are passed over.
    """
    found: dict[str, Any] = {}
    try:
        lines = log.read_bytes().split(b"\n")
    except OSError:
        return {}
    for line in reversed(lines):
        try:
            record = json.loads(line)
            at = record["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if at == step:
            found |= {
                name: value
                for name, value in record.items()
                if name.startswith("test/") and name not in found
            }
        if at <= step and any(not name.startswith(NO_RESULTS) for name in record):
            return found | {
                name: value for name, value in record.items() if not name.startswith("test/")
            }
    return found


def license_of(model: str) -> dict[str, str]:
    """What the card of a model says of its licence, under the hub's names: ``license``, and
    ``license_name`` and ``license_link`` where it has one of its own. model: a folder, or a hub id,
    whose card is fetched unless it lies in the cache. Else what its config.json says. Empty when
    nothing does.
    """
    folder = Path(model)
    card = folder / "README.md" if folder.is_dir() else _card_of_hub(model)
    said = _front_matter(card) if card else {}
    if not said.get("license") and folder.is_dir():
        said = _json_of(folder / "config.json")
    found = {name: said.get(name) for name in ("license", "license_name", "license_link")}
    kept = {
        name: value.strip()
        for name, value in found.items()
        if isinstance(value, str) and value.strip()
    }
    return kept if "license" in kept else {}


@lru_cache
def _card_of_hub(model: str) -> Path | None:
    from transformers.utils.hub import cached_file

    if "/" not in model or not is_hub_id(model):
        return None
    try:
        found = cached_file(model, "README.md", _raise_exceptions_for_missing_entries=False)
    except (
        OSError,
        ValueError,
    ):  # no network, and no copy of it: the card says that the licence is not known
        return None
    return Path(found) if found else None


def _front_matter(card: Path) -> Mapping[str, Any]:
    from ruamel.yaml import YAML, YAMLError

    try:
        head = re.match(
            r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)",
            card.read_text(encoding="utf-8"),
            re.DOTALL,
        )
        said = YAML(typ="safe", pure=True).load(head[1]) if head else {}
    except (OSError, ValueError, YAMLError):
        return {}
    return said if isinstance(said, Mapping) else {}


def _json_of(path: Path) -> Mapping[str, Any]:
    try:
        said = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, Mapping) else {}


def markdown(value: object) -> str:
    """Any value as text on one line of Markdown, which shows it and reads nothing into it."""
    line = " ".join(text(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|~$#!])", r"\\\1", line)
    # an underscore inside a word is only an underscore
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)


def fenced(content: str, language: str) -> str:
    """A block of code whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{visible(content).rstrip()}\n{fence}"


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, or nothing when it has no rows."""
    lines = [f"| {' | '.join(markdown(cell) for cell in row)} |" for row in rows]
    if not lines:
        return ""
    return "\n".join(
        [
            f"| {' | '.join(markdown(name) for name in header)} |",
            "|" + " --- |" * len(header),
            *lines,
        ]
    )
