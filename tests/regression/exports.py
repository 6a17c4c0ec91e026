"""Exports of feedback tools, from the rows that the tests of the importers read."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.data.importers import (
    test_argilla,
    test_bedrock,
    test_chainlit,
    test_chat_ui,
    test_fastchat,
    test_gradio,
    test_helicone,
    test_label_studio,
    test_langfuse,
    test_langsmith,
    test_librechat,
    test_open_webui,
    test_openai,
    test_phoenix,
)
from tests.data.importers.votes import REAL

Rows = Sequence[Any]


@dataclass(frozen=True)
class Export:
    """What is exported by a tool, and options to import it with.

    files: name -> rows, or a file that the tool itself wrote.
    """

    name: str
    tool: str
    files: Mapping[str, Rows | Path]
    options: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Of its files, in the folder of the inputs."""
        return tuple(f"exports/{self.name}/{name}" for name in self.files)

    def write(self, inputs: Path) -> None:
        for path, content in zip(self.paths, self.files.values(), strict=True):
            (inputs / path).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copyfile(content, inputs / path)
            elif path.endswith(".csv"):
                with (inputs / path).open("w", encoding="utf-8", newline="") as file:
                    csv.writer(file).writerows(content)
            else:
                lines = (json.dumps(row) + "\n" for row in content)
                (inputs / path).write_text("".join(lines), encoding="utf-8")


def _tested(module: ModuleType, argument: str = "row") -> Iterator[list[Any]]:
    """The values of an argument in each parametrized test of a module."""
    for function in vars(module).values():
        for mark in getattr(function, "pytestmark", ()):
            if mark.name == "parametrize" and mark.args[0][0] == argument:
                yield [_distinct(getattr(case, "values", case)[0], i) for i, case in
                       enumerate(mark.args[1])]  # fmt: skip


def _distinct(row: Any, number: int) -> Any:
    """The row with a distinct id: the readers keep one vote of an id."""
    is_named = isinstance(row, dict) and "id" in row
    return {**row, "id": f"{row['id']}-{number}"} if is_named else row


def _tests_of(tool: str, module: ModuleType, *options: str) -> Iterator[Export]:
    """An export of the rows of each test of a module."""
    for number, rows in enumerate(_tested(module), 1):
        yield Export(f"{tool}_tests_{number}", tool, {"rows.jsonl": rows}, options)


def _real(tool: str, *files: str, name: str = "") -> Export:
    return Export(f"{tool}_{name or 'real'}", tool, {file: REAL / file for file in files})


def _gradio() -> Rows:
    rows, *_ = _tested(test_gradio)
    return [test_gradio.HEADER, *rows]


def _librechat() -> Rows:
    changes, *_ = _tested(test_librechat, "changes")
    answers = [test_librechat.rated(**item) for item in changes]
    named = [answer | {"messageId": f"m2-{i}"} for i, answer in enumerate(answers)]
    return [test_librechat.QUESTION, *named]


def _chat_ui() -> Rows:
    conversations, *_ = _tested(test_chat_ui, "messages")
    return [{"title": f"title {i}", "messages": item} for i, item in enumerate(conversations)]


def _langfuse() -> Export:
    """A trace with an observation and a score of each case."""
    cases = [(changes, {}) for changes, _ in test_langfuse.BOOLEANS.values()]
    cases += [(changes, step) for changes, step, _ in test_langfuse.SKIPPED.values()]
    scores, steps = list[Any](), list[Any]()
    for i, (changes, step) in enumerate(cases):
        names = {"traceId": f"t{i}", "observationId": f"g{i}"} | changes
        scores.append(test_langfuse.score(id=f"s{i}") | names)
        steps.append(test_langfuse.trace(id=f"t{i}", userId=f"u{i}"))
        steps.append(test_langfuse.observation(f"g{i}", traceId=f"t{i}") | step)
    return Export("langfuse", "langfuse", {"scores.jsonl": scores, "steps.jsonl": steps})


def _langsmith() -> Export:
    cases = [(changes, {}) for changes, *_ in test_langsmith.FEEDBACK.values()]
    cases += [(changes, run) for changes, run, _ in test_langsmith.SKIPPED.values()]
    rows, runs = list[Any](), list[Any]()
    for i, (changes, run) in enumerate(cases):
        names = {"run_id": f"root{i}", "trace_id": f"root{i}"}
        rows.append(test_langsmith.feedback(id=f"f{i}") | names | changes)
        runs.append(test_langsmith.root(id=f"root{i}", trace_id=f"root{i}"))
        parents = {"trace_id": f"root{i}", "parent_run_id": f"root{i}"}
        runs.append(test_langsmith.llm(f"llm{i}") | parents | run)
    scores: dict[str, object] = {"one": 1, "two": 0}
    rows += test_langsmith.compared(scores)
    runs += [test_langsmith.single(name) for name in scores]
    options = ("--category", "meh=down", "--category", "5=up")
    return Export("langsmith", "langsmith", {"feedback.jsonl": rows, "runs.jsonl": runs}, options)


def _phoenix() -> Export:
    cases = [({"result": result}, {}) for result, *_ in test_phoenix.RESULTS.values()]
    cases += [(changes, span) for changes, span, _ in test_phoenix.SKIPPED.values()]
    rows, spans = [test_phoenix.thumbs(id="thumbs")], [test_phoenix.root()]
    for i, (changes, span) in enumerate(cases):
        rows.append(test_phoenix.annotation(id=f"a{i}", span_id=f"llm{i}") | changes)
        spans.append(test_phoenix.span(f"llm{i}") | span)
    options = ("--category", "meh=down")
    return Export("phoenix", "phoenix", {"annotations.jsonl": rows, "spans.jsonl": spans}, options)


def _helicone() -> Rows:
    cases = [{"feedback_rating": False}, *(item for item, _ in test_helicone.SKIPPED.values())]
    named = [{"request_id": f"r{i}", "feedback_id": f"f{i}"} | item for i, item in enumerate(cases)]
    return [test_helicone.request(**item) for item in named]


def _bedrock() -> Rows:
    results, *_ = _tested(test_bedrock, "results")
    return [test_bedrock.evaluated(item, prompt=f"Hi {i}") for i, item in enumerate(results)]


def _chainlit() -> Mapping[str, Rows]:
    targets = ["s2", "run1", "run2", "s1", "s9"]
    votes = [test_chainlit.feedback(item, i % 2) for i, item in enumerate(targets)]
    named = [vote | {"id": f"f{i}"} for i, vote in enumerate(votes)]
    return {f"{name}.jsonl": rows for name, rows in test_chainlit.tables(*named).items()}


def _open_webui_chats() -> Rows:
    turns = test_open_webui.messages(test_open_webui.SIBLING, **test_open_webui.RATED)
    return [test_open_webui.chat(turns, params={"system": "Be brief."})]


EXPORTS = (
    _real("open-webui", "open_webui_0.12.4.json"),
    _real("open-webui", "open_webui_0.12.4_chats.json", name="real_chats"),
    *_tests_of("open-webui", test_open_webui),
    Export("open-webui_chats", "open-webui", {"chats.jsonl": _open_webui_chats()}),
    Export("librechat", "librechat", {"messages.jsonl": _librechat()}),
    Export("chat-ui", "chat-ui", {"chats.jsonl": _chat_ui()}),
    _real("chainlit", *(f"chainlit_{name}.json" for name in ("feedbacks", "steps", "threads"))),
    Export("chainlit", "chainlit", _chainlit()),
    _real("gradio", "gradio_6.31.0.csv"),
    Export("gradio", "gradio", {"log.csv": _gradio()}),
    *_tests_of("fastchat", test_fastchat),
    _langfuse(),
    _langsmith(),
    _phoenix(),
    Export("helicone", "helicone", {"requests.jsonl": _helicone()}),
    *_tests_of("openai", test_openai, "--label", "feedback"),
    *_tests_of("bedrock", test_bedrock),
    Export("bedrock", "bedrock", {"evaluation.jsonl": _bedrock()}),
    _real("label-studio", "label_studio.json"),
    _real("label-studio", "label_studio_min.json", name="real_min"),
    _real("label-studio", "label_studio.csv", name="real_csv"),
    *_tests_of("label-studio", test_label_studio),
    _real("argilla", "argilla.json"),
    _real("argilla", "argilla_flat.json", name="real_flat"),
    *_tests_of("argilla", test_argilla),
)
"""Of all fourteen tools."""
