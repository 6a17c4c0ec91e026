"""Online runs under difficult conditions: rows, distributions, the gradient of a step by formula,
and signals.
"""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.errors import raises_error
from tests.programs import Program
from tests.training.online import rewards
from tests.training.online.recipes import PROMPTS, logged, make, recipe, recipe_without_eval
from tests.training.resuming import facts, killed, train, weights
from valence.training.collector import Collector
from valence.training.step import Objective


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def prompts(place: Path, rows: list[dict[str, Any]]) -> None:
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------- rows


def test_the_same_prompt_with_other_columns_is_another_row(place: Path) -> None:
    """The reward reads the columns of the row that was asked, not those of the last one with that
    prompt.
    """
    prompts(place, [{"prompt": "hey", "wanted": k} for k in range(3)])
    settings = recipe_without_eval(
        place,
        reward="tests.training.online.rewards:wanted",
        train={"max_steps": 1},
    )
    rewards.scored_texts.clear()
    train(settings)
    assert sorted(rewards.scored_texts) == sorted(str(k) for k in range(3) for _ in range(4))


def test_other_columns_are_a_change_of_the_rows(place: Path) -> None:
    """A run that goes on would otherwise be judged by other answers than it began with."""
    settings = recipe_without_eval(place, reward="tests.training.online.rewards:of_info")
    killed(settings, 3)
    prompts(place, [row | {"wanted": 1 - row["wanted"]} for row in PROMPTS])
    with raises_error("run-differs", fix="model.name") as raised:
        train(settings)
    (line,) = raised.error.message.splitlines()[1:]
    assert re.fullmatch(
        r" *data\.train: 7 .* 7 now: 7 .*prompts\.jsonl:1, 7 .*",
        line,
    ), "then, now, new and where, gone"


def test_a_round_of_one_prompt_cannot_be_paired(place: Path) -> None:
    """online_kto measures answers behind prompts that they do not answer; there are none, whatever
    the rewards.
    """
    settings = recipe_without_eval(
        place,
        "online_kto",
        train={"batch_size": 1},
        rollout={"max_resample": 2},
    )
    with raises_error("nothing-to-learn", where="step 0", fix="train.batch_size"):
        train(settings)


@pytest.mark.parametrize("rows", [
    PROMPTS[:1], pytest.param([PROMPTS[0]] * 5, marks=pytest.mark.slow),
    [{"text": "hello"}, {"text": "moon"}],
], ids=["one prompt", "the same prompt five times", "texts"])  # fmt: skip
def test_fewer_prompts_than_a_round_are_asked_again(
    rows: list[dict[str, Any]], place: Path
) -> None:
    """Each call uses different random numbers."""
    prompts(place, rows)
    settings = recipe_without_eval(place, train={"max_steps": 3}, rollout={"steps": 2, "epochs": 2})
    run, _ = train(settings)
    full = logged(place)[0]
    assert full["prompts"] == 3
    assert full["rollout/tied"] < 1
    assert all(torch.isfinite(p).all() for p in weights(run).values())


# ---------------------------------------------------------------------- distributions


@pytest.mark.parametrize(("method", "top_p"), [("rejection", 0.7), ("grpo", 1.0)])
def test_a_policy_that_has_not_moved_is_not_apart_from_its_reference(
    method: str, top_p: float, place: Path
) -> None:
    """Also where completions are drawn from a part of the tokens, and the sampler's probabilities
    are not the policy's.
    """
    rollout = {"temperature": 0.7, "top_p": top_p, "mask_truncated": False}
    train(recipe(place, method, rollout=rollout, train={"max_steps": 1}))
    before, step = logged(place)
    assert before["eval/kl"] == pytest.approx(0, abs=1e-9)
    assert step["kl"] == pytest.approx(0, abs=1e-9)


def test_the_sampler_agrees_with_the_policy_at_its_temperature(place: Path) -> None:
    train(recipe_without_eval(place, rollout={"temperature": 0.7}, train={"max_steps": 2}))
    assert [row["sampler/kl"] for row in logged(place)] == pytest.approx([0, 0], abs=1e-6)


# ---------------------------------------------------------------------- one step by hand


def _credit(method: str, rewards: torch.Tensor, separate: torch.Tensor) -> torch.Tensor:
    """The advantages of the answers to one prompt."""
    if method == "rloo":
        worth = rewards - 0.05 * separate
        return torch.stack([actual - (worth.sum() - actual) / (len(worth) - 1) for actual in worth])
    centred = rewards - rewards.mean()
    return centred if method == "dr_grpo" else centred / (rewards.std() + 1e-4)


def _gradient(
    place: Path, method: str, groups: list[Any], options: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient, prompt by prompt and answer by answer, by the papers' formulas."""
    model = AutoModelForCausalLM.from_pretrained(
        place / "model", dtype=torch.float64, attn_implementation="eager"
    )
    terms: list[torch.Tensor] = []
    for prompt, answers, worth in groups:
        logps = []
        for answer in answers:
            ids = torch.tensor([[*prompt, *answer.tokens]])
            every = (model(input_ids=ids).logits[0] / options["temperature"]).log_softmax(-1)
            logps.append(every[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0])
        # the reference is the policy, before the first step
        separate = torch.zeros(len(answers), dtype=torch.float64)
        for logp, answer, adv in zip(
            logps,
            answers,
            _credit(method, torch.tensor(worth, dtype=torch.float64), separate),
            strict=True,
        ):
            sampler = torch.tensor(answer.logps, dtype=torch.float64)
            old = logp.detach()
            if method == "rloo":
                weight = min(2.0, math.exp(float(old.sum() - sampler.sum())))
                terms.append(-weight * adv * (logp.sum() - old.sum()).exp()[None])
            else:
                terms.append(-(old - sampler).exp().clamp(max=2.0) * adv * (logp - old).exp())
    if method == "dr_grpo":
        loss = torch.cat(terms).sum() / (len(terms) * options["max_new_tokens"])
    elif method == "dapo":
        loss = torch.cat(terms).mean()
    else:
        loss = torch.stack([term.mean() for term in terms]).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("grpo", {"temperature": 1.0}),
        ("grpo", {"temperature": 0.7}),
        ("dr_grpo", {"temperature": 0.7}),
        ("dapo", {"temperature": 1.0}),
        ("rloo", {"temperature": 1.0}),
        ("rloo", {"temperature": 0.7}),
    ],
)
def test_the_first_gradient_is_that_of_the_formulas(
    method: str, options: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows ask the same: their answers are two groups.

    The model norms its layers in float32, whatever its weights are.
    """
    prompts(place, [PROMPTS[0], PROMPTS[0], PROMPTS[1]])
    observed: dict[str, Any] = {}
    group, learn = Collector.group, Objective.update_statistics

    def keep(self: Collector, items: Any, answers: Any, scores: Any, tally: Any) -> Any:
        worth = [[score.value for score in item] for item in scores]
        observed["groups"] = [
            (item.example.prompt_ids, computed, rewards_of_group)
            for item, computed, rewards_of_group in zip(items, answers, worth, strict=True)
        ]
        return group(self, items, answers, scores, tally)

    def note(self: Objective, outcome: Any) -> None:
        observed["loss"] = float(outcome.loss)
        observed["gradient"] = {
            name: p.grad.clone() for name, p in self.policy.named_parameters() if p.grad is not None
        }
        learn(self, outcome)

    monkeypatch.setattr(Collector, "group", keep)
    monkeypatch.setattr(Objective, "update_statistics", note)
    train(
        recipe_without_eval(
            place,
            method,
            model={"dtype": "float64", "lora": None},
            rollout=options,
            train={"max_steps": 1, "clip_norm": None},
        )
    )
    loss, gradient = _gradient(place, method, observed["groups"], {"max_new_tokens": 6, **options})
    assert observed["loss"] == pytest.approx(loss, rel=1e-7, abs=1e-7)
    assert len(observed["groups"]) == 3
    assert len(observed["gradient"]) == len(gradient)
    for name, actual in observed["gradient"].items():
        (theirs,) = [grad for item, grad in gradient.items() if name.endswith(item)]
        torch.testing.assert_close(actual, theirs, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------- killed and stopped


@pytest.mark.slow
def test_more_steps_in_the_middle_of_a_round_reuse_its_completions(place: Path) -> None:
    """Seven of twelve steps end within the second round of four."""
    more: dict[str, Any] = {"rollout": {"epochs": 2, "steps": 2}}
    flat = {"schedule": "constant", "warmup": 0}
    full, _ = train(
        recipe_without_eval(
            place,
            **more,
            train={"max_steps": 12, **flat},
            run={"dir": str(place / "whole")},
        ),
    )
    train(recipe_without_eval(place, **more, train={"max_steps": 7, **flat}))
    again, _ = train(recipe_without_eval(place, **more, train={"max_steps": 12, **flat}))
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())
    assert logged(place) == logged(place, "whole")


@pytest.mark.slow
@pytest.mark.dist
def test_a_reward_that_hangs_does_not_hold_up_the_end(place: Path) -> None:
    """Neither of two processes waits for it."""
    settings = recipe_without_eval(
        place,
        reward="tests.training.online.rewards:hanging",
        train={"max_steps": 3},
    )
    (place / "recipe.yaml").write_text(yaml.safe_dump(settings))
    mark = place / "hangs"
    run = Program(
        "train",
        str(place / "recipe.yaml"),
        "--nproc",
        "2",
        output=place / "printed",
        MARK=str(mark),
    )
    run.wait_until(mark.exists)
    run.send_signal(signal.SIGTERM)
    assert run.wait(120) == 128 + signal.SIGTERM, (place / "printed").read_text()
    assert facts(place / "run")["status"] == "interrupted"
    assert (place / "run/checkpoints/step-1").is_dir()
    assert [row["step"] for row in logged(place)] == [1]
