"""The model card: ``README.md`` of an exported model, written from the facts of its run alone."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from valence.report.console import as_tables, audit_warnings, compare, duration, exact, text, visible

ROWS = 30
"""Most rows of one table of the data."""

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

LOAD_REWARD_MODEL = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
model = AutoModelForSequenceClassification.from_pretrained("path/to/this/folder", dtype="float32")
"""

ENCODE_CHAT = """\
messages = [{"role": "user", "content": "What is the capital of France?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
"""

ENCODE_TEXT = """\
inputs = tokenizer("The capital of France is", return_tensors="pt")
"""

SCORE_CHAT = """\
messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
text = tokenizer.apply_chat_template(messages, tokenize=False).rstrip()  # the score is read at the end of the turn
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

    settings: those of the training worth a line (dotted names). audit: of the training rows, as in ``audit.json``; what
    it holds against them becomes limitations. before, after: metrics on held-out rows at the first and at the last
    evaluation. chat: the tokenizer has a chat template. steps: optimizer steps. finished: False when the training was
    stopped before its end. reward_model: it scores answers instead of giving them.
    """

    name: str
    base_model: str
    method: str
    loss: Mapping[str, object]
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    adapter: bool
    chat: bool
    audit: Mapping[str, Any]
    before: Mapping[str, float] | None = None
    after: Mapping[str, float] | None = None
    license: str | None = None
    command: str
    versions: Mapping[str, str]
    steps: int
    seconds: float
    finished: bool = True
    reward_model: bool = False


def model_card(facts: CardFacts) -> str:
    """The card as Markdown with a YAML head, as the Hugging Face hub reads it."""
    kind = "An adapter (LoRA) for" if facts.adapter else "A fine-tuned version of"
    intro = (
        f"{kind} {markdown(facts.base_model)}, trained by Valence with the method **{markdown(facts.method)}** "
        f"for {text(facts.steps)} optimizer steps ({duration(facts.seconds)})."
    )
    settings = {**{f"loss.{name}": value for name, value in facts.loss.items()}, **facts.settings}
    versions = table(("package", "version"), facts.versions.items())
    sections = (
        ("Method", table(("setting", "value"), ((name, exact(value)) for name, value in settings.items()))),
        ("Data", _data(facts.audit)),
        ("Results on held-out rows", _results(facts)),
        ("How to load it", fenced(_usage(facts), "python")),
        ("How it was made", f"{fenced(facts.command, 'sh')}\n\n{versions}"),
        ("Limitations", "\n".join(f"- {markdown(line)}" for line in _limitations(facts))),
    )
    body = "\n\n".join(f"## {title}\n\n{part}" for title, part in sections if part)
    return f"---\n{_head(facts)}---\n\n# {markdown(facts.name)}\n\n{intro}\n\n{body}\n"


def _usage(facts: CardFacts) -> str:
    if facts.reward_model:
        return f"{LOAD_REWARD_MODEL}\n{SCORE_CHAT if facts.chat else SCORE_TEXT}{SCORE}"
    return f"{LOAD_ADAPTER if facts.adapter else LOAD_MERGED}\n{ENCODE_CHAT if facts.chat else ENCODE_TEXT}{GENERATE}"


def _head(facts: CardFacts) -> str:
    from ruamel.yaml import YAML

    head: dict[str, object] = {"library_name": "peft" if facts.adapter else "transformers"}
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", facts.base_model, re.ASCII):  # the hub refuses a folder as a base model
        head["base_model"] = facts.base_model
        head["base_model_relation"] = "adapter" if facts.adapter else "finetune"
    if facts.license:
        head["license"] = visible(facts.license)
    task = "text-classification" if facts.reward_model else "text-generation"
    head |= {"pipeline_tag": task, "tags": ["valence", visible(facts.method)] + ["lora"] * facts.adapter}
    out = io.StringIO()
    YAML(typ="safe", pure=True).dump(head, out)
    return out.getvalue()


def _data(audit: Mapping[str, Any]) -> str:
    parts: list[str] = []
    for title, header, rows in as_tables(audit):
        more = f"\n\nand {len(rows) - ROWS} more" if len(rows) > ROWS else ""
        parts.append((f"### {markdown(title)}\n\n" if title else "") + table(header, rows[:ROWS]) + more)
    return "\n\n".join(parts)


def _results(facts: CardFacts) -> str:
    if facts.after is None:
        return ""
    if facts.before is None:
        return table(("metric", "after"), facts.after.items())
    return table(("metric", "before", "after", "change"), compare(facts.before, facts.after))


def _limitations(facts: CardFacts) -> list[str]:
    said: list[str] = []
    if not facts.finished:
        said.append(f"The training was stopped before its end, after {text(facts.steps)} optimizer steps.")
    if facts.after is None:
        said.append("The model was not evaluated on held-out rows.")
    return said + [f"Training rows: {warning}" for warning in audit_warnings(facts.audit)]


def markdown(value: object) -> str:
    """Any value as text on one line of Markdown, which shows it and reads nothing into it."""
    line = " ".join(text(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*\[\]|~$#!])", r"\\\1", line)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", line)  # an underscore inside a word is only an underscore


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
    return "\n".join([f"| {' | '.join(markdown(name) for name in header)} |", "|" + " --- |" * len(header), *lines])
