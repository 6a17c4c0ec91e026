"""The web application for reviewing suspicious rows."""
# No postponed annotations here, as in `app`.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from valence.apps.feedback.review_labels import Choice, LabelReview, StaleVersionError
from valence.apps.serve.app import (
    Body,
    Lifespan,
    WebService,
    base_application,
    known_rater_parameter,
    log_error,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

LOCAL = "local"
"""The rater's name in a review without names."""


class CaseRequest(Body):
    """The case to show: the one with this number, or the next undecided one."""

    number: Annotated[int, Field(ge=0)] | None = None
    after: Annotated[int, Field(ge=-1)] = -1


class DecisionRequest(Body):
    """version: of the row, as it was shown."""

    row: int
    version: int
    choice: Choice
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None


@dataclass
class ReviewService(WebService):
    """The service of `valence audit --review`."""

    command = "valence audit"
    recovery = "all decisions are saved; rerun the same command to write the rows"

    review: LabelReview
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Callable[[BaseException], None] = log_error

    @property
    def destination(self) -> str:
        return f"decisions are written to {self.review.out}"

    @property
    def summary(self) -> str:
        progress = self.review.progress()
        decided = progress["rows"] - progress["left"]
        return f"{decided} of {progress['rows']} suspicious rows decided; see {self.review.out}"

    def application(self, lifespan: Lifespan | None = None) -> "FastAPI":
        return review_application(self, lifespan)

    def close(self) -> None:
        self.review.close()

    def case(self, number: int | None) -> dict[str, Any]:
        """The rows of a case; none after the last one."""
        review = self.review
        cards = [] if number is None else [review.card(index) for index in review.cases[number]]
        return {
            "number": number,
            "cases": len(review.cases),
            "cards": cards,
            "progress": review.progress(),
        }


def review_application(service: ReviewService, lifespan: Lifespan | None = None) -> "FastAPI":
    """The web application of a review."""
    from fastapi import HTTPException

    review = service.review
    app = base_application(service, "review.html", review.out.name, lifespan)
    known_rater = known_rater_parameter()

    @app.get("/api/session")
    async def session(rater: str = known_rater) -> dict[str, Any]:
        return {"file": review.out.name, "rater": rater, "progress": review.progress()}

    @app.post("/api/case")
    def case(request: CaseRequest, _: str = known_rater) -> dict[str, Any]:
        if request.number is None:
            return service.case(review.next_case(request.after))
        if request.number >= len(review.cases):
            raise HTTPException(404, "unknown case")
        return service.case(request.number)

    @app.post("/api/decide")
    def decide(request: DecisionRequest, rater: str = known_rater) -> dict[str, Any]:
        try:
            review.decide(
                request.row, request.choice, rater or LOCAL,
                version=request.version, score=request.score,
            )  # fmt: skip
        except KeyError:
            raise HTTPException(404, "unknown row") from None
        except StaleVersionError:
            raise HTTPException(
                409, "another rater has decided on this row in the meantime"
            ) from None
        return service.case(review.case_of(request.row))

    @app.post("/api/undo")
    def undo(rater: str = known_rater) -> dict[str, Any]:
        index = review.undo(rater or LOCAL)
        if index is None:
            raise HTTPException(404, "there is nothing to undo")
        number = review.case_of(index) if review.is_reviewed(index) else None
        return {**service.case(number), "row": index}

    return app
