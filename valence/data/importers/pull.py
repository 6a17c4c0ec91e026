"""Votes from the servers of feedback tools, over HTTP.

The rows that a server returns are written to a temporary file, and the tool's reader reads them as
it reads an export. Keys come from the environment, are sent to that server alone, and appear in no
message.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit, urlunsplit

import httpx

from valence.data.importers.fields import first_value, object_at, timestamp
from valence.data.importers.records import Reader, ReadOptions, Skipped, Vote
from valence.errors import UserError
from valence.network import (
    as_the_environment_says,
    backoff,
    draw_jitter,
    refuse_credentials,
    retry_after,
    routes,
)
from valence.types import Origin

Rows = Iterator[dict[str, Any]]
MAY_PASS = (408, 425, 429, 500, 502, 503, 504)
"""Statuses that another try may change."""
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
MAX_REPLY_BYTES = 512 * 2**20
"""Open WebUI sends all of its votes, with their conversations, in one reply."""
MAX_REPLY_SECONDS = 600.0
PAGE_SIZE = 100
"""Rows asked for at once: the most that Langfuse and LangSmith return."""
NUM_IDS = 50
"""Ids in one query string, which servers limit to a few thousand characters."""
RUN_FIELDS = (
    "id",
    "run_type",
    "trace_id",
    "parent_run_id",
    "start_time",
    "error",
    "inputs",
    "outputs",
    "extra",
)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often a request is tried, and how long to wait in between.

    first_delay: seconds, doubled with each try and shortened by up to a half at random.
    longest_delay: of these; and longest_wait: of what a server's Retry-After asks for.
    """

    num_tries: int = 6
    first_delay: float = 1.0
    longest_delay: float = 30.0
    longest_wait: float = 600.0
    sleep: Callable[[float], None] = time.sleep


class NotFound(UserError):
    """The server has nothing at an address."""


class Api:
    """A server's HTTP API: JSON by GET and POST, with retries.

    url: of the server. secrets: what must not appear in messages.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str],
        auth: tuple[str, str] | None,
        secrets: Sequence[str],
        unauthorized_fix: str,
        retry: Retry,
    ) -> None:
        self.url, self.retry = url, retry
        self.secrets, self.unauthorized_fix = secrets, unauthorized_fix
        with as_the_environment_says(url):
            self.client = httpx.Client(
                headers={"Accept": "application/json", **headers},
                auth=auth,
                timeout=TIMEOUT,
                follow_redirects=False,  # a key is for one server
                **routes(url),
            )

    def close(self) -> None:
        self.client.close()

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        return self._request("GET", path, params=dict(params or {}))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._request("POST", path, json=body)

    def _request(self, method: str, path: str, **content: Any) -> Any:
        """The JSON of the reply. Raises UserError; NotFound for status 404."""
        where = self.url + path
        failures = 0
        while True:
            wait, response = 0.0, None
            try:
                with self.client.stream(method, where, **content) as response:
                    if response.status_code not in MAY_PASS:
                        return self._json(response, self._read(response, where), where)
                problem = f"the server answers with status {response.status_code}"
                wait = retry_after(response.headers.get("retry-after", ""))
            except httpx.RequestError as error:
                problem = f"connection failed ({error or type(error).__name__})"
            except httpx.InvalidURL as error:
                raise _bad_url(str(error), where) from error
            pause = backoff(failures, self.retry.first_delay, self.retry.longest_delay, draw_jitter)
            failures += 1
            if failures >= self.retry.num_tries or wait > self.retry.longest_wait:
                waits = f", and asks to wait {wait:g} s" if wait else f" {failures} times"
                code = "import-server-unreachable" if response is None else "import-server-failed"
                raise UserError(
                    self._redacted(f"{problem}{waits}"),
                    code=code,
                    where=where,
                    fix="check the address and the server's log, then run the same command again",
                )
            self.retry.sleep(max(wait, pause))

    def _read(self, response: httpx.Response, where: str) -> bytes:
        """The body of a reply, with a limited length and time."""
        reply, deadline = bytearray(), time.monotonic() + MAX_REPLY_SECONDS
        for chunk in response.iter_bytes():
            reply += chunk
            if len(reply) > MAX_REPLY_BYTES:
                raise _bad_reply(f"the reply is longer than {MAX_REPLY_BYTES:,} bytes", where)
            if time.monotonic() > deadline:
                raise _bad_reply(f"the reply takes longer than {MAX_REPLY_SECONDS:g} s", where)
        return bytes(reply)

    def _json(self, response: httpx.Response, reply: bytes, where: str) -> Any:
        status = response.status_code
        text = self._redacted(reply[:1000].decode(errors="replace"))[:200].strip()
        message = f"the server answers with status {status}{f': {text}' if text else ''}"
        if status in (401, 403):
            code = "import-unauthorized"
            raise UserError(message, code=code, where=where, fix=self.unauthorized_fix)
        if status == 404:
            fix = "check the address, and the project if one is named"
            raise NotFound(message, code="import-not-found", where=where, fix=fix)
        if 300 <= status < 400:
            target = self._redacted(response.headers.get("location", "elsewhere"))
            code, fix = "import-redirected", f"use the address that it names: {target}"
            raise UserError(message, code=code, where=where, fix=fix)
        if status >= 400:
            fix = (
                "read the reply of the server; for another version of the server, export to a file"
            )
            raise UserError(message, code="import-refused", where=where, fix=fix)
        try:
            return json.loads(reply)
        except RecursionError as error:
            raise _bad_reply("the reply has too many levels of lists and objects", where) from error
        except ValueError as error:
            raise _bad_reply(f"the reply is not JSON: {text!r}", where) from error

    def _redacted(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text

    def rows(self, reply: Any, path: str, name: str | None = "data") -> list[dict[str, Any]]:
        """The objects in a list of a reply; the reply itself is the list if it has no name."""
        if name is None:
            items = reply
        else:
            items = reply.get(name) if isinstance(reply, dict) else None
        if not isinstance(items, list):
            problem = f"has no list {name!r}" if name else "is not a list"
            raise _bad_reply(f"the reply of the server {problem}", self.url + path)
        return [item for item in items if isinstance(item, dict)]

    def repeats(self, path: str) -> UserError:
        """The error about a server that would be asked for the same page forever."""
        return UserError(
            "the server returns the same page again",
            code="import-page-repeated",
            where=self.url + path,
            fix="export to a file instead, and report this to the operator of the server",
        )

    def by_number(self, path: str, params: Mapping[str, Any]) -> Rows:
        """The rows of pages that are numbered from 1, as Langfuse has them."""
        known_ids: set[str] = set()
        page = 1
        while True:
            reply = self.get(path, {**params, "limit": PAGE_SIZE, "page": page})
            rows = self.rows(reply, path)
            yield from self._new(rows, known_ids, path)
            last = object_at(reply, "meta").get("totalPages")
            is_last = page >= last if isinstance(last, int) else len(rows) < PAGE_SIZE
            if not rows or is_last:
                return
            page += 1

    def by_offset(self, path: str, params: Mapping[str, Any]) -> Rows:
        """The rows of a list that is read from an offset, as LangSmith has it."""
        known_ids: set[str] = set()
        offset = 0
        while True:
            reply = self.get(path, {**params, "limit": PAGE_SIZE, "offset": offset})
            rows = self.rows(reply, path, None)
            yield from self._new(rows, known_ids, path)
            if len(rows) < PAGE_SIZE:
                return
            offset += len(rows)

    def by_cursor(
        self,
        path: str,
        params: Mapping[str, Any],
        cursor_of: Callable[[dict[str, Any]], Any],
        *,
        name: str = "data",
        is_post: bool = False,
    ) -> Rows:
        """The rows of pages that name the next one. cursor_of: the next cursor in a reply."""
        ask = self.post if is_post else self.get
        cursors: set[str] = set()
        reply = ask(path, params)
        while True:
            yield from self.rows(reply, path, name)
            cursor = cursor_of(reply)
            if not cursor:
                return
            if cursor in cursors:
                raise self.repeats(path)
            cursors.add(cursor)
            reply = ask(path, {**params, "cursor": cursor})

    def _new(self, rows: list[dict[str, Any]], known_ids: set[str], path: str) -> Rows:
        """The rows that no earlier page had: new rows shift the pages while they are read."""
        new = [row for row in rows if str(row.get("id")) not in known_ids]
        if rows and not new:
            raise self.repeats(path)
        known_ids.update(str(row.get("id")) for row in new)
        yield from new


@dataclass(frozen=True, slots=True)
class Request:
    """What to pull. since: seconds since 1970; votes that were last changed before are left out.

    project: its name or id; "" for the server's default.
    """

    since: float = 0.0
    project: str = ""
    includes_machine: bool = False

    def is_new(self, row: Mapping[str, Any], *columns: str) -> bool:
        changed = timestamp(first_value(row, *columns))
        return not changed or changed >= self.since


def _open_webui(api: Api, request: Request) -> Rows:
    """backend/open_webui/routers/evaluations.py. One reply has everything, for admins only."""
    path = "/api/v1/evaluations/feedbacks/all/export"
    for row in api.rows(api.get(path), path, None):
        if request.is_new(row, "updated_at", "created_at"):
            yield row


def _langfuse(api: Api, request: Request) -> Rows:
    """fern/apis/server/definition/{scores,scores-v3,trace,observations}.yml.

    Langfuse 4 has neither version 2 of the scores nor traces: it answers with 404.
    """
    try:
        api.get(LANGFUSE_SCORES, {"limit": 1})
        has_version_2 = True
    except NotFound:
        has_version_2 = False
    trace_ids: dict[str, None] = {}
    for score in (_langfuse_scores if has_version_2 else _langfuse_scores_v3)(api, request):
        if request.is_new(score, "updatedAt", "timestamp"):
            subject = object_at(score, "subject")
            of_subject = subject.get("id" if subject.get("kind") == "trace" else "traceId")
            if trace_id := score.get("traceId") or of_subject:
                trace_ids[str(trace_id)] = None
            yield score
    for trace_id in trace_ids:
        if not has_version_2:
            yield from _langfuse_observations(api, trace_id)
            continue
        try:
            params = {"fields": "core,io,observations"}
            yield api.get(f"/api/public/traces/{quote(trace_id, safe='')}", params)
        except NotFound:
            continue  # deleted: the reader counts its votes


LANGFUSE_SCORES = "/api/public/v2/scores"


def _langfuse_scores(api: Api, request: Request) -> Rows:
    sources = [{}] if request.includes_machine else [{"source": "API"}, {"source": "ANNOTATION"}]
    for source in sources:  # one at a time
        yield from api.by_number(LANGFUSE_SCORES, source)


def _langfuse_scores_v3(api: Api, request: Request) -> Rows:
    params = {"limit": PAGE_SIZE, "fields": "details,subject,annotation"}
    if not request.includes_machine:
        params["source"] = "API,ANNOTATION"
    return api.by_cursor("/api/public/v3/scores", params, _langfuse_cursor)


def _langfuse_observations(api: Api, trace_id: str) -> Rows:
    params = {"traceId": trace_id, "fields": "core,basic,io,model", "limit": PAGE_SIZE}
    return api.by_cursor("/api/public/v2/observations", params, _langfuse_cursor)


def _langfuse_cursor(reply: dict[str, Any]) -> Any:
    return object_at(reply, "meta").get("cursor")


def _phoenix(api: Api, request: Request) -> Rows:
    """src/phoenix/server/api/routers/v1/{spans,annotations}.py.

    Annotations are asked for by the ids of spans and traces, so all spans are listed first, and
    those of annotated traces a second time.
    """
    traces = {
        str(object_at(span, "context").get("span_id")): str(
            object_at(span, "context").get("trace_id")
        )
        for span in _phoenix_pages(api, request, "spans", {})
    }
    rated: dict[str, None] = {}
    for row in _phoenix_annotations(api, request, traces):
        if request.is_new(row, "updated_at", "created_at"):
            rated[str(row.get("trace_id") or traces.get(str(row.get("span_id"))))] = None
            yield row
    for ids in _batches(rated):
        for span in _phoenix_pages(api, request, "spans", {"trace_id": ids}):
            # A version that does not know trace_id returns all spans.
            if object_at(span, "context").get("trace_id") in ids:
                yield span


def _phoenix_annotations(api: Api, request: Request, traces: Mapping[str, str]) -> Rows:
    for ids in _batches(traces):
        yield from _phoenix_pages(api, request, "span_annotations", {"span_ids": ids})
    try:
        for ids in _batches(dict.fromkeys(traces.values())):
            yield from _phoenix_pages(api, request, "trace_annotations", {"trace_ids": ids})
    except NotFound:
        return  # an older version without annotations of traces


def _phoenix_pages(api: Api, request: Request, name: str, params: Mapping[str, Any]) -> Rows:
    path = f"/v1/projects/{quote(request.project or 'default', safe='')}/{name}"
    query = {**params, "limit": 1000}
    return api.by_cursor(path, query, lambda reply: reply.get("next_cursor"))


def _batches(ids: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(ids)
    while batch := list(islice(remaining, NUM_IDS)):
        yield batch


def _langsmith(api: Api, request: Request) -> Rows:
    """python/langsmith/client.py: list_feedback, list_runs and read_project.

    That feedback is filtered by ``session`` is from the reference of the JavaScript client; no
    server was asked.
    """
    params = {"session": _langsmith_project(api, request.project)} if request.project else {}
    trace_ids: dict[str, None] = {}
    run_ids: dict[str, None] = {}
    for row in api.by_offset("/api/v1/feedback", params):
        if request.is_new(row, "modified_at", "created_at"):
            if row.get("trace_id"):
                trace_ids[str(row["trace_id"])] = None
            elif row.get("run_id"):
                run_ids[str(row["run_id"])] = None
            yield row
    for ids in _batches(run_ids):
        for run in _langsmith_runs(api, {"id": ids, "select": ["id", "trace_id"]}):
            trace_ids[str(run.get("trace_id") or run["id"])] = None
    for trace_id in trace_ids:
        yield from _langsmith_runs(api, {"trace": trace_id, "select": list(RUN_FIELDS)})


def _langsmith_runs(api: Api, query: Mapping[str, Any]) -> Rows:
    body = {**query, "limit": PAGE_SIZE}
    return api.by_cursor("/api/v1/runs/query", body, _langsmith_cursor, name="runs", is_post=True)


def _langsmith_cursor(reply: dict[str, Any]) -> Any:
    return object_at(reply, "cursors").get("next")


def _langsmith_project(api: Api, project: str) -> str:
    path = "/api/v1/sessions"
    for row in api.rows(api.get(path, {"name": project, "limit": 1}), path, None):
        return str(row["id"])
    return project  # an id


@dataclass(frozen=True, slots=True)
class FeedbackServer:
    """How a tool's server is asked.

    rows: asks it. variables: of the environment, with the key; two for a user name and a password.
    header: that has the key, with ``Bearer`` in front if it is Authorization. is_key_needed:
    whether every server wants one.
    """

    rows: Callable[[Api, Request], Rows]
    variables: tuple[str, ...]
    header: str = "Authorization"
    is_key_needed: bool = True


SERVERS = {
    "open_webui": FeedbackServer(_open_webui, ("OPEN_WEBUI_API_KEY",)),
    "langfuse": FeedbackServer(_langfuse, ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")),
    "phoenix": FeedbackServer(_phoenix, ("PHOENIX_API_KEY",), is_key_needed=False),
    "langsmith": FeedbackServer(_langsmith, ("LANGSMITH_API_KEY",), header="x-api-key"),
}
"""By the names of their readers."""


def pull_rows(
    source: str,
    url: str,
    *,
    since: float = 0.0,
    token_env: str | None = None,
    includes_machine: bool = False,
    progress: Callable[[int], None] = lambda count: None,
    retry: Retry | None = None,
) -> Rows:
    """The rows of feedback on a server, and of the conversations that it is about, as its API
    returns them.

    url: of the server; ``?project=NAME`` names a project of Phoenix or LangSmith. since: seconds
    since 1970: feedback that was last changed before is left out. token_env: the variable of the
    environment that has the key, for two keys as ``PUBLIC:SECRET``; None for the tool's own.
    progress: called with the number of rows so far. Raises UserError.
    """
    address, project = server_address(url)
    api = _api(SERVERS[source], address, token_env, retry or Retry())
    with closing(api):
        request = Request(since, project, includes_machine)
        for count, row in enumerate(SERVERS[source].rows(api, request), 1):
            progress(count)
            yield row


def pull(
    source: str,
    url: str,
    options: ReadOptions,
    since: float = 0.0,
    *,
    token_env: str | None = None,
    progress: Callable[[int], None] = lambda count: None,
    retry: Retry | None = None,
) -> Iterator[Vote | Skipped]:
    """The votes on a server, as the tool's reader reads them. For the arguments see ``pull_rows``.

    Their origins are rows of the server's replies.
    """
    rows = pull_rows(
        source,
        url,
        since=since,
        token_env=token_env,
        includes_machine=options.includes_machine,
        progress=progress,
        retry=retry,
    )
    address, _ = server_address(url)
    reader: Reader = import_module(f"valence.data.importers.{source}").read
    with tempfile.TemporaryDirectory(prefix="valence-import-") as folder:
        path = Path(folder) / "rows.jsonl"
        if not write_rows(path, rows):
            return
        try:
            for record in reader([str(path)], options):
                yield replace(record, origin=Origin(address, record.origin.line))
        except UserError as error:
            raise UserError(error.message, code=error.code, where=address, fix=error.fix) from error


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows to a file, one JSON object a line. Returns how many there are."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def server_address(url: str) -> tuple[str, str]:
    """The server's address without a slash at its end, and the project that the URL names.

    Raises UserError for a URL of another kind, and for one with a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _bad_url(str(error), "--url") from error
    if parts.scheme not in ("http", "https") or not host:
        raise _bad_url("it must start with http:// or https:// and contain a host", "--url")
    network = f"[{host}]" if ":" in host else host
    network += f":{port}" if port else ""
    path = parts.path.rstrip("/")
    address = urlunsplit((parts.scheme, network, path, "", ""))
    refuse_credentials(
        url,
        address,
        fix="set the environment variables of the tool, such as LANGFUSE_PUBLIC_KEY and "
        "LANGFUSE_SECRET_KEY, or name another variable with --token-env",
        code="import-url-credentials",
    )
    return address, (parse_qs(parts.query).get("project") or [""])[0]


def _bad_reply(problem: str, where: str) -> UserError:
    return UserError(
        problem,
        code="import-reply-invalid",
        where=where,
        fix="set --url to the address of the tool's API, not of one of its web pages or of a "
        "proxy; if it is correct, Valence cannot read this version of the server: export the "
        "feedback to a file and import the file",
    )


def _bad_url(problem: str, where: str) -> UserError:
    return UserError(
        f"the URL cannot be used: {problem}",
        code="import-url-invalid",
        where=where,
        fix="use a URL such as https://langfuse.example.com",
    )


def _api(server: FeedbackServer, address: str, token_env: str | None, retry: Retry) -> Api:
    """The API of a server, with the key from the environment.

    Raises UserError where a key is needed and the environment has none.
    """
    names = (token_env,) if token_env else server.variables
    keys = [os.environ.get(name, "").strip() for name in names]
    if token_env and len(server.variables) > 1:
        keys = keys[0].split(":", 1)
    is_complete = len(keys) == len(server.variables) and all(keys)
    variables = "variables" if len(names) > 1 else "variable"
    fix = f"set the environment {variables} {' and '.join(names)} to the key of the server"
    if token_env and len(server.variables) > 1:
        fix += ", as PUBLIC:SECRET"
    if not is_complete and (server.is_key_needed or token_env):
        raise UserError("the API key is missing", code="import-key-missing", where=address, fix=fix)
    if not all(key.isascii() and key.isprintable() for key in keys):
        problem = "the key has characters that a header cannot have"
        raise UserError(problem, code="import-key-invalid", where=address, fix=fix)
    headers: dict[str, str] = {}
    auth = None
    if is_complete and len(keys) == 2:
        auth = (keys[0], keys[1])
    elif is_complete:
        is_bearer = server.header == "Authorization"
        headers[server.header] = f"Bearer {keys[0]}" if is_bearer else keys[0]
    for suffix in ("/api/v1", "/api"):
        address = address.removesuffix(suffix)
    return Api(
        address,
        headers=headers,
        auth=auth,
        secrets=[base64.b64encode(":".join(keys).encode()).decode(), *keys] if is_complete else [],
        unauthorized_fix=fix.replace("the key", "a key that may read feedback"),
        retry=retry,
    )
