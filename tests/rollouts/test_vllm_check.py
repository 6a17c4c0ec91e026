"""The comparison of a server's log-probabilities with the trainer's: it distinguishes the known
causes of a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.errors import raises_error
from valence.rollouts.check import Evidence, check, compare, difference
from valence.rollouts.protocol import Sampling
from valence.types import Completion

OURS = [[-1.0, -2.0], [-0.5]]
FAR = [[-1.5, -3.0], [-0.9]]
NEAR = [[-1.03, -2.02], [-0.55]]
SAME = {"read": OURS, "trainer_read": OURS}


def test_the_mean_difference_over_tokens() -> None:
    assert compare(OURS, NEAR, 0.1) == pytest.approx((0.03 + 0.02 + 0.05) / 3)
    assert difference([[-1.0]], [[-math.inf]]) == math.inf
    assert difference([[math.nan]], [[-1.0]]) == math.inf


@pytest.mark.parametrize(
    ("theirs", "evidence", "setting"),
    [
        (FAR, {**SAME}, "--no-enable-prefix-caching"),
        (
            FAR,
            {"temperature": 0.5, "read": FAR, "trainer_read": FAR},
            "--logprobs-mode processed_logprobs",
        ),
        (FAR, {"temperature": 0.5, **SAME}, "--no-enable-prefix-caching"),
        (
            NEAR,
            {"dtypes": ("float32", "bfloat16"), "read": NEAR, "trainer_read": OURS},
            "--dtype float32",
        ),
        (FAR, {"dtypes": ("float32", "bfloat16"), "read": FAR, "trainer_read": OURS}, "model.name"),
        (FAR, {"dtypes": ("float32", "float32"), "read": FAR, "trainer_read": OURS}, "model.name"),
        (FAR, {"adapter": True, "read": FAR, "trainer_read": OURS}, "rollout.transport for full"),
        (
            FAR,
            {"agreed": True, "tied": True, "read": FAR, "trainer_read": OURS},
            "valence docs vllm",
        ),
        (FAR, {"agreed": True, "read": FAR, "trainer_read": OURS}, "use another rollout.transport"),
        (FAR, {}, "model.name"),
    ],
)
def test_the_fix_is_that_of_the_cause_that_fits(theirs: Any, evidence: Any, setting: str) -> None:
    with raises_error(
        "rollout-logps-mismatch", where="rollout.max_mismatch", fix=setting
    ) as raised:
        compare(OURS, theirs, 0.01, evidence=Evidence(**evidence))
    assert f"{difference(OURS, theirs):.3g}" in raised.error.message


class Server:
    """Answers every prompt with token 7, and knows nothing else."""

    version, gives_tokens, dtype = 1, True, "float32"

    def __init__(self, logp: float) -> None:
        self.logp, self.modes, self.scored = logp, [], 0

    def generate(
        self, prompts: Sequence[Any], n: int, sampling: Sampling, **_: Any
    ) -> list[list[Completion]]:
        self.modes.append(sampling)
        return [[Completion("p", (7,), (self.logp,), "", "length")] for _ in prompts]

    def logps(self, pairs: Sequence[Any]) -> list[list[float]]:
        self.scored += 1
        return [[-1.0] for _ in pairs]


def test_a_check_asks_for_more_only_where_there_is_a_difference() -> None:
    requests: list[float] = []

    def measure(pairs: Sequence[Any], temperature: float) -> list[list[float]]:
        assert pairs == [((4,), (7,))]
        requests.append(temperature)
        return [[-1.0]]

    run = Sampling(temperature=0.7, top_p=0.5, max_new_tokens=100, seed=3)
    fine, far = Server(-1.05), Server(-2.0)
    assert check(fine, [(4,)], run, measure, 0.1) == pytest.approx(0.05)  # type: ignore[arg-type]
    assert (fine.scored, requests) == (0, [0.7])
    # A part of the vocabulary would have other log-probabilities than the trainer's.
    assert (fine.modes[0].top_p, fine.modes[0].temperature) == (1.0, 0.7)
    with raises_error("rollout-logps-mismatch", fix="--no-enable-prefix-caching"):
        check(far, [(4,)], run, measure, 0.1)  # type: ignore[arg-type]
    assert (far.scored, requests) == (1, [0.7, 0.7, 1.0])
