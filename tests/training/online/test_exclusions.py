"""What rejection must not imitate: groups without a difference, truncated and bad completions."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import valence
from tests.training.online.rig import logged, make, recipe
from tests.training.resuming import killed, train, weights
from valence.errors import UserError
from valence.rollout import HFGenerator
from valence.training.online.makers import Answered, best_of_n, exclusion_reasons
from valence.types import Completion, Encoded, Origin

BY_INDEX = "tests.training.online.rewards:by_index"
CONSTANT = "tests.training.online.rewards:constant"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def group(*rewards: float, truncated: tuple[int, ...] = ()) -> Answered:
    """A prompt with a completion for each reward."""
    prompt = Encoded(
        id="p", origin=Origin("prompts.jsonl", 1), kind="prompt", prompt_ids=(1, 2),
        prompt_mask=(False, False), answers=(),
    )  # fmt: skip
    completions = tuple(
        Completion("p", (3 + i, 9), (-1.0, -1.0), "", "length" if i in truncated else "eos", index=i) for i in range(len(rewards))
    )
    return Answered(prompt, completions, tuple(rewards))


def imitated(*groups: Answered, top_n: int = 1, min_reward: float | None = None, mask: bool = True) -> list[int]:
    """By their place in the group, the completions that are imitated."""
    return [unit.answers[0].ids[0] - 3 for unit in best_of_n(groups, top_n, min_reward, mask)]


@pytest.mark.parametrize(("rewards", "how", "expected"), [
    ((0, 0, 0), {}, []),  # a 0/1 verifier rejected all of them
    ((1, 1, 1), {}, []),  # nothing to be learned from the difference
    ((0, 1, 0, 1), {}, [1]), ((0, 1, 0, 1), {"top_n": 2}, [1, 3]),
    ((0, 1, 0), {"top_n": 3}, [1]),  # not those that are as bad as the worst
    ((0.2, 0.5, 0.9), {"min_reward": 0.6, "top_n": 3}, [2]), ((0.2, 0.5), {"min_reward": 0.6}, []),
    ((0.7, 0.9), {"min_reward": 0.6, "top_n": 2}, [1, 0]),
    ((0.7,), {}, []), ((0.7,), {"min_reward": 0.6}, [0]), ((0.5,), {"min_reward": 0.6}, []),
])  # fmt: skip
def test_only_completions_that_are_better_are_imitated(
    rewards: tuple[float, ...], how: dict[str, Any], expected: list[int]
) -> None:
    assert imitated(group(*rewards), **how) == expected


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

    def generate(self: HFGenerator, *args: Any, **how: Any) -> list[list[Completion]]:
        groups = plain(self, *args, **how)
        stops = ["length" if i in truncated else "eos" for i in range(len(groups[0]))] if groups else []
        return [
            [replace(each, stop=stop) for each, stop in zip(own, stops, strict=True)]  # type: ignore[arg-type]
            for own in groups
        ]

    monkeypatch.setattr(HFGenerator, "generate", generate)


def test_the_log_and_the_summary_count_what_is_excluded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards 0, 1/3, 2/3, 1 in each group of four; the last one is truncated."""
    ends(monkeypatch, 3)
    settings = recipe(place, "rejection", reward=BY_INDEX, rollout={"min_reward": 0.5}, train={"max_steps": 2})
    run, said = train(settings | {"data": {**settings["data"], "eval": []}, "eval": {}})
    for row in logged(place):
        assert row["examples_seen"] == 3 * row["step"]
        assert row["excluded/truncated"] == 0.25
        assert row["excluded/low_reward"] == 0.5
        assert row["excluded/tied"] == row["excluded/worst"] == row["excluded/prompts"] == 0
    assert "0 of 6 prompts gave no example; 18 of 24 completions were excluded" in said
    assert "6 truncated at rollout.max_new_tokens, 12 below rollout.min_reward" in said
    facts = json.loads((place / "run/run.json").read_text())
    assert facts["exclusions"] == {
        "truncated": 6, "low_reward": 12, "completions": 24, "prompts": 6, "prompts_without": 0,
    }  # fmt: skip
    assert Counter(run.rounds.exclusions) == Counter(facts["exclusions"])  # type: ignore[union-attr]


@pytest.mark.parametrize(("reward", "rollout", "truncated", "message", "fix"), [
    (CONSTANT, {}, (), "24 in groups whose rewards are all equal", "look at the reward"),
    (BY_INDEX, {}, (0, 1, 2, 3), "24 truncated at rollout.max_new_tokens", "raise rollout.max_new"),
    (BY_INDEX, {"min_reward": 2.0}, (), "24 below rollout.min_reward", "lower rollout.min_reward"),
])  # fmt: skip
def test_a_run_that_never_has_something_to_imitate_says_why(
    reward: str, rollout: dict[str, Any], truncated: tuple[int, ...], message: str, fix: str,
    place: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After the prompts of a round were replaced as often as the recipe allows."""
    ends(monkeypatch, *truncated)
    settings = recipe(place, "rejection", reward=reward, rollout={"max_resample": 1, **rollout})
    with pytest.raises(UserError) as error:
        train(settings | {"data": {**settings["data"], "eval": []}, "eval": {}})
    assert "2 rounds in a row had nothing to teach: 6 of 6 prompts gave no example" in error.value.what
    assert message in error.value.what
    assert fix in str(error.value.fix)


def test_a_killed_run_counts_what_an_undisturbed_one_does(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends(monkeypatch, 3)
    more: dict[str, Any] = {"reward": BY_INDEX, "rollout": {"epochs": 2}}
    whole, _ = train(recipe(place, "rejection", **more, run={"dir": str(place / "whole")}))
    settings = recipe(place, "rejection", **more)
    killed(settings, 4)
    again, _ = train(settings)
    assert whole.rounds is not None
    assert again.rounds is not None
    assert again.rounds.exclusions == whole.rounds.exclusions
    assert whole.rounds.exclusions["truncated"] == 9
    assert logged(place) == logged(place, "whole")
    assert all((p == weights(again)[name]).all() for name, p in weights(whole).items())


@pytest.mark.parametrize(("method", "rollout", "setting"), [
    ("grpo", {"min_reward": 0.5}, "rollout.min_reward"),
    ("online_dpo", {"mask_truncated": True}, "rollout.mask_truncated"),
    ("rejection", {"num_rollouts": 1}, "rollout.num_rollouts"),
])  # fmt: skip
def test_settings_that_the_method_does_not_read_are_refused(
    method: str, rollout: dict[str, Any], setting: str, place: Path
) -> None:
    with pytest.raises(UserError) as error:
        valence.train(recipe(place, method, rollout=rollout))
    assert setting in str(error.value)
