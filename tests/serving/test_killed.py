"""A service that is killed loses no vote that it has confirmed."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from tests.programs import Program
from tests.serving import voting
from tests.serving.kit import rows
from tests.serving.voting import label_of
from valence.apps.serve.feedback import FeedbackStore

pytestmark = pytest.mark.slow


def vote() -> None:
    voting.main(*sys.argv[1:])


def test_votes_and_rows_agree_after_kills(tmp_path: Path) -> None:
    out, message = tmp_path / "feedback.jsonl", tmp_path / "said"
    random.seed(0)
    confirmed = 0
    for _ in range(10):
        message.unlink(missing_ok=True)
        program = Program(str(out), str(confirmed), main=vote, output=message)
        while not (message.exists() and message.read_text().startswith("open\n")):
            assert program.poll() is None, message.read_text()
            time.sleep(0.01)
        time.sleep(random.uniform(0.05, 0.3))
        os.kill(program.pid, signal.SIGKILL)
        program.process.join()
        lines = message.read_text().splitlines(keepends=True)[1:]
        numbers = [int(line) for line in lines if line.endswith("\n")]
        assert numbers == list(range(confirmed, confirmed + len(numbers)))
        confirmed += len(numbers)
        with closing(FeedbackStore(out)) as store:
            store.flush()
        results = {int(row["prompt"][0]["content"].split()[1]): row["label"] for row in rows(out)}
        expected = {number: label_of(number) for number in range(confirmed)}
        assert expected.items() <= results.items()
        assert len(results) <= confirmed + 1  # at most one vote was not confirmed any more
        assert len(rows(out)) == len(results)
        assert len(rows(out.with_suffix(".votes.jsonl"))) == len(results)
        assert not out.with_suffix(".pending.jsonl").exists()
    assert confirmed > 20
