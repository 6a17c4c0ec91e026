"""Files as people really have them, and what is to become of each: so many Examples, or a message."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.data.rows import ASSISTANT, JUDGED, USER

GOOD = json.dumps(JUDGED)


@dataclass(frozen=True)
class Case:
    """A file, and what is to become of it: so many Examples (``works``), or a message that matches ``says``.

    ``line``: where the message points (None: the file as a whole). ``row``: it is one row's fault, so that it can be skipped.
    """

    name: str
    file: str
    content: bytes | str
    says: str = ""
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


def bad_row(name: str, row: dict | str, says: str, kind: str = "judgement", good: dict | None = None) -> Case:
    """The third line of a jsonl file, between good ones."""
    fine = json.dumps(good or JUDGED)
    text = row if isinstance(row, str) else json.dumps(row)
    return Case(name, "rows.jsonl", f"{fine}\n{fine}\n{text}\n{fine}\n", says, line=3, row=True, kind=kind)


def bad_file(name: str, file: str, content: bytes | str, says: str, line: int | None = None, **more: Any) -> Case:
    return Case(name, file, content, says, line=line, **more)


def judged(**changes: Any) -> dict:
    return {**JUDGED, **changes}


PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
RANKED = {"prompt": "p", "completions": ["a", "b"], "scores": [1, 2]}
SCORED = {"prompt": "p", "completion": "a", "score": 1}
TOKENS = {"prompt_ids": [1], "completion_ids": [2], "label": True}
CSV = "prompt,completion,label\nSay hi.,Hi!,true\n"


CASES = [
    # These work
    works("byte order mark", "a.jsonl", b"\xef\xbb\xbf" + GOOD.encode()),
    works("byte order mark before every line", "a.jsonl", b"\xef\xbb\xbf" + GOOD.encode() + b"\n\xef\xbb\xbf" + GOOD.encode(), 2),
    works("windows line ends", "a.jsonl", GOOD + "\r\n" + GOOD + "\r\n", 2),
    works("blank lines", "a.jsonl", f"\n\n{GOOD}\n   \n{GOOD}\n\n", 2),
    works("no newline at the end", "a.jsonl", GOOD),
    works("gzip with the suffix of plain text", "a.jsonl", gzip.compress(GOOD.encode())),
    works("plain text with the suffix of gzip", "a.jsonl.gz", GOOD),
    works("an array in a jsonl file", "a.jsonl", f"[{GOOD},\n{GOOD}]", 2),
    works("lines in a json file", "a.json", f"{GOOD}\n{GOOD}\n", 2),
    works("rows inside an object", "a.json", f'{{"version": 2, "rows": [{GOOD}]}}'),
    works("unicode line separators inside text", "a.jsonl", json.dumps(judged(completion="a\u2028b\x85c"), ensure_ascii=False)),
    works("a huge row", "a.jsonl", json.dumps(judged(completion="x" * 3_000_000))),
    works("a huge cell", "a.csv", f"prompt,completion,label\np,{'x' * 1_000_000},1\n"),
    works("a text label", "a.csv", CSV + "p,a,FALSE\n", 2),
    works("semicolons", "a.csv", CSV.replace(",", ";") + "Hello, you;Hi, you;yes\n", 2),
    works("quoted fields between semicolons", "a.csv", '"prompt";"completion";"label"\n"a;b";"c ""d""";no\n'),
    works("tabs in a csv file", "a.csv", CSV.replace(",", "\t")),
    works("commas in a tsv file", "a.tsv", CSV),
    works("semicolons in the texts of a table", "a.csv", CSV + "a;b;c,d;e;f,1\n", 2),
    works("one column of texts with semicolons", "a.csv", "prompt\na;b\nc;d;e\n\n\n", 2, kind="prompt"),
    works("a chat that is a single object", "a.jsonl", json.dumps(judged(prompt=USER))),
    works("turns of ShareGPT in a prompt", "a.jsonl", json.dumps(judged(prompt=[{"from": "human", "value": "hi"}]))),
    works("an unnamed index column", "a.csv", ",prompt,completion,label\n0,p,a,1\n"),
    works("escaped surrogate pairs", "a.jsonl", r'{"prompt": "p", "completion": "\ud83d\ude00", "label": true}'),
    works("null for an optional column", "a.jsonl", json.dumps(judged(score=None, weight=None, tools=None))),
    works("extra columns", "a.jsonl", json.dumps(judged(id=1, meta={"a": [1]}))),
    # Broken JSON
    bad_row("not json", "hello", "not valid JSON"),
    bad_row("single quotes", "{'prompt': 'p', 'completion': 'a', 'label': True}", "not valid JSON"),
    bad_row("a trailing comma", '{"prompt": "p", "completion": "a", "label": true,}', "not valid JSON"),
    bad_row("a row cut short", '{"prompt": "p", "comple', "not valid JSON"),
    bad_row("two objects on a line", GOOD + GOOD, "not valid JSON: Extra data"),
    bad_row("a control character", '{"prompt": "p\x01", "completion": "a", "label": true}', "not valid JSON"),
    bad_row("half a character", r'{"prompt": "p", "completion": "\ud83d", "label": true}', "half a character"),
    bad_row("a name twice", '{"prompt": "p", "completion": "a", "completion": "b", "label": true}', "'completion' appears twice"),
    bad_row("NaN for a label", '{"prompt": "p", "completion": "a", "label": NaN}', "NaN is not a JSON value"),
    bad_row("an infinite weight", '{"prompt": "p", "completion": "a", "label": true, "weight": Infinity}', "Infinity is not"),
    bad_row("a number too large", '{"prompt": "p", "completion": "a", "label": true, "weight": 1e999}', "finite number"),
    bad_row("a number of 5000 digits", f'{{"prompt": "p", "completion": "a", "label": {"1" * 5000}}}', "cannot be read as JSON"),
    bad_row("nested too deeply", '{"prompt": ' + "[" * 100_000, "nested too deeply"),
    bad_row("a list for a row", '["p", "a", true]', "a JSON list, not an object"),
    bad_row("a string for a row", '"p"', "a JSON str, not an object"),
    bad_file("an array that is not closed", "a.json", f"[{GOOD},\n{GOOD}", "not closed", 2),
    bad_file("an array that ends in a comma", "a.json", f"[{GOOD},\n", "not valid JSON", 2),
    bad_file("an array without commas", "a.json", f"[{GOOD}\n{GOOD}]", "Expecting ','", 2),
    bad_file("text after the array", "a.json", f"[{GOOD}]\n{GOOD}", "Extra data after the array", 2),
    bad_file("objects over several lines, one after the other", "a.json", json.dumps(JUDGED, indent=1) * 2, "Extra data", 5),
    bad_file("rows over several lines in jsonl", "a.jsonl", json.dumps(JUDGED, indent=1), "one whole JSON object per line", 1),
    bad_file("several lists of rows", "a.json", f'{{"train": [{GOOD}], "test": [{GOOD}]}}', "several lists of rows: train, test"),
    bad_file("a number for a file", "a.json", "12", "a JSON int, not an object", 1),
    # Broken bytes
    bad_file("utf-16", "a.jsonl", GOOD.encode("utf-16"), "UTF-16"),
    bad_file(
        "latin-1", "a.jsonl", f"{GOOD}\n".encode() + '{"prompt": "é"}'.encode("latin-1"), r"not UTF-8 text \(byte 0xe9\)", 2
    ),
    bad_file("latin-1 in an array", "a.json", f"[{GOOD},\n".encode() + '{"prompt": "é"}]'.encode("latin-1"), "not UTF-8", 2),
    bad_file("latin-1 in a table", "a.csv", CSV.encode() + "é,a,1\n".encode("latin-1"), "not UTF-8", 3),
    bad_file("a picture", "a.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "binary"),
    bad_file("a zip archive", "a.jsonl", b"PK\x03\x04\x14\0\0\0\x08\0", "binary"),
    bad_file("gzip cut short", "a.jsonl.gz", gzip.compress(GOOD.encode() * 100)[:-20], "gzip file is damaged"),
    bad_file(
        "gzip with wrong bytes", "a.jsonl.gz", gzip.compress(GOOD.encode())[:12] + b"xxxxxxxxxxxxxxxx", "gzip file is damaged"
    ),
    bad_file("parquet in name only", "a.parquet", GOOD, "parquet file cannot be read"),
    bad_file("parquet cut short", "a.parquet", b"PAR1" + b"x" * 40, "parquet file cannot be read"),
    # No rows
    bad_file("an empty file", "a.jsonl", b"", "no rows"),
    bad_file("only blank lines", "a.jsonl", "\n  \n\r\n", "no rows"),
    bad_file("an empty array", "a.json", "[]", "no rows"),
    bad_file("an empty json file", "a.json", "\n", "no rows"),
    bad_file("only a header", "a.csv", "prompt,completion,label\n", "no rows"),
    bad_file("an empty gzip file", "a.jsonl.gz", gzip.compress(b""), "no rows"),
    bad_file("an unknown suffix", "a.xlsx", GOOD, "ending in .xlsx are not read"),
    bad_file("no suffix", "feedback", GOOD, "ending in nothing are not read"),
    # Tables
    bad_file("a quote that is not closed", "a.csv", CSV + 'p,"a,1\n', "cannot be read: unexpected end of data", 3),
    Case("a row of semicolons too many", "a.csv", CSV.replace(",", ";") + "p;a;b;1\n", "4 fields, and the", line=3, row=True),
    Case("an empty row of one column", "a.csv", "prompt\np\n\nq\n", "the row is empty", line=3, row=True, kind="prompt"),
    Case("an empty field of one column", "a.csv", 'prompt\np\n""\n', "the row is empty", line=3, row=True, kind="prompt"),
    bad_file("a column twice", "a.csv", "prompt,prompt,label\na,b,1\n", "column twice: prompt", 1),
    bad_file("old line ends", "a.csv", CSV.replace("\n", "\r"), "new-line character", 1),
    Case("a field too many", "a.csv", CSV + "p,a,b,1\n" + "p,a,1\n", "4 fields, and the header has 3", line=3, row=True),
    Case("an empty label", "a.csv", CSV + "p,a,\n", "the row has no label", line=3, row=True),
    Case(
        "chat as text",
        "a.csv",
        CSV + "\"[{'role': 'user', 'content': 'hi'}]\",a,1\n",
        "chat turns written as text",
        line=3,
        row=True,
    ),
    # Columns
    bad_row(
        "no label", {"prompt": "p", "completion": "a", "label": None}, "the row has no label.*looks like the format demonstration"
    ),
    bad_row("another format", PAIR, "no completion and no label.*looks like the format preference"),
    bad_row(
        "more than the others have",
        {**JUDGED, "weight": 1},
        "the row has the format judgement, and the file's first rows have demonstration",
        "demonstration",
        {"prompt": "p", "completion": "a"},
    ),
    bad_row(
        "another dialect", {"prompt": [{"from": "user", "content": "a"}], "completion": "b", "label": True}, "format colossalchat"
    ),
    bad_row("an empty object", {}, "no prompt and no completion and no label"),
    bad_row(
        "another type of feedback",
        {"prompt": [USER], "output": [ASSISTANT], "label": 1, "type": "sample"},
        "type is 'sample', not binary_feedback",
        good={"prompt": [USER], "output": [ASSISTANT], "label": 1},
    ),
    bad_file("unknown columns", "a.jsonl", '{"question": "a", "answer": "b"}', "format: prompt|no format fits"),
    bad_file("several formats", "a.jsonl", json.dumps({**JUDGED, **PAIR}), "fit several formats"),
    bad_file(
        "an unknown format", "a.jsonl", GOOD, "no format 'judgment'.*\n.*did you mean judgement", source={"format": "judgment"}
    ),
    bad_file(
        "keys of a column that is not there",
        "a.jsonl",
        GOOD,
        "no row has a column 'answr'",
        source={"keys": {"completion": "answr"}},
    ),
    bad_file(
        "keys of a part that is not there",
        "a.jsonl",
        GOOD,
        "no format has a column 'answer'",
        source={"keys": {"answer": "completion"}},
    ),
    bad_file("a split of a file", "a.jsonl", GOOD, "only hub data sets have splits", source={"split": "train"}),
    bad_file("rows of another kind", "a.jsonl", json.dumps(PAIR), "pairs_to_judgements", 1),
    # Labels and numbers
    bad_row("an unknown label", judged(label="maybe"), "label is 'maybe', which is not a label\n.*thumbs_up or thumbs_down"),
    bad_row("a graded label", judged(label=0.7), "label is 0.7, which is not a label\n.*score"),
    bad_row("a label out of range", judged(label=2), "label is 2"),
    bad_row("a list of labels", judged(label=[True]), r"label is \[True\]"),
    bad_row("a negative weight", judged(weight=-1), "must not be negative"),
    bad_row("a weight that is text", judged(weight="heavy"), "weight is 'heavy'"),
    bad_row("a weight that is true", judged(weight=True), "weight is True"),
    bad_row("a weight with a separator", judged(weight="1_000"), "weight is '1_000'"),
    bad_row("a weight in other digits", judged(weight="٣"), "weight is '٣'"),
    bad_row("a score that is not a number", judged(score="nan"), "score is 'nan'"),
    # Text and chat
    bad_row("an empty completion", judged(completion=""), "completion is empty"),
    bad_row("a blank completion", judged(completion=" \n\t"), "completion is empty"),
    bad_row("an empty prompt", judged(prompt=""), "prompt is empty"),
    bad_row("a number for a prompt", judged(prompt=12), "prompt is 12"),
    bad_row("a number for a completion", judged(completion=12), "completion is 12"),
    bad_row("an empty chat", judged(prompt=[]), r"prompt is \[\], and must be a list of chat turns"),
    bad_row("turns that are text", judged(prompt=["a", "b"]), "turn 1 of prompt is 'a'"),
    bad_row("an unknown role", judged(prompt=[{"role": "moderator", "content": "a"}]), "turn 1 of prompt has role 'moderator'"),
    bad_row("a role that is a list", judged(prompt=[{"role": ["user"], "content": "a"}]), r"has role \['user'\]"),
    bad_row("no role", judged(prompt=[{"content": "a"}]), "has role missing"),
    bad_row("a part without text", judged(prompt=[{"role": "user", "content": [{"type": "text"}]}]), "part 1 .* has no text"),
    bad_row(
        "an image",
        judged(prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}]),
        "part 1 of content of turn 1 of prompt has type 'image_url', and only text",
    ),
    bad_row("content without parts", judged(prompt=[{"role": "user", "content": []}]), "has content missing"),
    bad_row(
        "an answer that is not to be learnt",
        {"messages": [USER, {**ASSISTANT, "weight": 0}]},
        "weight 0, so there is nothing to learn",
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    bad_row(
        "half a weight of a turn",
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
        "weight of turn 2 of messages is 0.5",
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    bad_row("no content", judged(prompt=[{"role": "user"}]), "has content missing"),
    bad_row("a prompt that ends with an answer", judged(prompt=[USER, ASSISTANT]), "ends with a turn of the assistant"),
    bad_row("an answer of the user", judged(prompt=[USER], completion=[{"role": "user", "content": "a"}]), "has a user turn"),
    bad_row(
        "an empty turn for an answer",
        judged(prompt=[USER], completion=[{"role": "assistant", "content": ""}]),
        "completion is empty",
    ),
    bad_row("an answer that is a tool's", judged(prompt=[USER], completion=[{"role": "tool", "content": "a"}]), "not an answer"),
    bad_row("tools with a text prompt", judged(tools=[{"name": "clock"}]), "has tools, and its prompt is text"),
    bad_row("tools that are not a list", judged(prompt=[USER], tools="clock"), "tools is 'clock'"),
    bad_row(
        "a conversation without an answer",
        {"messages": [USER]},
        "ends with a user turn",
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    bad_row(
        "a conversation that is only an answer",
        {"messages": [ASSISTANT]},
        "has no turns",
        "demonstration",
        {"messages": [USER, ASSISTANT]},
    ),
    # Pairs, rankings, token ids
    bad_row("chosen is rejected", {"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same", "preference", PAIR),
    bad_row(
        "no shared prompt",
        {"chosen": [USER, ASSISTANT], "rejected": [{"role": "user", "content": "b"}, ASSISTANT]},
        "do not begin with the same user turn",
        "preference",
        PAIR,
    ),
    bad_row("no prompt at all", {"chosen": "a", "rejected": "b"}, "the row has no prompt", "preference", PAIR),
    bad_row(
        "one side longer than its pair",
        {"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT, USER, ASSISTANT]},
        "has a user turn that is not part of the prompt",
        "preference",
        PAIR,
    ),
    bad_row(
        "tied rewards",
        {"prompt": [USER], "output_A": "a", "output_B": "b", "label": 0, "reward_A": 1, "reward_B": 1},
        "the same reward",
        "preference",
        {"prompt": [USER], "output_A": "a", "output_B": "b", "label": 0},
    ),
    bad_row("a score too few", {**RANKED, "scores": [1]}, "a list of 2 numbers", "ranking", RANKED),
    bad_row("no scores", {"prompt": "p", "completions": ["a", "b"]}, "no scores and no ranks", "ranking", RANKED),
    bad_row(
        "a rank of 0", {"prompt": "p", "completions": ["a", "b"], "ranks": [0, 1]}, "whole numbers from 1", "ranking", RANKED
    ),
    bad_row("scores and ranks", {**RANKED, "ranks": [1, 2]}, "both scores and ranks", "ranking", RANKED),
    bad_row("a score that is null", {**RANKED, "scores": [1, None]}, "number 2 of scores is missing", "ranking", RANKED),
    bad_row("one answer to rank", {"prompt": "p", "completions": ["a"], "scores": [1]}, "two or more", "ranking", RANKED),
    bad_row("token ids that are text", {**TOKENS, "completion_ids": ["a"]}, "list of token ids", good=TOKENS),
    bad_row("no token ids", {**TOKENS, "completion_ids": []}, "list of token ids", good=TOKENS),
    bad_row("negative token ids", {**TOKENS, "prompt_ids": [-1]}, "list of token ids", good=TOKENS),
]
