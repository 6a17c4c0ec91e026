"""The feedback tools whose exports are read: each has a row of a table and a reader."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any, cast

from valence.data.detect import detect
from valence.data.formats import lookup
from valence.data.importers.records import HashedRater, Reader, ReadOptions, Skipped, Vote
from valence.data.importers.rows import RowKind
from valence.data.sources import Row, read_rows
from valence.data.values import as_number
from valence.errors import UserError, refuse_unused
from valence.user_code.attempt import Raised, attempt
from valence.user_code.load import describe_raised, is_import_path
from valence.user_code.plugins import load_plugin, plugin_paths

NUM_DETECTED = 20
"""Rows of a file from which its tool is detected."""

PARTS = ("prompt", "completion", "left", "right", "correction", "label")
"""Parts of a row whose place a reader can be told (``ReadOptions.paths``)."""
OF_PARTS = " ".join(PARTS)
OF_TRACES = "prompt completion score-name category include-machine"
"""Options of the readers of traces with scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackSource:
    """A tool that exports feedback.

    module: of its reader, below ``valence.data.importers``, or the import path of a plugin's
    reader; imported on first use. description,
    files: what it is, and which files of it are read, for people. main: the kind of most of its
    rows. is_pullable: whether it can be read from its server. lists_all_votes: whether its server
    lists every vote until somebody deletes it. columns: dotted paths by which a row
    of its export is recognized; each text holds those of one kind of export. options: names of the
    options of ``valence import`` that its reader uses, besides keep-reasoning, which all use.
    """

    module: str
    description: str
    files: str
    main: RowKind = "thumbs"
    is_pullable: bool = False
    lists_all_votes: bool = False
    columns: tuple[str, ...] = ()
    options: str = ""

    @property
    def is_plugin(self) -> bool:
        return is_import_path(self.module)


def _plugin(name: str, path: str) -> FeedbackSource:
    """A tool whose importer is a user's. path: of the importer."""
    return FeedbackSource(
        module=path,
        description=f"{name}: votes, read by the plugin {path}",
        files="see the documentation of the plugin",
        options=f"{OF_PARTS} {OF_TRACES} unlabelled",
    )


SOURCES: dict[str, FeedbackSource] = {
    "open_webui": FeedbackSource(
        module="open_webui",
        description="Open WebUI: thumbs and arena votes",
        files="feedback history (Admin > Evaluations > Feedback > Export), or exported chats",
        is_pullable=True,
        lists_all_votes=True,
        columns=("data.rating meta.message_id", "snapshot data.rating"),
        options="unlabelled",
    ),
    "librechat": FeedbackSource(
        module="librechat",
        description="LibreChat: thumbs",
        files="mongoexport of the collection messages (all of them), and of conversations",
        columns=("messageId conversationId isCreatedByUser",),
        options="category unlabelled",
    ),
    "chat_ui": FeedbackSource(
        module="chat_ui",
        description="Hugging Face chat-ui: thumbs",
        files="Parquet or JSON Lines of its admin export",
        options="unlabelled",
    ),
    "chainlit": FeedbackSource(
        module="chainlit",
        description="Chainlit: thumbs",
        files="the tables feedbacks, steps and threads as JSON or CSV, or the SQLite file",
        columns=("forId threadId value",),
        options="category unlabelled",
    ),
    "gradio": FeedbackSource(
        module="gradio",
        description="Gradio ChatInterface: likes and dislikes",
        files=".gradio/flagged/log.csv",
        columns=("conversation index value flag",),
        options="category",
    ),
    "fastchat": FeedbackSource(
        module="fastchat",
        description="FastChat and Chatbot Arena: battles and thumbs",
        files="conversation logs of the server, cleaned battles, or published arena data",
        main="pairs",
        columns=("tstamp type states", "tstamp type state", "model_a model_b winner"),
    ),
    "langfuse": FeedbackSource(
        module="langfuse",
        description="Langfuse: scores of users and annotators",
        files="scores, and the observations or traces that they belong to",
        is_pullable=True,
        columns=("traceId dataType source", "trace_id data_type source"),
        options=f"{OF_TRACES} unlabelled",
    ),
    "langsmith": FeedbackSource(
        module="langsmith",
        description="LangSmith: feedback and pairwise annotations",
        files="feedback and runs, as JSON or JSON Lines",
        is_pullable=True,
        columns=("run_id key feedback_source",),
        options=f"{OF_TRACES} unlabelled",
    ),
    "phoenix": FeedbackSource(
        module="phoenix",
        description="Arize Phoenix: annotations of people",
        files="annotations and spans, as JSON, JSON Lines or Parquet",
        is_pullable=True,
        columns=("annotator_kind name span_id", "annotator_kind name trace_id"),
        options=OF_TRACES,
    ),
    "helicone": FeedbackSource(
        module="helicone",
        description="Helicone: ratings of requests",
        files="JSON Lines of its exporter, with --include-body",
        columns=("request_id request_body", "request_id feedback_rating"),
        options="prompt completion",
    ),
    "openai": FeedbackSource(
        module="openai",
        description="OpenAI: preference rows, and stored completions",
        files="JSON Lines",
        main="pairs",
        options="prompt label category",
    ),
    "bedrock": FeedbackSource(
        module="bedrock",
        description="Amazon Bedrock: preferences, and evaluations by people",
        files="JSON Lines",
        main="pairs",
        columns=("humanEvaluationResult inputRecord", "schemaVersion messages"),
        options="score-name",
    ),
    "label_studio": FeedbackSource(
        module="label_studio",
        description="Label Studio: comparisons, ratings and corrections",
        files="JSON, JSON_MIN, CSV or TSV export of a project",
        main="pairs",
        columns=("data annotations", "annotator annotation_id"),
        options=f"{OF_PARTS} category unlabelled",
    ),
    "argilla": FeedbackSource(
        module="argilla",
        description="Argilla: rankings, ratings and corrections",
        files="records as JSON, Parquet or CSV, flat if there are drafts",
        main="pairs",
        columns=("fields responses suggestions",),
        options=f"{OF_PARTS} category include-machine unlabelled",
    ),
    "chats": FeedbackSource(
        module="chats",
        description="logs of chats: what users wrote after an answer",
        files="JSON Lines with the messages of a conversation in each row",
        main="unlabelled",
        options="prompt",
    ),
} | {name: _plugin(name, path) for name, path in plugin_paths("importers").items()}
"""By name as recipes write it; commands write hyphens. ``source_of`` also knows import paths."""


def source_of(name: str) -> FeedbackSource:
    """The tool with a name in ``SOURCES``, or with the import path of its importer."""
    return SOURCES[name] if name in SOURCES else _plugin(name, name)


def source_name(name: str) -> str:
    """The name in ``SOURCES`` of a tool, which may be written with hyphens, or an import path.

    Raises UserError for an unknown one.
    """
    if is_import_path(name.strip()):
        load_plugin("importers", name.strip(), "SOURCE")
        return name.strip()
    key = name.strip().lower().replace("-", "_")
    if key in SOURCES:
        return key
    near = get_close_matches(key, SOURCES, n=1)
    raise UserError(
        f"there is no tool {name!r}",
        code="source-unknown",
        where="SOURCE",
        fix=f"did you mean {command_name(near[0])}?"
        if near
        else f"use one of {', '.join(map(command_name, SOURCES))}, or the import path of an "
        "importer (`package.module:name`)",
    )


def command_name(name: str) -> str:
    """The name of a source as commands write it."""
    return name if is_import_path(name) else name.replace("_", "-")


def _check_options(name: str, options: ReadOptions) -> None:
    """Raise UserError for an option that the reader of a source does not use."""
    values = {
        **options.paths,
        "score-name": options.score_names,
        "category": options.labels,
        "include-machine": options.includes_machine,
        "unlabelled": options.includes_unlabelled,
    }
    for option, value in values.items():
        if value and option not in source_of(name).options.split():
            users = [tool for tool, source in SOURCES.items() if option in source.options.split()]
            refuse_unused(
                [f"--{option}"],
                f"with {command_name(name)}"
                + (f" (in a recipe, the option is keys.{option})" if option in PARTS else ""),
                f"use it with {', '.join(map(command_name, users))}",
            )


def is_source(format: str | None) -> bool:
    """Whether a file's ``format`` in a recipe is the export of a feedback tool.

    A function with an import path is an importer if it has two parameters, paths and options. The
    function of a row format has one, the row.
    """
    if format is None or format.replace("-", "_") in SOURCES:
        return format is not None
    if not is_import_path(format):
        return False
    try:
        function = load_plugin("formats", format, "format")
    except UserError:  # raised again where the rows are read
        return False
    signature = attempt(lambda: inspect.signature(function))
    if isinstance(signature, Raised):
        return False
    required = [p for p in signature.parameters.values() if p.default is p.empty]
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required) == 2


def read_votes(
    name: str, paths: Sequence[str], options: ReadOptions | None = None
) -> Iterator[Vote | Skipped]:
    """The votes in an export, and what was skipped. Raters are hashed.

    Raises UserError for an unknown source, and as its reader does.
    """
    name, options = source_name(name), options or ReadOptions()
    _check_options(name, options)
    return anonymize_votes(_read(_reader(name), list(paths), options), options)


def _reader(name: str) -> Reader:
    source = source_of(name)
    module = source.module
    if not source.is_plugin:
        return import_module(f"valence.data.importers.{module}").read
    read = load_plugin("importers", module, "format")
    return lambda paths, options: _checked_votes(read, module, paths, options)


def _checked_votes(
    read: Reader, target: str, paths: list[str], options: ReadOptions
) -> Iterator[Vote | Skipped]:
    """The votes of a plugin. Raises UserError for an exception, or a vote with wrong values."""
    votes = attempt(lambda: iter(read(paths, options)))
    while True:
        item = votes if isinstance(votes, Raised) else attempt(partial(next, votes, None))
        if isinstance(item, Raised):
            if isinstance(item.error, UserError):
                raise item.error
            problem = describe_raised(item.error, __file__)
        elif item is None:
            return
        elif problem := _vote_problem(item):
            problem = f"yielded {problem}"
        else:
            yield cast(Vote, item)
            continue
        raise UserError(
            f"the importer {target} {problem}",
            code="importer-failed",
            where=paths[0],
            fix="fix the importer: it yields a valence.Vote for each rating",
        )


def _vote_problem(item: object) -> str:
    """What is wrong with the values of a vote; empty if nothing is."""
    if isinstance(item, Skipped):
        return ""
    if not isinstance(item, Vote):
        return f"a value of type {type(item).__name__} instead of a Vote"
    turns = (*item.prompt, item.completion, *([item.other] if item.other else []))
    if isinstance(item.prompt, str) or not all(
        isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in turns
    ):
        return "a prompt or completion without chat turns ({'role': 'user', 'content': ...})"
    if not isinstance(item.label, bool | None):
        return f"the label {item.label!r} instead of True, False or None"
    if item.score is not None and as_number(item.score) is None:
        return f"the score {item.score!r} instead of a number"
    return ""


def _read(read: Reader, paths: list[str], options: ReadOptions) -> Iterator[Vote | Skipped]:
    """The votes of a reader. An error about the export of another tool suggests that tool."""
    try:
        yield from read(paths, options)
    except UserError as error:
        fix = _other_use(paths) if error.code == "import-not-an-export" else None
        if fix is None:
            raise
        raise UserError(error.message, code=error.code, where=error.where, fix=fix) from error


def _other_use(paths: Sequence[str]) -> str | None:
    """How to use files that are no export of a tool, if the first rows of one show it."""
    for path in paths:
        with suppress(UserError):
            rows = islice(read_rows(path), NUM_DETECTED)
            head = [row.value for row in rows if isinstance(row, Row)]
            if tool := detect_source(head):
                return f"did you mean {command_name(tool)}? the columns are those of its export"
            return f"name {path} in data.train: its rows have the format {detect(head)} already"
    return None


def pull_votes(
    name: str,
    url: str,
    options: ReadOptions | None = None,
    since: float = 0.0,
    *,
    token_env: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Iterator[Vote | Skipped]:
    """The votes on the server of a tool, and what was skipped. Raters are hashed.

    since: seconds since 1970 of the first votes that are asked for; 0 for all. token_env: the
    variable of the environment that has the server's key; None for the tool's own. progress: called
    with the number of rows that the server has sent. Raises UserError for a tool that cannot be
    read this way.
    """
    name, options = source_name(name), options or ReadOptions()
    if not source_of(name).is_pullable:
        raise UserError(
            f"{command_name(name)} cannot be read from a server",
            code="source-not-pullable",
            where="--url",
            fix=f"export files, and pass them instead of --url: {source_of(name).files}",
        )
    _check_options(name, options)
    pull = import_module("valence.data.importers.pull").pull
    votes = pull(name, url, options, since, token_env=token_env, progress=progress)
    return anonymize_votes(votes, options)


def anonymize_votes(
    votes: Iterable[Vote | Skipped], options: ReadOptions
) -> Iterator[Vote | Skipped]:
    """Replace the raters' ids by hashes, and skip votes of machines unless these are asked for."""
    for vote in votes:
        if isinstance(vote, Skipped):
            yield vote
        elif vote.is_machine and not options.includes_machine:
            yield Skipped("machine", vote.origin, vote_id=vote.id)
        else:
            yield replace(vote, rater=HashedRater(vote.rater_hash))


def detect_source(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The source whose exports have the columns of these rows, if there is one."""
    for name, source in SOURCES.items():
        for columns in source.columns:
            if any(all(lookup(row, path) is not None for path in columns.split()) for row in rows):
                return name
    return None
