"""Processes must agree on objects, rows, signals and the division of work, or end together with the
reason.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.distributed.process_groups import run as run_in_processes
from tests.distributed.test_run import SHARDED, records, written
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.distributed.process_group import Group
from valence.errors import UserError
from valence.training.reference_cache import score
from valence.training.signals import Interrupted

pytestmark = [pytest.mark.dist, pytest.mark.slow]
ROWS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": "bad"} for i in range(6)]


def mistake(action: Callable[[], Any]) -> tuple[str, str, str] | None:
    """The code, the place and the sentence of a mistake, if there is one."""
    try:
        action()
    except UserError as error:
        return error.code, error.where or "", error.message
    return None


def mistakes_of_objects(group: Group, place: Path) -> dict[str, tuple[str, str, str] | None]:
    """The mistakes of objects and rows that processes give, which must not end the group."""
    tokenizer: Any = tiny_tokenizer(None)

    def model(seed: int) -> Any:
        return tiny(vocab_size=len(tokenizer), dtype=torch.float32, seed=seed)

    def train(name: str, options: dict[str, Any], **objects: Any) -> tuple[str, str, str] | None:
        result = written("dpo", place, place / name, "float32", **options)
        return mistake(
            lambda: valence.train(result, group=group, quiet=True, tokenizer=tokenizer, **objects)
        )

    same = model(0)
    results = {
        "the same models": train("m1", {}, model=same),
        "other models": train("m2", {}, model=model(group.rank)),
        "other references": train("m3", {}, model=model(0), reference=model(group.rank)),
        "other rows": train("m4", {}, model=model(0), train=ROWS[group.rank :]),
    }
    policy = model(0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    results["an optimizer of whole weights"] = train(
        "m5", SHARDED, model=policy, optimizer=optimizer
    )
    results["a function that makes one"] = train(
        "m6", SHARDED, model=model(0), optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
    )
    results["one that takes no mixture"] = train(
        "m7",
        SHARDED,
        model=model(0),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, foreach=True),
    )
    return results


def test_objects_that_processes_give_must_be_the_same(place: Path) -> None:
    first, other = run_in_processes(mistakes_of_objects, 2, place, deadline=30.0)
    assert (first.error, other.error) == ("", "")
    assert first.value == other.value
    result = first.value
    assert [name for name, error in result.items() if error is None] == [
        "the same models",
        "a function that makes one",
    ]
    differing = {
        "other models": "model",
        "other references": "reference",
        "other rows": "data.train",
    }
    for name, kind in differing.items():
        code, where, sentence = result[name]
        assert (code, where) == ("ranks-differ", "rank 1")
        assert f" {kind} " in sentence
    assert result["an optimizer of whole weights"][:2] == ("optimizer-weights", "optimizer")
    assert result["one that takes no mixture"][:2] == ("optimizer-mixes-weights", "optimizer")


def scored(group: Group, place: Path) -> list[int]:
    """Sequences computed by `valence score` with split weights and uneven hands, and once more with
    all found.
    """
    recipe = place / "score.yaml"
    recipe.write_text(
        f"method: dpo\nmodel: {{name: {place / 'model'}}}\ndata: {{train: "
        f"{place / 'pairs.jsonl'}, limit: 3, max_length: 128}}\n"
        f"train: {{batch_size: 1}}\nparallel: {{shard: full}}\n"
        f"reference: {{cache: {place / 'kept'}}}\nrun: {{dir: {place / 'none'}}}\n"
    )
    return [score(recipe, group=group, verify=1).misses for _ in range(2)]


def test_a_reference_of_split_weights_is_scored_where_one_process_has_no_row(place: Path) -> None:
    ranks = run_in_processes(scored, 2, place, deadline=30.0)
    assert [(rank.error, rank.value) for rank in ranks] == [("", [6, 0])] * 2


def late(group: Group, place: Path) -> tuple[str, int]:
    """A signal reaches rank 1 alone, just when all have said that they have none."""
    ask, observed = group.any, []

    def any_(flag: bool) -> bool:
        answer = ask(flag)
        observed.append(flag)
        if len(observed) == 5 and group.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return answer

    group.any = any_  # type: ignore[method-assign]
    result = written("sft, lora", place, place / "late")
    try:
        valence.train(result, group=group, quiet=True)
    except Interrupted as stopped:
        return str(stopped), stopped.status
    return "done", 0


def test_a_signal_that_comes_while_processes_agree_stops_all_of_them(place: Path) -> None:
    ranks = run_in_processes(late, 2, place, deadline=30.0)
    assert [rank.error for rank in ranks] == ["", ""]
    assert ranks[0].value == ranks[1].value
    assert ranks[0].value[1] == 143
    assert [path.name for path in (place / "late" / "checkpoints").iterdir()]
    assert records(place / "late")
