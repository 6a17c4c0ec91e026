"""A review of suspicious rows, its clients, and a program that decides until it is killed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.serving.kit import TOKENS, run
from valence.apps.feedback.audit_labels import RowAudit, audit_rows
from valence.apps.feedback.review_labels import Choice, LabelReview
from valence.apps.serve.http_server import RequestGuard, host_names
from valence.apps.serve.review import ReviewService
from valence.options import AuditOptions

SUN = "The sun is a star, and it is hot."
Rows = Sequence[Mapping[str, Any]]


def thumbs() -> list[dict[str, Any]]:
    """Two cases: rows 0, 1 and 2 contradict or nearly repeat each other, and rows 4 and 5."""
    return [
        {"prompt": "q", "completion": SUN, "label": True, "info": {"rater": "r1", "comment": "ok"}},
        {"prompt": "q", "completion": SUN, "label": False, "info": {"rater": "r2"}},
        {"prompt": "q", "completion": SUN[:-1], "label": False},
        {"prompt": "other", "completion": "Fine.", "label": True},
        {"prompt": "two", "completion": "Good.", "label": True},
        {"prompt": "two", "completion": "Good.", "label": False, "info": {"tags": ["a"]}},
    ]


def audited(file: Path, rows: Rows | None = None, **options: Any) -> RowAudit:
    """The audit of some rows, which are written to a file before."""
    if rows is not None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return audit_rows([str(file)], AuditOptions(**options))


def choices(review: LabelReview) -> list[Choice | None]:
    """The current decision on each suspicious row, in the order of the file."""
    cards = [review.card(index) for index in sorted(review.suspicions)]
    return [card["decision"] and card["decision"]["choice"] for card in cards]


class ServedReview:
    """The service of a review of the rows in a folder."""

    def __init__(
        self,
        folder: Path,
        rows: Rows | None = None,
        *,
        tokens: Mapping[str, str] = TOKENS,
        **options: Any,
    ) -> None:
        file, self.out = folder / "rows.jsonl", folder / "reviewed.jsonl"
        result = audited(file, thumbs() if rows is None and not file.exists() else rows, **options)
        self.errors = list[BaseException]()
        self.review = LabelReview(result, self.out, on_error=self.errors.append)
        service = ReviewService(self.review, tokens=tokens, log=self.errors.append)
        self.service = service
        self.app = RequestGuard(service.application(), host_names("127.0.0.1"))

    def request(
        self, method: str, path: str, body: Any = None, token: str = "token-of-anna", **options: Any
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)  # type: ignore[arg-type]
            headers = {"authorization": f"Bearer {token}"}
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", headers=headers
            ) as client:
                content = {} if body is None else {"json": body}
                return await client.request(method, path, **content, **options)

        return run(send())

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.request("POST", path, {} if body is None else body, **options)

    def decide(self, row: int, choice: str, version: int = 0, **more: Any) -> httpx.Response:
        token = more.pop("token", "token-of-anna")
        body = {"row": row, "choice": choice, "version": version, **more}
        return self.post("/api/decide", body, token=token)

    def rows(self) -> list[dict[str, Any]]:
        """The reviewed rows."""
        self.review.flush()
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def close(self) -> None:
        self.service.close()


NUM_PAIRS = 300
"""Contradictions of the program."""


def choice_of(number: int) -> Choice:
    options: tuple[Choice, ...] = ("keep", "flip", "drop")
    return options[number % 3]


def main(folder: str, start: str) -> None:
    """Decide on row ``start`` and the rows after it."""
    file = Path(folder) / "rows.jsonl"
    review = LabelReview(audited(file), Path(folder) / "reviewed.jsonl")
    print("open", flush=True)
    for number in count(int(start)):
        index = number % (2 * NUM_PAIRS)
        version = review.card(index)["version"]
        review.decide(index, choice_of(number), "anna", version=version)
        print(number, flush=True)
