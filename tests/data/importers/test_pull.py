"""Votes from servers: which requests are made, and what happens when they fail."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from tests.data.importers.exports import assistant, user
from tests.errors import raises_error
from valence.data.importers import pull as pull_module
from valence.data.importers.pull import SERVERS, Retry, pull, pull_rows, write_rows
from valence.data.importers.records import ReadOptions, Skipped, Vote
from valence.errors import UserError


@dataclass
class Request:
    """A request. query: the values of each parameter."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: Mapping[str, str]
    body: Any = None

    def one(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]


@dataclass
class Reply:
    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


Answer = Callable[[Request], Any]


@dataclass
class Mock:
    """A server. answers: by path, what it returns as JSON, or a ``Reply``; other paths are not
    found. first: replies to the first requests, whatever they are; None closes the connection.
    """

    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    first: list[Reply | None] = field(default_factory=list[Reply | None])
    requests: list[Request] = field(default_factory=list[Request])
    url: str = ""

    def reply(self, request: Request) -> Reply | None:
        self.requests.append(request)
        if self.first:
            return self.first.pop(0)
        answer = self.answers.get(request.path)
        result = answer(request) if answer else Reply({"message": "Not Found"}, 404)
        return result if isinstance(result, Reply) else Reply(result)

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


@pytest.fixture
def mock() -> Iterator[Mock]:
    mock = Mock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            query = parse_qs(parts.query)
            request = Request(self.command, unquote(parts.path), query, self.headers, body)
            reply = mock.reply(request)
            if reply is None:
                self.close_connection = True
                return
            self.send_response(reply.status)
            if isinstance(reply.body, Iterator):
                self.end_headers()
                with suppress(OSError):  # the client closes the connection
                    self.wfile.writelines(reply.body)
                return
            data = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data.encode())))
            self.end_headers()
            self.wfile.write(data.encode())

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        mock.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield mock
        server.shutdown()


SECRET = "sk-very-secret"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for server in SERVERS.values():
        for name in server.variables:
            monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")


@dataclass
class Delays:
    seconds: list[float] = field(default_factory=list[float])

    def retry(self, **changes: Any) -> Retry:
        return Retry(sleep=self.seconds.append, **changes)


@pytest.fixture
def delays() -> Delays:
    return Delays()


EXPORT = "/api/v1/evaluations/feedbacks/all/export"


def webui(mock: Mock, retry: Retry | None = None, **options: Any) -> list[dict[str, Any]]:
    """Everything from an Open WebUI, which is one request."""
    mock.answers.setdefault(EXPORT, lambda request: [{"id": "f1"}])
    return list(pull_rows("open_webui", mock.url, retry=retry, **options))


# Keys


@pytest.mark.parametrize(
    ("source", "header", "value"),
    [
        ("open_webui", "Authorization", f"Bearer {SECRET}"),
        (
            "langfuse",
            "Authorization",
            "Basic " + base64.b64encode(f"pk:{SECRET}".encode()).decode(),
        ),
        ("phoenix", "Authorization", f"Bearer {SECRET}"),
        ("langsmith", "x-api-key", SECRET),
    ],
)
def test_keys_are_sent_in_headers(source: str, header: str, value: str, mock: Mock) -> None:
    with raises_error("import-not-found", where=mock.url):
        list(pull_rows(source, mock.url))
    assert mock.requests[0].headers[header] == value
    assert all(SECRET not in f"{request.path}{request.query}" for request in mock.requests)


@pytest.mark.parametrize("source", ["open_webui", "langfuse", "langsmith"])
def test_a_missing_key(source: str, mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    name = SERVERS[source].variables[-1]
    monkeypatch.setenv(name, " ")
    with raises_error("import-key-missing", where=mock.url, fix=name):
        list(pull_rows(source, mock.url))
    assert mock.requests == []


def test_phoenix_may_need_no_key(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHOENIX_API_KEY")
    mock.answers["/v1/projects/default/spans"] = lambda request: {"data": [], "next_cursor": None}
    assert list(pull_rows("phoenix", mock.url)) == []
    assert "Authorization" not in mock.requests[0].headers


def test_the_variable_of_a_key_can_be_named(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "another-key")
    webui(mock, token_env="OTHER")
    assert mock.requests[0].headers["Authorization"] == "Bearer another-key"
    monkeypatch.setenv("OTHER", "public:with:colons")
    with raises_error("import-not-found"):
        list(pull_rows("langfuse", mock.url, token_env="OTHER"))
    sent = mock.requests[-1].headers["Authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent) == b"public:with:colons"
    with raises_error("import-key-missing", fix="MISSING"):
        webui(mock, token_env="MISSING")


def test_a_key_that_no_header_can_have(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPEN_WEBUI_API_KEY", "geheim\nnis")
    with raises_error("import-key-invalid", where=mock.url) as raised:
        webui(mock)
    assert "geheim" not in str(raised.error)


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key(status: int, mock: Mock, delays: Delays) -> None:
    """It is not tried again, and what the server says of it is not shown."""
    echo = {"message": f"invalid key {SECRET}"}
    mock.answers[EXPORT] = lambda request: Reply(echo, status)
    with raises_error("import-unauthorized", where=EXPORT, fix="OPEN_WEBUI_API_KEY") as raised:
        webui(mock, delays.retry())
    assert SECRET not in str(raised.error)
    assert "invalid key ***" in raised.error.message
    assert (len(mock.requests), delays.seconds) == (1, [])


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("https://user:hunter2@host.invalid", "import-url-credentials"),
        ("https://hunter2@host.invalid", "import-url-credentials"),
        ("ftp://host.invalid", "import-url-invalid"),
        ("host.invalid", "import-url-invalid"),
        ("https://host.invalid:port", "import-url-invalid"),
        ("https://", "import-url-invalid"),
    ],
)
def test_urls_that_cannot_be_used(url: str, code: str) -> None:
    with raises_error(code) as raised:
        list(pull_rows("open_webui", url))
    assert "hunter2" not in str(raised.error)


# Failures


def endless() -> Iterator[bytes]:
    while True:
        yield b"[" * 1000


@pytest.mark.parametrize(
    ("limits", "reply"),
    [
        ({}, lambda request: Reply("[" * 100_000 + "]" * 100_000)),
        ({"MAX_REPLY_BYTES": 1000}, lambda request: [{"id": "x" * 2000}]),
        ({"MAX_REPLY_BYTES": 100_000}, lambda request: Reply(endless())),
        ({"MAX_REPLY_SECONDS": 0.2}, lambda request: Reply(endless())),
    ],
)
def test_replies_that_are_too_large_or_too_deep(
    limits: dict[str, Any], reply: Answer, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(pull_module, name, value)
    mock.answers[EXPORT] = reply
    with raises_error("import-reply-invalid", where=mock.url + EXPORT):
        webui(mock)
    assert len(mock.requests) == 1


def test_busy_and_failing_servers_are_asked_again(mock: Mock, delays: Delays) -> None:
    busy = Reply({}, 429, {"Retry-After": "7"})
    mock.first = [busy, Reply("oops", 500), None, Reply({}, 503)]
    assert webui(mock, delays.retry(first_delay=2.0, longest_delay=5.0)) == [{"id": "f1"}]
    after_429, after_500, after_break, after_503 = delays.seconds
    assert after_429 == 7.0
    assert 2.0 <= after_500 <= 4.0
    assert 2.5 <= after_break <= 5.0
    assert 2.5 <= after_503 <= 5.0
    assert len(mock.requests) == 5


def test_retry_after_may_be_a_date(mock: Mock, delays: Delays) -> None:
    mock.first = [Reply({}, 429, {"Retry-After": formatdate(time.time() + 100, usegmt=True)})]
    webui(mock, delays.retry())
    assert 95 < delays.seconds[0] <= 100


def test_delays_differ(mock: Mock, delays: Delays) -> None:
    mock.first = [Reply({}, 500) for _ in range(5)]
    webui(mock, delays.retry(longest_delay=1.0))
    assert len(set(delays.seconds)) == 5


def test_a_server_that_keeps_failing(mock: Mock, delays: Delays) -> None:
    mock.answers[EXPORT] = lambda request: Reply(SECRET, 502)
    with raises_error("import-server-failed", where=EXPORT) as raised:
        webui(mock, delays.retry(num_tries=3))
    assert (len(mock.requests), len(delays.seconds)) == (3, 2)
    assert SECRET not in str(raised.error)


def test_a_server_that_asks_for_too_much_patience(mock: Mock, delays: Delays) -> None:
    mock.answers[EXPORT] = lambda request: Reply({}, 429, {"Retry-After": "3600"})
    with raises_error("import-server-failed", where=EXPORT):
        webui(mock, delays.retry())
    assert (len(mock.requests), delays.seconds) == (1, [])


def test_a_server_that_is_not_there(delays: Delays) -> None:
    with raises_error("import-server-unreachable", where="http://127.0.0.1:9"):
        list(pull_rows("open_webui", "http://127.0.0.1:9", retry=delays.retry(num_tries=2)))
    assert len(delays.seconds) == 1


REPLIES: dict[str, tuple[Reply, str, str]] = {
    "a page": (Reply("<html>Log in</html>"), "import-reply-invalid", "API"),
    "another object": (Reply({"detail": "no"}), "import-reply-invalid", "version"),
    "not found": (Reply({}, 404), "import-not-found", "address"),
    "refused": (Reply({"message": "limit"}, 400), "import-refused", "version"),
    "moved": (
        Reply({}, 301, {"Location": "https://new.invalid/"}),
        "import-redirected",
        "https://new.invalid/",
    ),
}


@pytest.mark.parametrize("case", REPLIES)
def test_replies_that_end_a_pull(case: str, mock: Mock, delays: Delays) -> None:
    reply, code, fix = REPLIES[case]
    mock.answers[EXPORT] = lambda request: reply
    with raises_error(code, where=mock.url + EXPORT, fix=fix):
        webui(mock, delays.retry())
    assert (len(mock.requests), delays.seconds) == (1, [])


@pytest.mark.parametrize("reply", [[], {"rows": []}, {"data": {}}, "text", None])
def test_replies_without_rows(reply: object, mock: Mock) -> None:
    mock.answers["/v1/projects/default/spans"] = lambda request: Reply(json.dumps(reply))
    with raises_error("import-reply-invalid", where="/v1/projects/default/spans"):
        list(pull_rows("phoenix", mock.url))


# Open WebUI


def test_open_webui(mock: Mock) -> None:
    rows = [
        {"id": "old", "updated_at": 100},
        {"id": "new", "updated_at": 200, "created_at": 50},
        {"id": "undated"},
    ]
    mock.answers[EXPORT] = lambda request: rows
    counts: list[int] = []
    result = webui(mock, since=150.0, progress=counts.append)
    assert [row["id"] for row in result] == ["new", "undated"]
    assert counts == [1, 2]


def test_a_path_of_the_api_in_the_url_is_not_needed(mock: Mock) -> None:
    mock.answers[EXPORT] = lambda request: []
    assert list(pull_rows("open_webui", f"{mock.url}/api/v1/")) == []


# Langfuse


def score(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"s{number}",
        "traceId": f"t{number}",
        "observationId": None,
        "name": "user-feedback",
        "value": 1,
        "stringValue": "True",
        "dataType": "BOOLEAN",
        "source": "API",
        "updatedAt": "2026-05-01T12:00:00.000Z",
    }
    return row | changes


def trace(name: str) -> dict[str, Any]:
    generation = {
        "id": f"g-{name}",
        "traceId": name,
        "type": "GENERATION",
        "startTime": "2026-05-01T10:00:00.000Z",
        "input": [user("Hi")],
        "output": assistant(f"Hello from {name}"),
    }
    row = {"id": name, "timestamp": "2026-05-01T10:00:00.000Z", "userId": "u1"}
    return {**row, "input": None, "output": None, "observations": [generation]}


def numbered(rows: list[dict[str, Any]], size: int) -> Answer:
    """Pages of ``size`` rows, whatever the limit, of one source."""

    def answer(request: Request) -> Any:
        results = [row for row in rows if row["source"] == request.one("source", row["source"])]
        page = int(request.one("page", "1"))
        pages = -(-len(results) // size)
        meta = {"page": page, "limit": size, "totalItems": len(results), "totalPages": pages}
        return {"data": results[(page - 1) * size : page * size], "meta": meta}

    return answer


def serve_langfuse(mock: Mock, rows: list[dict[str, Any]], size: int = 2) -> None:
    mock.answers["/api/public/v2/scores"] = numbered(rows, size)
    for row in rows:
        if row["traceId"] not in (None, "t-deleted"):
            name = row["traceId"]
            mock.answers[f"/api/public/traces/{name}"] = lambda request, name=name: trace(name)


def test_langfuse(mock: Mock) -> None:
    """Pages of scores of people, and then the trace of each; the reader reads all of it."""
    rows = [score(number) for number in range(5)]
    rows += [
        score(5, source="ANNOTATION", authorUserId="a1"),
        score(6, source="EVAL"),
        score(7, traceId="t-deleted"),
        score(8, traceId=None, sessionId="c1"),
    ]
    serve_langfuse(mock, rows)
    result = list(pull("langfuse", mock.url, ReadOptions()))
    votes = [record for record in result if isinstance(record, Vote)]
    assert sorted(vote.id for vote in votes) == ["s0", "s1", "s2", "s3", "s4", "s5"]
    assert {vote.message for vote in votes} == {f"g-t{number}" for number in range(6)}
    assert {vote.origin.path for vote in votes} == {mock.url}
    reasons = [record.reason for record in result if isinstance(record, Skipped)]
    assert reasons == ["no_conversation", "no_conversation"]
    pages = [
        (a.one("source"), a.one("page"), a.one("limit")) for a in mock.requests if "page" in a.query
    ]
    assert pages == [
        *(("API", str(page), "100") for page in range(1, 5)),
        ("ANNOTATION", "1", "100"),
    ]
    assert mock.paths().count("/api/public/traces/t6") == 0


def test_scores_of_evaluators_are_pulled_when_they_are_asked_for(mock: Mock) -> None:
    serve_langfuse(mock, [score(1), score(2, source="EVAL")])
    result = pull("langfuse", mock.url, ReadOptions(includes_machine=True))
    assert [record.is_machine for record in result if isinstance(record, Vote)] == [False, True]


def test_only_traces_of_new_scores_are_asked_for(mock: Mock) -> None:
    """A score counts as new when it was changed, whenever it was made."""
    rows = [
        score(1, updatedAt="2026-05-01T11:00:00Z"),
        score(2, updatedAt="2026-05-01T13:00:00Z", timestamp="2026-05-01T09:00:00Z"),
    ]
    serve_langfuse(mock, rows)
    since = 1777636800.0  # 2026-05-01T12:00:00Z
    result = list(pull_rows("langfuse", mock.url, since=since))
    assert [row["id"] for row in result] == ["s2", "t2"]
    assert "/api/public/traces/t1" not in mock.paths()


def test_a_page_number_that_is_ignored(mock: Mock) -> None:
    first = {"data": [score(1)], "meta": {"page": 1, "totalPages": 3}}
    mock.answers["/api/public/v2/scores"] = lambda request: first
    with raises_error("import-page-repeated", where="/api/public/v2/scores"):
        list(pull_rows("langfuse", mock.url))
    assert len(mock.requests) == 3


def test_rows_that_move_to_the_next_page_are_read_once(mock: Mock) -> None:
    pages = {1: [score(1), score(2)], 2: [score(2), score(3)]}

    def answer(request: Request) -> Any:
        rows = pages[int(request.one("page", "1"))] if request.one("source") != "ANNOTATION" else []
        return {"data": rows, "meta": {"totalPages": 2 if rows else 0}}

    mock.answers["/api/public/v2/scores"] = answer
    ids = [row["id"] for row in pull_rows("langfuse", mock.url)]
    assert ids == ["s1", "s2", "s3"]


def test_langfuse_4_has_other_addresses(mock: Mock) -> None:
    def scores(request: Request) -> Any:
        assert request.one("fields") == "details,subject,annotation"
        assert request.one("source") == "API,ANNOTATION"
        number = 2 if request.one("cursor") == "c2" else 1
        row = score(number, value=True, subject={"kind": "trace", "id": f"t{number}"})
        for name in ("traceId", "observationId", "stringValue"):
            del row[name]
        return {"data": [row], "meta": {"limit": 100, **({"cursor": "c2"} if number == 1 else {})}}

    def observations(request: Request) -> Any:
        (generation,) = trace(request.one("traceId"))["observations"]
        texts = {name: json.dumps(generation[name]) for name in ("input", "output")}
        return {"data": [{**generation, **texts, "userId": "u1"}], "meta": {}}

    mock.answers["/api/public/v3/scores"] = scores
    mock.answers["/api/public/v2/observations"] = observations
    votes = [v for v in pull("langfuse", mock.url, ReadOptions()) if isinstance(v, Vote)]
    assert [(v.id, v.label, v.message, v.rater) for v in votes] == [
        ("s1", True, "g-t1", "u1"),
        ("s2", True, "g-t2", "u1"),
    ]
    assert not any("/traces/" in path for path in mock.paths())


def test_a_cursor_that_is_repeated(mock: Mock) -> None:
    reply = {"data": [score(1)], "meta": {"cursor": "again"}}
    mock.answers["/api/public/v3/scores"] = lambda request: reply
    with raises_error("import-page-repeated", where="/api/public/v3/scores"):
        list(pull_rows("langfuse", mock.url))
    assert mock.paths().count("/api/public/v3/scores") == 2


# Phoenix


def span(number: int) -> dict[str, Any]:
    return {
        "context": {"trace_id": f"t{number}", "span_id": f"l{number}"},
        "span_kind": "LLM",
        "start_time": "2026-05-01T10:00:00+00:00",
        "status_code": "OK",
        "attributes": {"input.value": "Hi", "output.value": f"Hello from l{number}"},
    }


def annotation(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"a{number}",
        "name": "user_feedback",
        "annotator_kind": "HUMAN",
        "result": {"label": "positive", "score": 1},
        "identifier": "",
        "updated_at": "2026-05-01T12:00:00+00:00",
    }
    return row | changes


def serve_phoenix(mock: Mock, project: str, filters_traces: bool = True) -> None:
    """Three spans on two pages. The first has an annotation, and so has the trace of the last."""
    spans = [span(1), span(2), span(3)]
    base = f"/v1/projects/{project}"

    def list_spans(request: Request) -> Any:
        wanted = request.query.get("trace_id") if filters_traces else None
        results = [s for s in spans if not wanted or s["context"]["trace_id"] in wanted]
        start = int(request.one("cursor", "0"))
        cursor = str(start + 2) if start + 2 < len(results) else None
        return {"data": results[start : start + 2], "next_cursor": cursor}

    def of_spans(request: Request) -> Any:
        rows = [annotation(1, span_id="l1"), annotation(9, span_id="l9")]
        results = [row for row in rows if row["span_id"] in request.query["span_ids"]]
        return {"data": results, "next_cursor": None}

    def of_traces(request: Request) -> Any:
        rows = [annotation(3, trace_id="t3", identifier="px-app:v1")]
        results = [row for row in rows if row["trace_id"] in request.query["trace_ids"]]
        return {"data": results, "next_cursor": None}

    mock.answers[f"{base}/spans"] = list_spans
    mock.answers[f"{base}/span_annotations"] = of_spans
    mock.answers[f"{base}/trace_annotations"] = of_traces


@pytest.mark.parametrize("filters_traces", [True, False])
def test_phoenix(filters_traces: bool, mock: Mock) -> None:
    serve_phoenix(mock, "my app", filters_traces)
    rows = list(pull_rows("phoenix", f"{mock.url}/?project=my%20app"))
    ids = [row.get("id") or row["context"]["span_id"] for row in rows]
    assert ids == ["a1", "a3", "l1", "l3"]
    votes = pull("phoenix", f"{mock.url}?project=my%20app", ReadOptions())
    results = [(v.id, v.message, v.rater) for v in votes if isinstance(v, Vote)]
    assert results == [("a1", "l1", ""), ("a3", "l3", "px-app:v1")]


def test_phoenix_before_annotations_of_traces(mock: Mock) -> None:
    serve_phoenix(mock, "default")
    del mock.answers["/v1/projects/default/trace_annotations"]
    result = list(pull("phoenix", mock.url, ReadOptions()))
    assert [record.id for record in result if isinstance(record, Vote)] == ["a1"]


def test_old_annotations_are_left_out(mock: Mock) -> None:
    serve_phoenix(mock, "default")
    assert list(pull("phoenix", mock.url, ReadOptions(), since=time.time() + 1e9)) == []


def test_ids_are_asked_for_in_batches(mock: Mock) -> None:
    serve_phoenix(mock, "default")
    many = [span(number) for number in range(120)]
    mock.answers["/v1/projects/default/spans"] = lambda request: {"data": many, "next_cursor": None}
    list(pull_rows("phoenix", mock.url))
    sizes = [
        len(request.query["span_ids"]) for request in mock.requests if "span_ids" in request.query
    ]
    assert sizes == [50, 50, 20]


# LangSmith


def feedback(number: int, **changes: Any) -> dict[str, Any]:
    row = {
        "id": f"f{number}",
        "run_id": f"r{number}",
        "trace_id": f"r{number}",
        "key": "user_feedback",
        "score": True,
        "feedback_source": {"type": "api"},
        "modified_at": "2026-05-01T12:00:00+00:00",
    }
    return row | changes


def run(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "run_type": "llm",
        "trace_id": name,
        "parent_run_id": None,
        "start_time": "2026-05-01T10:00:00",
        "inputs": {"messages": [user("Hi")]},
        "outputs": {"choices": [{"message": assistant(f"Hello from {name}")}]},
    }


def serve_langsmith(mock: Mock, rows: list[dict[str, Any]]) -> None:
    def list_feedback(request: Request) -> Any:
        start, limit = int(request.one("offset")), int(request.one("limit"))
        return rows[start : start + limit]

    def query(request: Request) -> Any:
        assert request.method == "POST"
        if "id" in request.body:
            return {"runs": [run(name) for name in request.body["id"]], "cursors": {"next": None}}
        name = request.body["trace"]
        if request.body.get("cursor") == "second":
            return {"runs": [run(f"{name}-child") | {"trace_id": name}], "cursors": {}}
        return {"runs": [run(name)], "cursors": {"next": "second"}}

    mock.answers["/api/v1/feedback"] = list_feedback
    mock.answers["/api/v1/runs/query"] = query


def test_langsmith(mock: Mock) -> None:
    rows = [feedback(number) for number in range(101)]
    rows.append(feedback(101, trace_id=None))
    serve_langsmith(mock, rows)
    votes = [v for v in pull("langsmith", mock.url, ReadOptions()) if isinstance(v, Vote)]
    assert [vote.message for vote in votes] == [f"r{number}" for number in range(102)]
    offsets = [
        request.one("offset") for request in mock.requests if request.path == "/api/v1/feedback"
    ]
    assert offsets == ["0", "100"]
    bodies = [request.body for request in mock.requests if request.path == "/api/v1/runs/query"]
    assert bodies[0]["id"] == ["r101"]
    assert [body["trace"] for body in bodies[1:5]] == ["r0", "r0", "r1", "r1"]
    assert {"id", "inputs", "outputs", "run_type"} <= set(bodies[1]["select"])


def test_a_project_of_langsmith(mock: Mock) -> None:
    serve_langsmith(mock, [])
    mock.answers["/api/v1/sessions"] = lambda request: (
        [{"id": "uuid"}] if request.one("name") == "my app" else []
    )
    for project, session in (("my app", "uuid"), ("some-id", "some-id")):
        list(pull_rows("langsmith", f"{mock.url}?project={project}"))
        assert mock.requests[-1].one("session") == session


def test_an_offset_that_is_ignored(mock: Mock) -> None:
    rows = [feedback(number) for number in range(100)]
    mock.answers["/api/v1/feedback"] = lambda request: rows
    with raises_error("import-page-repeated", where="/api/v1/feedback"):
        list(pull_rows("langsmith", mock.url))
    assert len(mock.requests) == 2


def test_a_cursor_in_a_body_that_is_repeated(mock: Mock) -> None:
    serve_langsmith(mock, [feedback(1)])
    reply = {"runs": [run("r1")], "cursors": {"next": "again"}}
    mock.answers["/api/v1/runs/query"] = lambda request: reply
    with raises_error("import-page-repeated", where="/api/v1/runs/query"):
        list(pull_rows("langsmith", mock.url))
    assert [request.body.get("cursor") for request in mock.requests[1:]] == [None, "again"]


# Rows and files


def test_a_server_without_feedback_gives_no_votes(mock: Mock) -> None:
    serve_langsmith(mock, [])
    assert list(pull("langsmith", mock.url, ReadOptions())) == []


def test_errors_of_the_reader_name_the_server(mock: Mock) -> None:
    serve_langfuse(mock, [score(7, traceId="t-deleted")])
    with raises_error("import-file-missing", where=mock.url) as raised:
        list(pull("langfuse", mock.url, ReadOptions()))
    assert "rows.jsonl" not in str(raised.error)


def test_an_interrupted_pull_leaves_no_files(
    mock: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    serve_langfuse(mock, [score(1), score(2)])
    votes = pull("langfuse", mock.url, ReadOptions())
    next(votes)
    assert len(list(tmp_path.iterdir())) == 1
    del votes
    assert list(tmp_path.iterdir()) == []
    mock.answers.clear()
    with pytest.raises(UserError):
        list(pull("langfuse", mock.url, ReadOptions()))
    assert list(tmp_path.iterdir()) == []


def test_rows_are_written_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert write_rows(path, [{"a": "ü\n"}, {"b": 1}]) == 2
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == [{"a": "ü\n"}, {"b": 1}]
