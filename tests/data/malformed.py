"""Realistic malformed files, with the number of examples that each yields, or its error."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.data.rows import ASSISTANT, JUDGED, USER

GOOD = json.dumps(JUDGED)


@dataclass(frozen=True)
class Expected:
    """An error: its code, and the columns, values and settings that it names."""

    code: str
    names: tuple[str, ...]


def error(code: str, *names: str) -> Expected:
    return Expected(code, names)


@dataclass(frozen=True)
class Case:
    """A file with the number of examples that it yields (``works``), or its error.

    line: where the error points (None: the file as a whole).
    row: it is one row's fault, so that it can be skipped.
    """

    name: str
    file: str
    content: bytes | str
    error: Expected | None = None
    line: int | None = None
    row: bool = False
    works: int = 0
    kind: Any = "judgement"
    source: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> str:
        path = folder / self.file
        path.write_bytes(self.content.encode() if isinstance(self.content, str) else self.content)
        return str(path)


def works(name: str, file: str, content: bytes | str, examples: int = 1, **more: Any) -> Case:
    return Case(name, file, content, works=examples, **more)


def bad_row(
    name: str, row: dict | str, error: Expected, kind: str = "judgement", good: dict | None = None
) -> Case:
    """The third line of a jsonl file, between good ones."""
    fine = json.dumps(good or JUDGED)
    text = row if isinstance(row, str) else json.dumps(row)
    return Case(
        name, "rows.jsonl", f"{fine}\n{fine}\n{text}\n{fine}\n", error, line=3, row=True, kind=kind
    )


def bad_file(
    name: str,
    file: str,
    content: bytes | str,
    error: Expected,
    line: int | None = None,
    **more: Any,
) -> Case:
    return Case(name, file, content, error, line=line, **more)


def judged(**changes: Any) -> dict:
    return {**JUDGED, **changes}


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
RANKED = {"prompt": "p", "completions": ["a", "b"], "scores": [1, 2]}
SCORED = {"prompt": "p", "completion": "a", "score": 1}
TOKENS = {"prompt_ids": [1], "completion_ids": [2], "label": True}
CSV = "prompt,completion,label\nSay hi.,Hi!,true\n"


CASES = [
    # These work
    works(
        "byte order mark before every line",
        "a.jsonl",
        b"\xef\xbb\xbf" + GOOD.encode() + b"\n\xef\xbb\xbf" + GOOD.encode(),
        2,
    ),
    works("no newline at the end", "a.jsonl", GOOD),
    works(
        "unicode line separators inside text",
        "a.jsonl",
        json.dumps(judged(completion="a\u2028b\x85c"), ensure_ascii=False),
    ),
    works("a huge row", "a.jsonl", json.dumps(judged(completion="x" * 3_000_000))),
    works("a huge cell", "a.csv", f"prompt,completion,label\np,{'x' * 1_000_000},1\n"),
    works("a text label", "a.csv", CSV + "p,a,FALSE\n", 2),
    works("semicolons", "a.csv", CSV.replace(",", ";") + "Hello, you;Hi, you;yes\n", 2),
    works(
        "quoted fields between semicolons",
        "a.csv",
        '"prompt";"completion";"label"\n"a;b";"c ""d""";no\n',
    ),
    works("tabs in a csv file", "a.csv", CSV.replace(",", "\t")),
    works("commas in a tsv file", "a.tsv", CSV),
    works("semicolons in the texts of a table", "a.csv", CSV + "a;b;c,d;e;f,1\n", 2),
    works(
        "one column of texts with semicolons", "a.csv", "prompt\na;b\nc;d;e\n\n\n", 2, kind="prompt"
    ),
    works("a chat that is a single object", "a.jsonl", json.dumps(judged(prompt=USER))),
    works(
        "turns of ShareGPT in a prompt",
        "a.jsonl",
        json.dumps(judged(prompt=[{"from": "human", "value": "hi"}])),
    ),
    works("an unnamed index column", "a.csv", ",prompt,completion,label\n0,p,a,1\n"),
    works(
        "escaped surrogate pairs",
        "a.jsonl",
        r'{"prompt": "p", "completion": "\ud83d\ude00", "label": true}',
    ),
    works(
        "null for an optional column",
        "a.jsonl",
        json.dumps(judged(score=None, weight=None, tools=None)),
    ),
    works("extra columns", "a.jsonl", json.dumps(judged(id=1, meta={"a": [1]}))),
    # Broken JSON
    bad_row("not json", "hello", error("json-syntax", "column 1")),
    bad_row(
        "a trailing comma",
        '{"prompt": "p", "completion": "a", "label": true,}',
        error("json-syntax", "column 50"),
    ),
    bad_row("a row cut short", '{"prompt": "p", "comple', error("json-syntax", "column 17")),
    bad_row("two objects on a line", GOOD + GOOD, error("json-syntax", "58")),
    bad_row(
        "a control character",
        '{"prompt": "p\x01", "completion": "a", "label": true}',
        error("json-syntax", "column 14"),
    ),
    bad_row(
        "half a character",
        r'{"prompt": "p", "completion": "\ud83d", "label": true}',
        error("json-invalid", "\\ud"),
    ),
    bad_row(
        "a name twice",
        '{"prompt": "p", "completion": "a", "completion": "b", "label": true}',
        error("json-invalid", "'completion'"),
    ),
    bad_row(
        "NaN for a label",
        '{"prompt": "p", "completion": "a", "label": NaN}',
        error("json-invalid", "NaN"),
    ),
    bad_row(
        "an infinite weight",
        '{"prompt": "p", "completion": "a", "label": true, "weight": Infinity}',
        error("json-invalid", "Infinity"),
    ),
    bad_row(
        "a number too large",
        '{"prompt": "p", "completion": "a", "label": true, "weight": 1e999}',
        error("row-number-invalid", "weight"),
    ),
    bad_row(
        "a number of 5000 digits",
        f'{{"prompt": "p", "completion": "a", "label": {"1" * 5000}}}',
        error("json-limits", "digits"),
    ),
    bad_row("nested too deeply", '{"prompt": ' + "[" * 100_000, error("json-limits")),
    bad_row("a list for a row", '["p", "a", true]', error("row-not-an-object", "list")),
    bad_file(
        "an array that is not closed",
        "a.json",
        f"[{GOOD},\n{GOOD}",
        error("json-syntax", "column 58"),
        2,
    ),
    bad_file(
        "an array that ends in a comma",
        "a.json",
        f"[{GOOD},\n",
        error("json-syntax", "column 1"),
        2,
    ),
    bad_file(
        "an array without commas", "a.json", f"[{GOOD}\n{GOOD}]", error("json-syntax", "','"), 2
    ),
    bad_file(
        "text after the array", "a.json", f"[{GOOD}]\n{GOOD}", error("json-syntax", "column 1"), 2
    ),
    bad_file(
        "objects over several lines, one after the other",
        "a.json",
        json.dumps(JUDGED, indent=1) * 2,
        error("json-syntax", "column 2"),
        5,
    ),
    bad_file(
        "rows over several lines in jsonl",
        "a.jsonl",
        json.dumps(JUDGED, indent=1),
        error("json-syntax", "column 2"),
        1,
    ),
    bad_file(
        "several lists of rows",
        "a.json",
        f'{{"train": [{GOOD}], "test": [{GOOD}]}}',
        error("file-several-lists", "train", "test"),
    ),
    bad_file("a number for a file", "a.json", "12", error("row-not-an-object", "number"), 1),
    # Broken bytes
    bad_file(
        "utf-16", "a.jsonl", GOOD.encode("utf-16"), error("file-encoding", "UTF-16", "a.utf8.jsonl")
    ),
    bad_file("utf-32", "a.jsonl", GOOD.encode("utf-32"), error("file-encoding", "-f UTF-32")),
    bad_file(
        "utf-16 in a gzip file",
        "a.csv.gz",
        gzip.compress(CSV.encode("utf-16")),
        error("file-encoding", "gunzip", "a.utf8.csv.gz"),
    ),
    bad_file(
        "a number of 5000 digits in an array",
        "a.json",
        f"[{GOOD},\n[{'9' * 5000}]]",
        error("json-limits", "4,300 digits"),
        2,
    ),
    bad_file(
        "latin-1",
        "a.jsonl",
        f"{GOOD}\n".encode() + '{"prompt": "é"}'.encode("latin-1"),
        error("file-encoding", "0xe9", "WINDOWS-1252"),
        2,
    ),
    bad_file(
        "latin-1 in an array",
        "a.json",
        f"[{GOOD},\n".encode() + '{"prompt": "é"}]'.encode("latin-1"),
        error("file-encoding", "0xe9", "WINDOWS-1252"),
        2,
    ),
    bad_file(
        "latin-1 in a table",
        "a.csv",
        CSV.encode() + "é,a,1\n".encode("latin-1"),
        error("file-encoding", "0xe9", "WINDOWS-1252"),
        3,
    ),
    bad_file("a picture", "a.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", error("file-binary")),
    bad_file(
        "gzip cut short",
        "a.jsonl.gz",
        gzip.compress(GOOD.encode() * 100)[:-20],
        error("file-damaged", "gzip"),
    ),
    bad_file(
        "gzip with wrong bytes",
        "a.jsonl.gz",
        gzip.compress(GOOD.encode())[:12] + b"xxxxxxxxxxxxxxxx",
        error("file-damaged", "gzip"),
    ),
    bad_file("parquet in name only", "a.parquet", GOOD, error("file-damaged", "parquet")),
    bad_file(
        "parquet cut short", "a.parquet", b"PAR1" + b"x" * 40, error("file-damaged", "parquet")
    ),
    # No rows
    bad_file("an empty file", "a.jsonl", b"", error("file-empty")),
    bad_file("only blank lines", "a.jsonl", "\n  \n\r\n", error("file-empty")),
    bad_file("an empty array", "a.json", "[]", error("file-empty")),
    bad_file("an empty json file", "a.json", "\n", error("file-empty")),
    bad_file("only a header", "a.csv", "prompt,completion,label\n", error("file-empty")),
    bad_file("an empty gzip file", "a.jsonl.gz", gzip.compress(b""), error("file-empty")),
    bad_file("an unknown suffix", "a.xlsx", GOOD, error("file-suffix-unknown", ".xlsx", ".jsonl")),
    bad_file("a recipe", "recipe.yaml", "method: kto\n", error("recipe-not-rows", "data.train")),
    bad_file("no suffix", "feedback", GOOD, error("file-suffix-unknown", ".jsonl")),
    # Tables
    bad_file("a quote that is not closed", "a.csv", CSV + 'p,"a,1\n', error("csv-syntax"), 3),
    Case(
        "a row of semicolons too many",
        "a.csv",
        CSV.replace(",", ";") + "p;a;b;1\n",
        error("csv-field-count", "4", "3", "';'"),
        line=3,
        row=True,
    ),
    Case(
        "an empty row of one column",
        "a.csv",
        "prompt\np\n\nq\n",
        error("row-empty"),
        line=3,
        row=True,
        kind="prompt",
    ),
    Case(
        "an empty field of one column",
        "a.csv",
        'prompt\np\n""\n',
        error("row-empty"),
        line=3,
        row=True,
        kind="prompt",
    ),
    bad_file(
        "a column twice",
        "a.csv",
        "prompt,prompt,label\na,b,1\n",
        error("column-duplicate", "prompt"),
        1,
    ),
    bad_file("old line ends", "a.csv", CSV.replace("\n", "\r"), error("csv-syntax"), 1),
    Case(
        "a field too many",
        "a.csv",
        CSV + "p,a,b,1\n" + "p,a,1\n",
        error("csv-field-count", "4", "3", "','"),
        line=3,
        row=True,
    ),
    Case(
        "a field too few",
        "a.csv",
        CSV + "p,a\n" + "p,a,1\n",
        error("csv-field-count", "2", "3", "empty"),
        line=3,
        row=True,
    ),
    bad_file("unnamed columns", "a.csv", "prompt,,\na,b,1\n", error("column-duplicate", "2"), 1),
    Case(
        "an empty label",
        "a.csv",
        CSV + "p,a,\n",
        error("row-rating-missing", "label", "remove"),
        line=3,
        row=True,
    ),
    Case(
        "chat as text",
        "a.csv",
        CSV + "\"[{'role': 'user', 'content': 'hi'}]\",a,1\n",
        error("row-turns-as-text", "prompt"),
        line=3,
        row=True,
    ),
    # Columns
    bad_row(
        "no label",
        {"prompt": "p", "completion": "a", "label": None},
        error("row-rating-missing", "label", "remove"),
    ),
    bad_row(
        "a label of blanks",
        judged(label="  "),
        error("row-rating-missing", "label", "remove"),
    ),
    bad_row(
        "another format",
        PAIR,
        error("row-column-missing", "completion", "label", "judgement", "preference"),
    ),
    bad_row(
        "more than the others have",
        {**JUDGED, "weight": 1},
        error("row-format-differs", "judgement", "demonstration"),
        "demonstration",
        {"prompt": "p", "completion": "a"},
    ),
    bad_row(
        "another dialect",
        {"prompt": [{"from": "user", "content": "a"}], "completion": "b", "label": True},
        error("row-format-differs", "colossalchat", "judgement"),
    ),
    bad_row("an empty object", {}, error("row-column-missing", "prompt", "completion", "label")),
    bad_row(
        "another type of feedback",
        {"prompt": [USER], "output": [ASSISTANT], "label": 1, "type": "sample"},
        error("row-type-differs", "'sample'", "binary_feedback"),
        good={"prompt": [USER], "output": [ASSISTANT], "label": 1},
    ),
    bad_file(
        "unknown columns",
        "a.jsonl",
        '{"question": "a", "answer": "b"}',
        error("format-unknown-columns", "'answer', 'question'", "keys: {prompt:"),
    ),
    bad_file(
        "several formats",
        "a.jsonl",
        json.dumps({**JUDGED, **PAIR}),
        error("format-ambiguous", "format: judgement or format: preference"),
    ),
    bad_file(
        "an unknown format",
        "a.jsonl",
        GOOD,
        error("format-unknown", "'judgment'", "judgement?"),
        source={"format": "judgment"},
    ),
    bad_file(
        "keys of a column that is not there",
        "a.jsonl",
        GOOD,
        error("keys-missing-column", "'answr'", "completion, label, prompt"),
        source={"keys": {"completion": "answr"}},
    ),
    bad_file(
        "keys of a part that is not there",
        "a.jsonl",
        GOOD,
        error("keys-unknown-column", "'answer'", "completion"),
        source={"keys": {"answer": "completion"}},
    ),
    bad_file(
        "a split of a file",
        "a.jsonl",
        GOOD,
        error("split-not-a-hub-dataset", "split: train"),
        source={"split": "train"},
    ),
    bad_file(
        "rows of another kind",
        "a.jsonl",
        json.dumps(PAIR),
        error("kind-mismatch", "data.convert: pairs_to_judgements"),
        1,
    ),
    # Labels and numbers
    bad_row(
        "an unknown label",
        judged(label="maybe"),
        error("row-label-invalid", "label", "'maybe'", "thumbs_up", "thumbs_down"),
    ),
    bad_row("a negative weight", judged(weight=-1), error("row-number-range", "weight", "-1")),
    bad_row(
        "a weight that is text",
        judged(weight="heavy"),
        error("row-number-invalid", "weight", "'heavy'"),
    ),
    bad_row(
        "a score that is not a number",
        judged(score="nan"),
        error("row-number-invalid", "score", "'nan'"),
    ),
    # Text and chat
    bad_row(
        "an empty completion", judged(completion=""), error("row-completion-empty", "completion")
    ),
    bad_row(
        "a blank completion",
        judged(completion=" \n\t"),
        error("row-completion-empty", "completion"),
    ),
    bad_row("an empty prompt", judged(prompt=""), error("row-prompt-empty", "prompt")),
    bad_row("a number for a prompt", judged(prompt=12), error("row-value-type", "prompt", "12")),
    bad_row(
        "a number for a completion",
        judged(completion=12),
        error("row-value-type", "completion", "12"),
    ),
    bad_row("an empty chat", judged(prompt=[]), error("row-value-type", "prompt", "[]")),
    bad_row(
        "turns that are text",
        judged(prompt=["a", "b"]),
        error("row-value-type", "turn 1 of prompt", "'a'"),
    ),
    bad_row(
        "an unknown role",
        judged(prompt=[{"role": "moderator", "content": "a"}]),
        error("row-role-invalid", "turn 1 of prompt", "'moderator'"),
    ),
    bad_row(
        "a role that is a list",
        judged(prompt=[{"role": ["user"], "content": "a"}]),
        error("row-role-invalid", "turn 1 of prompt", "['user']"),
    ),
    bad_row(
        "no role",
        judged(prompt=[{"content": "a"}]),
        error("row-role-invalid", "turn 1 of prompt", "role"),
    ),
    bad_row(
        "content without parts",
        judged(prompt=[{"role": "user", "content": []}]),
        error("row-content-invalid", "turn 1 of prompt", "content"),
    ),
    bad_row(
        "no content",
        judged(prompt=[{"role": "user"}]),
        error("row-content-invalid", "turn 1 of prompt", "content"),
    ),
    bad_row(
        "a prompt that ends with an answer",
        judged(prompt=[USER, ASSISTANT]),
        error("row-prompt-end", "prompt", "assistant"),
    ),
    bad_row(
        "an answer of the user",
        judged(prompt=[USER], completion=[{"role": "user", "content": "a"}]),
        error("row-completion-turns", "completion", "user"),
    ),
    bad_row(
        "an empty turn for an answer",
        judged(prompt=[USER], completion=[{"role": "assistant", "content": ""}]),
        error("row-completion-empty", "completion"),
    ),
    bad_row(
        "an answer that is a tool's",
        judged(prompt=[USER], completion=[{"role": "tool", "content": "a"}]),
        error("row-completion-not-assistant", "completion"),
    ),
    bad_row(
        "tools with a text prompt",
        judged(tools=[{"name": "clock"}]),
        error("row-tools-without-turns", "tools", "prompt"),
    ),
    bad_row(
        "tools that are not a list",
        judged(prompt=[USER], tools="clock"),
        error("row-value-type", "tools", "'clock'"),
    ),
    bad_row(
        "a conversation without an answer",
        {"messages": [USER]},
        error("row-answer-missing", "messages", "user"),
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    bad_row(
        "a conversation that is only an answer",
        {"messages": [ASSISTANT]},
        error("row-prompt-end", "messages"),
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    # Pairs, rankings, token ids
    bad_row(
        "chosen is rejected",
        {"prompt": "p", "chosen": "a", "rejected": "a"},
        error("row-pair-identical", "chosen", "rejected"),
        "preference",
        PAIR,
    ),
    bad_row(
        "no shared prompt",
        {"chosen": [USER, ASSISTANT], "rejected": [{"role": "user", "content": "b"}, ASSISTANT]},
        error("row-prompt-not-shared", "prompt", "chosen", "rejected"),
        "preference",
        PAIR,
    ),
    bad_row(
        "no prompt at all",
        {"chosen": "a", "rejected": "b"},
        error("row-prompt-not-shared", "prompt"),
        "preference",
        PAIR,
    ),
    bad_row(
        "one side longer than its pair",
        {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT, USER, ASSISTANT]},
        error("row-completion-turns", "rejected", "user"),
        "preference",
        PAIR,
    ),
    bad_row(
        "tied rewards",
        {
            "prompt": [USER],
            "output_A": "a",
            "output_B": "b",
            "label": 0,
            "reward_A": 1,
            "reward_B": 1,
        },
        error("row-pair-tied", "reward"),
        "preference",
        {"prompt": [USER], "output_A": "a", "output_B": "b", "label": 0},
    ),
    bad_row(
        "a score too few",
        {**RANKED, "scores": [1]},
        error("row-value-type", "scores", "[1]", "2"),
        "ranking",
        RANKED,
    ),
    bad_row(
        "no scores",
        {"prompt": "p", "completions": ["a", "b"]},
        error("row-scores-missing", "scores", "ranks"),
        "ranking",
        RANKED,
    ),
    bad_row(
        "a rank of 0",
        {"prompt": "p", "completions": ["a", "b"], "ranks": [0, 1]},
        error("row-rank-invalid", "ranks", "[0, 1]"),
        "ranking",
        RANKED,
    ),
    bad_row(
        "scores and ranks",
        {**RANKED, "ranks": [1, 2]},
        error("row-scores-and-ranks", "scores", "ranks"),
        "ranking",
        RANKED,
    ),
    bad_row(
        "one answer to rank",
        {"prompt": "p", "completions": ["a"], "scores": [1]},
        error("row-value-type", "completions", "['a']"),
        "ranking",
        RANKED,
    ),
    bad_row(
        "token ids that are text",
        {**TOKENS, "completion_ids": ["a"]},
        error("row-tokens-invalid", "completion_ids", "['a']"),
        good=TOKENS,
    ),
    bad_row(
        "no token ids",
        {**TOKENS, "completion_ids": []},
        error("row-tokens-invalid", "completion_ids", "[]"),
        good=TOKENS,
    ),
    bad_row(
        "negative token ids",
        {**TOKENS, "prompt_ids": [-1]},
        error("row-tokens-invalid", "prompt_ids", "[-1]"),
        good=TOKENS,
    ),
]
