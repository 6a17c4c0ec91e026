"""Exports of all tools, with votes and with the records that an import skips.

The exports are those that tools wrote (``tests/data/importers/real``) where there are any, and
otherwise made up, with the cases that such exports have.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.data.importers import (
    test_bedrock,
    test_chat_ui,
    test_chats,
    test_fastchat,
    test_helicone,
    test_langfuse,
    test_langsmith,
    test_librechat,
    test_openai,
    test_phoenix,
)
from tests.data.importers.votes import REAL, write_jsonl
from valence.apps.feedback.import_rows import ImportSummary, import_feedback
from valence.options import ImportOptions


def write_langfuse(folder: Path) -> list[str]:
    observations = [
        test_langfuse.observation("failed", traceId="t2", level="ERROR"),
        test_langfuse.observation("image", traceId="t3", input=[{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:"}}]}]),
        *(test_langfuse.observation(f"g{number}", input=[
            {"role": "user", "content": f"question {number}"}]) for number in range(1, 5)),
    ]  # fmt: skip
    scores = [
        test_langfuse.score(),
        test_langfuse.score(id="s2", observationId="g2", value=0, stringValue="False"),
        test_langfuse.score(id="s3", observationId="g3", dataType="NUMERIC", value=0.5),
        test_langfuse.score(
            id="s4", observationId="g4", dataType="CORRECTION", name="output", value="Better"
        ),
        test_langfuse.score(id="s5", source="EVAL"),
        test_langfuse.score(id="s6", name="latency"),
        test_langfuse.score(id="s7", traceId="t2", observationId="failed"),
        test_langfuse.score(id="s8", traceId="t3", observationId="image"),
        test_langfuse.score(id="s9", traceId="t9", observationId=None),
        test_langfuse.score(id="s10", observationId="g9"),
        test_langfuse.score(id="s11", observationId=None),
    ]
    return [
        write_jsonl(folder / "scores.jsonl", scores),
        write_jsonl(folder / "observations.jsonl", observations),
    ]


def write_langsmith(folder: Path) -> list[str]:
    cut = {"outputs": {"choices": [{"text": "He", "finish_reason": "length"}]}}
    runs = [
        test_langsmith.root(),
        test_langsmith.llm("r1"),
        test_langsmith.llm("r2"),
        test_langsmith.llm("failed", **test_langsmith.ERROR),
        test_langsmith.llm("cut", **cut),
        test_langsmith.single("left"),
        test_langsmith.single("right"),
    ]
    feedback = [
        test_langsmith.feedback(run_id="r1"),
        test_langsmith.feedback(id="f2", run_id="r2", score=0.5),
        test_langsmith.feedback(id="f3", run_id="r2", score=None, correction="Better"),
        test_langsmith.feedback(id="f4", feedback_source={"type": "model"}),
        test_langsmith.feedback(id="f5", key="user_liked", score=0),
        test_langsmith.feedback(id="f6", key="correctness"),
        test_langsmith.feedback(id="f7", run_id="failed"),
        test_langsmith.feedback(id="f8", run_id="cut"),
        test_langsmith.feedback(id="f9", run_id="r9", trace_id="t9"),
        *test_langsmith.compared({"left": 1, "right": 0}),
    ]
    return [
        write_jsonl(folder / "feedback.jsonl", feedback),
        write_jsonl(folder / "runs.jsonl", runs),
    ]


def write_phoenix(folder: Path) -> list[str]:
    spans = [
        test_phoenix.root(),
        test_phoenix.span(),
        test_phoenix.span("llm2", context={"trace_id": "t4", "span_id": "llm2"}),
        test_phoenix.span(
            "failed", status_code="ERROR", context={"trace_id": "t2", "span_id": "failed"}
        ),
        test_phoenix.span(
            "image",
            attributes=test_phoenix.IMAGE,
            context={"trace_id": "t3", "span_id": "image"},
        ),
    ]
    annotations = [
        test_phoenix.annotation(),
        test_phoenix.thumbs(id="a2", result={"label": "negative", "score": 0.0}),
        test_phoenix.annotation(id="a3", annotator_kind="LLM"),
        test_phoenix.annotation(id="a4", name="note"),
        test_phoenix.annotation(id="a5", span_id="failed"),
        test_phoenix.annotation(id="a6", span_id="image"),
        test_phoenix.annotation(id="a7", span_id="deleted"),
        test_phoenix.annotation(id="a8", span_id="llm2"),
    ]
    return [
        write_jsonl(folder / "annotations.jsonl", annotations),
        write_jsonl(folder / "spans.jsonl", spans),
    ]


def write_helicone(folder: Path) -> list[str]:
    changes = [{}, {"feedback_rating": False}]
    changes += [changes for changes, _ in test_helicone.SKIPPED.values()]
    rows = [
        test_helicone.request(**{"request_id": f"r{number}", "feedback_id": f"f{number}", **change})
        for number, change in enumerate(changes)
    ]
    return [write_jsonl(folder / "requests.jsonl", rows)]


def write_openai(folder: Path) -> list[str]:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    rows = [
        test_openai.preference(),
        test_openai.preference(test_openai.answer("Four")),
        test_openai.preference(rejected=test_openai.answer("4")),
        test_openai.preference(messages=image),
        test_openai.preference(test_openai.answer("")),
        test_openai.preference(test_openai.answer("4") * 2),
        test_openai.preference([{"role": "user", "content": "4"}]),
        test_openai.preference(messages=[{"role": "critic", "content": "x"}]),
    ]
    return [write_jsonl(folder / "preferences.jsonl", rows)]


def write_bedrock(folder: Path) -> list[str]:
    good, bad = test_bedrock.GOOD, test_bedrock.BAD
    row = test_bedrock.dpo(good, bad)
    image = [{"role": "user", "content": [{"image": {"format": "png"}}]}, row["messages"][-1]]
    entry, evaluated = test_bedrock.entry, test_bedrock.evaluated
    rows = [
        row,
        test_bedrock.dpo(good, test_bedrock.candidate("Go", "non-preferred")),
        test_bedrock.dpo(good),
        test_bedrock.dpo(good, test_bedrock.candidate("", "non-preferred")),
        row | {"messages": image},
        evaluated({"thumbsUpDown": [entry(True), entry(False, "1")]}),
        evaluated({"thumbsUpDown": [entry(True, "2")]}),
        evaluated({"thumbsUpDown": [entry(None)]}),
    ]
    return [write_jsonl(folder / "rows.jsonl", rows)]


def write_fastchat(folder: Path) -> list[str]:
    single, state = test_fastchat.single, test_fastchat.state
    rows = [
        single(),
        single("downvote", "Capital of Spain?", "Madrid"),
        single("flag"),
        single("upvote", "Hi", None),
        single("upvote", "Hi", "**NETWORK ERROR DUE TO HIGH TRAFFIC. PLEASE REGENERATE.**"),
        single("upvote", "Hi"),
        single("upvote", ["Who?", ["b64"]], "A cat"),
        single(messages=[]),
        *(
            test_fastchat.logged_battle(
                kind,
                state("Hi", "Yes?", model_name="a", conv_id=f"{kind}1"),
                state("Hi", f"Yo, {kind}", model_name="b", conv_id=f"{kind}2"),
            )
            for kind in ("leftvote", "tievote", "bothbad_vote")
        ),
    ]
    return [write_jsonl(folder / "conv.jsonl", rows)]


def write_chat_ui(folder: Path) -> list[str]:
    turn, question = test_chat_ui.turn, test_chat_ui.HI
    conversations = [
        [question, turn("assistant", "Yo", 1), turn("user", "Bye"), turn("assistant", "What", -1)],
        [question, turn("assistant", "Yo")],
        [question | {"score": 1}],
        [question, turn("assistant", "", 1)],
        [turn("assistant", "Yo", 1)],
        [question, turn("user", "Hello"), turn("assistant", "Yo", 1)],
    ]
    return [test_chat_ui.write_parquet(folder / "chats.parquet", *conversations)]


def write_librechat(folder: Path) -> list[str]:
    up = test_librechat.UP
    changes = [
        {},
        {"feedback": test_librechat.DOWN},
        {"feedback": None},
        {"feedback": {"rating": None, "tags": ["x"]}},
        {"isCreatedByUser": True},
        {"error": True},
        {"unfinished": True},
        {"text": ""},
        {"files": [{"file_id": "f1"}]},
        {"content": [{"type": "tool_call", "tool_call": {}}, {"type": "text", "text": "Paris"}]},
        {"parentMessageId": "deleted"},
    ]
    rows = [test_librechat.QUESTION]
    rows += [
        test_librechat.message(f"a{number}", "m1", f"Paris {number}", feedback=up) | change
        for number, change in enumerate(changes)
    ]
    return [write_jsonl(folder / "messages.jsonl", rows)]


def write_chats(folder: Path) -> list[str]:
    return [test_chats.write_log(folder / "chats.jsonl")]


def real(*names: str) -> Callable[[Path], list[str]]:
    return lambda _: [str(REAL / name) for name in names]


EXPORTS: dict[str, Callable[[Path], list[str]]] = {
    "open_webui": real("open_webui_0.12.4.json", "open_webui_0.12.4_chats.json"),
    "librechat": write_librechat,
    "chat_ui": write_chat_ui,
    "chainlit": real(*(f"chainlit_{name}.json" for name in ("feedbacks", "steps", "threads"))),
    "gradio": real("gradio_6.31.0.csv"),
    "fastchat": write_fastchat,
    "langfuse": write_langfuse,
    "langsmith": write_langsmith,
    "phoenix": write_phoenix,
    "helicone": write_helicone,
    "openai": write_openai,
    "bedrock": write_bedrock,
    "label_studio": real("label_studio.json"),
    "argilla": real("argilla_flat.json"),
    "chats": write_chats,
}
"""Writes the export of a tool into a folder, and returns its files."""


def summary_of(source: str) -> ImportSummary:
    """What an import of a tool's export does."""
    with TemporaryDirectory() as folder, chdir(folder):
        return import_feedback(
            source, EXPORTS[source](Path()), ImportOptions(out=Path("out.jsonl"))
        )
