"""Requests generated from the server's OpenAPI description: it conforms to it, and no input makes
it fail.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.rewards.reward_servers import Numbers, served

EXAMPLES = 15
"""For each of its paths, in each of two modes."""


@pytest.mark.slow
@pytest.mark.parametrize("valid", [True, False])
def test_what_the_description_allows_and_what_it_does_not(valid: bool) -> None:
    schemathesis: Any = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    with served(Numbers()) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert {operation.path for operation in operations} == {
            "/get_reward",
            "/health",
            "/ready",
            "/metrics",
        }

        for operation in operations:
            # nothing that the others are sent can be wrong
            if valid or operation.path == "/get_reward":
                examined(operation, valid)
        statuses = server.statuses
    assert 500 not in statuses
    assert set(statuses) <= ({200, 422, 413} if valid else {200, 415, 422, 413})
    assert (statuses[200] if valid else statuses[422]) >= EXAMPLES / 4


def examined(operation: Any, valid: bool) -> None:
    """Sends it requests, and checks that the replies are as described.

    Valid ones may still have columns of unequal length, which a JSON schema cannot say.
    """
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    mode = GenerationMode.POSITIVE if valid else GenerationMode.NEGATIVE

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    ask()
