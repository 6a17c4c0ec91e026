"""Completions that rejection sampling must not imitate: tied, truncated and bad ones."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.errors import raises_error
from tests.training.online.recipes import logged, make, recipe, recipe_without_eval
from tests.training.resuming import facts, killed, train, weights
from valence.methods.sample_builders import RolloutGroup, best_of_n, exclusion_reasons
from valence.rollouts import HFGenerator
from valence.types import Completion, Origin, TokenizedExample

BY_INDEX = "tests.training.online.rewards:by_index"
CONSTANT = "tests.training.online.rewards:constant"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def group(*rewards: float, truncated: tuple[int, ...] = ()) -> RolloutGroup:
    """A prompt with a completion for each reward."""
    prompt = TokenizedExample(
        id="p", origin=Origin("prompts.jsonl", 1), kind="prompt", prompt_ids=(1, 2),
        prompt_mask=(False, False), answers=(),
    )  # fmt: skip
    completions = tuple(
        Completion(
            "p", (3 + i, 9), (-1.0, -1.0), "", "length" if i in truncated else "eos", index=i
        )
        for i in range(len(rewards))
    )
    return RolloutGroup(prompt, completions, tuple(rewards))


def imitated(
    *groups: RolloutGroup, top_n: int = 1, min_reward: float | None = None, mask: bool = True
) -> list[int]:
    """By their place in the group, the completions that are imitated."""
    return [unit.answers[0].ids[0] - 3 for unit in best_of_n(groups, top_n, min_reward, mask)]


@pytest.mark.parametrize(("rewards", "options", "expected"), [
    ((0, 0, 0), {}, []),  # a 0/1 verifier rejected all of them
    ((1, 1, 1), {}, []),  # nothing to be learned from the difference
    ((0, 1, 0, 1), {}, [1]), ((0, 1, 0, 1), {"top_n": 2}, [1, 3]),
    ((0, 1, 0), {"top_n": 3}, [1]),  # not those that are as bad as the worst
    ((0.2, 0.5, 0.9), {"min_reward": 0.6, "top_n": 3}, [2]), ((0.2, 0.5), {"min_reward": 0.6}, []),
    ((0.7, 0.9), {"min_reward": 0.6, "top_n": 2}, [1, 0]),
    ((0.7,), {}, []), ((0.7,), {"min_reward": 0.6}, [0]), ((0.5,), {"min_reward": 0.6}, []),
])  # fmt: skip
def test_only_completions_that_are_better_are_imitated(
    rewards: tuple[float, ...], options: dict[str, Any], expected: list[int]
) -> None:
    assert imitated(group(*rewards), **options) == expected


def test_truncated_completions_are_not_imitated_and_still_compared_with() -> None:
    cut = group(0.0, 2.0, 1.0, truncated=(1,))
    assert imitated(cut) == [2]
    assert imitated(cut, mask=False) == [1]
    assert imitated(group(0.0, 1.0, truncated=(1,))) == []  # the other one is wrong
    assert imitated(group(1.0, 1.0, 0.0, truncated=(2,)), top_n=3) == [0, 1]


def test_every_excluded_completion_has_one_reason() -> None:
    reasons = exclusion_reasons(group(0.0, 1.0, 0.2, 0.9, truncated=(0, 3)), 0.5, True)
    assert reasons == ["truncated", None, "low_reward", "truncated"]
    assert exclusion_reasons(group(1.0, 1.0, truncated=(0,)), 0.5, True) == ["tied", "tied"]
    assert exclusion_reasons(group(1.0, 0.0), None, True) == [None, "worst"]


def ends(monkeypatch: pytest.MonkeyPatch, *truncated: int) -> None:
    """Let every sampled completion end by itself, but for those of these places in their group."""
    plain = HFGenerator.generate

    def generate(self: HFGenerator, *args: Any, **options: Any) -> list[list[Completion]]:
        groups = plain(self, *args, **options)
        stops = (
            ["length" if i in truncated else "eos" for i in range(len(groups[0]))] if groups else []
        )
        return [
            [replace(element, stop=stop) for element, stop in zip(item, stops, strict=True)]  # type: ignore[arg-type]
            for item in groups
        ]

    monkeypatch.setattr(HFGenerator, "generate", generate)


def test_the_log_and_the_summary_count_what_is_excluded(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards 0, 1/3, 2/3, 1 in each group of four; the last one is truncated."""
    ends(monkeypatch, 3)
    rollout = {"min_reward": 0.5}
    run, printed = train(
        recipe_without_eval(
            place,
            "rejection",
            reward=BY_INDEX,
            rollout=rollout,
            train={"max_steps": 2},
        ),
    )
    for row in logged(place):
        assert row["examples_seen"] == 3 * row["step"]
        assert row["excluded/truncated"] == 0.25
        assert row["excluded/low_reward"] == 0.5
        assert row["excluded/tied"] == row["excluded/worst"] == row["excluded/prompts"] == 0
    (line,) = [line for line in printed.splitlines() if "rollout.min_reward" in line]
    assert re.findall(r"\d+", line) == ["0", "6", "18", "24", "6", "12"]
    exclusions = facts(place / "run")["exclusions"]
    assert exclusions == {
        "truncated": 6, "low_reward": 12, "completions": 24, "prompts": 6, "prompts_without": 0,
    }  # fmt: skip
    assert Counter(run.examples.exclusions) == Counter(exclusions)  # type: ignore[union-attr]


@pytest.mark.parametrize(("reward", "rollout", "truncated", "setting", "fix"), [
    (CONSTANT, {}, (), "", "rollout.num_rollouts"),
    (BY_INDEX, {}, (0, 1, 2, 3), "rollout.max_new_tokens", "rollout.max_new_tokens"),
    (BY_INDEX, {"min_reward": 2.0}, (), "rollout.min_reward", "rollout.min_reward"),
], ids=["tied", "truncated", "low reward"])  # fmt: skip
def test_a_run_without_completions_to_imitate_reports_the_reason(
    reward: str, rollout: dict[str, Any], truncated: tuple[int, ...], setting: str, fix: str,
    place: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After the prompts of a round were replaced as often as the recipe allows."""
    ends(monkeypatch, *truncated)
    settings = recipe_without_eval(
        place,
        "rejection",
        reward=reward,
        rollout={"max_resample": 1, **rollout},
    )
    with raises_error("nothing-to-learn", where="step 0", fix=fix) as raised:
        train(settings)
    # Rounds, prompts without an example of all, excluded completions of all, those for this reason.
    assert re.findall(r"\d+", raised.error.message) == ["2", "6", "6", "24", "24", "24"]
    assert setting in raised.error.message


@pytest.mark.slow
def test_a_killed_run_counts_what_an_undisturbed_one_does(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends(monkeypatch, 3)
    more: dict[str, Any] = {"reward": BY_INDEX, "rollout": {"epochs": 2}}
    full, _ = train(
        recipe_without_eval(place, "rejection", **more, run={"dir": str(place / "whole")}),
    )
    settings = recipe_without_eval(place, "rejection", **more)
    killed(settings, 4)
    again, _ = train(settings)
    assert full.examples is not None
    assert again.examples is not None
    assert again.examples.exclusions == full.examples.exclusions
    assert full.examples.exclusions["truncated"] == 9
    assert logged(place) == logged(place, "whole")
    assert all((p == weights(again)[name]).all() for name, p in weights(full).items())


@pytest.mark.parametrize(("method", "rollout", "code", "setting"), [
    ("grpo", {"min_reward": 0.5}, "setting-no-effect", "rollout.min_reward"),
    ("online_dpo", {"mask_truncated": True}, "setting-no-effect", "rollout.mask_truncated"),
    ("ppo", {"replace_tied": True}, "setting-no-effect", "rollout.replace_tied"),
    ("rejection", {"num_rollouts": 1}, "setting-conflict", "rollout.num_rollouts"),
    (
        "rejection", {"num_rollouts": 1, "min_reward": 0.5, "replace_tied": True},
        "setting-conflict", "rollout.num_rollouts",
    ),
])  # fmt: skip
def test_settings_that_the_method_cannot_use_are_refused(
    method: str, rollout: dict[str, Any], code: str, setting: str, place: Path
) -> None:
    with raises_error(code, where=setting):
        valence.train(recipe(place, method, rollout=rollout))
