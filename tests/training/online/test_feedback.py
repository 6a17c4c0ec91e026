"""Online training with a teacher: it reads what a reward says, or the best completion."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import valence
from tests.errors import raises_error
from tests.training.online.recipes import logged, make, recipe_without_eval
from tests.training.resuming import facts, killed, resumed_steps, train, weights
from valence.api import build_run
from valence.data.encode import Encoder
from valence.data.hindsight import TEMPLATES, TeacherContext
from valence.methods.sample_builders import (
    RolloutGroup,
    teacher_exclusions,
    with_teachers,
)
from valence.models.reference import FrozenReference
from valence.training.collector import packed, unpacked
from valence.training.trainer import Trainer
from valence.types import Completion, Origin, TokenizedExample

EXPLAINED = "tests.training.online.rewards:explained"
EPOCHS = {"rollout": {"epochs": 2}}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make(tmp_path)
    return tmp_path


def hindsight(place: Path, **changes: Any) -> dict[str, Any]:
    changes.setdefault("reward", EXPLAINED)
    changes["data"] = {"max_length": 400} | changes.get("data", {})
    return recipe_without_eval(place, "hindsight", **changes)


# What the teacher reads


@pytest.mark.parametrize(("context", "expected"), [
    ("feedback", [("wrong", "reward"), None, None]),
    ("demonstration", [("good", "demonstration"), None, ("good", "demonstration")]),
    ("either", [("wrong", "reward"), None, ("good", "demonstration")]),
])  # fmt: skip
def test_the_context_decides_what_the_teacher_reads(
    context: Any, expected: list[tuple[str, str] | None]
) -> None:
    teacher = TeacherContext(context)
    rewards, texts, answers = (0.0, 1.0, 0.5), ("wrong", "", ""), ("bad", " good", "fair")
    assert teacher.select(rewards, texts, answers) == expected


def test_only_a_better_completion_is_a_demonstration() -> None:
    """Of equal rewards, the first completion; one without text is none."""
    select = TeacherContext("demonstration").select
    same = select((1.0, 1.0), ("", ""), ("a", "b"))
    assert same == [None, None]
    first = select((0.0, 1.0, 1.0), ("", "", ""), ("a", "b", "c"))
    assert first == [("b", "demonstration"), None, None]
    assert select((0.0, 1.0), ("", ""), ("a", " ")) == [None, None]


def group(**changes: Any) -> RolloutGroup:
    prompt = TokenizedExample(
        id="p", origin=Origin("prompts.jsonl", 1), kind="prompt", prompt_ids=(100, 101),
        prompt_mask=(False, False), answers=(),
    )  # fmt: skip
    stops = "eos", "length", "eos", "eos"
    answers = tuple(
        Completion("p", (i, 99), (-1.0, -1.0 - i), "", stop, index=i)
        for i, stop in enumerate(stops)
    )
    teachers = (7, 8, 9), (7,), (), None
    columns = tuple({"old": (-2.0, -2.0 - i), "ref": (0.0, 0.0)} for i in range(4))
    return RolloutGroup(
        prompt, answers, (0.0,) * 4, **{"teachers": teachers, "columns": columns} | changes
    )


def test_completions_without_a_teacher_are_left_out() -> None:
    assert teacher_exclusions(group(), True) == [None, "truncated", "no_feedback", "too_long"]
    assert teacher_exclusions(group(), False)[:2] == [None, None]
    first, second = with_teachers([group()], 0, False)
    assert (first.kind, first.teacher_ids, second.teacher_ids) == ("feedback", (7, 8, 9), (7,))
    assert (first.prompt_ids, first.answers[0].ids) == ((100, 101), (0, 99))
    assert first.answers[0].columns == (("old", (-2.0, -2.0)),)
    (ahead, _) = with_teachers([group()], 1, False)  # the policy has changed meanwhile
    assert ahead.answers[0].columns == (("old", (-1.0, -1.0)),)
    (unmeasured, _) = with_teachers([group(columns=())], 0, False)
    assert unmeasured.answers[0].columns == ()


def test_examples_of_a_checkpoint_have_their_teachers() -> None:
    units = with_teachers([group()], 0, False)
    assert unpacked(packed(units)) == units
    old = {name: part for name, part in packed(units).items() if "teacher" not in name}
    assert unpacked(old) == [replace(unit, teacher_ids=()) for unit in units]


# Runs


def test_the_log_counts_completions_without_a_text(place: Path) -> None:
    """Of four completions of a prompt, the reward says nothing about the third one."""
    run, _ = train(hindsight(place, train={"max_steps": 2}))
    for row in logged(place):
        assert row["excluded/no_feedback"] == 0.25
        assert row["excluded/too_long"] == row["excluded/truncated"] == 0
        assert "excluded/tied" not in row
        assert row["examples_seen"] == 9 * row["step"]
        assert {"signal/mean", "signal/size", "reward/mean", "kl"} <= row.keys()
    exclusions = facts(place / "run")["exclusions"]
    assert exclusions == {"no_feedback": 6, "completions": 24, "prompts": 6, "prompts_without": 0}
    assert all(torch.isfinite(p).all() for p in weights(run).values())


def test_the_teacher_reads_the_text_of_the_reward(place: Path) -> None:
    run = started(place)
    units, _ = run.examples.next_step()
    texts = [run.prepared.tokenizer.decode(list(unit.teacher_ids)) for unit in units]
    head, tail = TEMPLATES["reward", None].split("{feedback}")
    assert all(f"{head}found: " in text and tail in text for text in texts)
    assert len(units) == 9
    lengths = sorted(len(unit.teacher_ids) + len(unit.answers[0].ids) for unit in units)
    shorter = started(place, data={"max_length": lengths[4]}, run={"dir": str(place / "shorter")})
    assert len(shorter.examples.next_step()[0]) == sum(n <= lengths[4] for n in lengths) < 9


@pytest.mark.parametrize("teacher", [
    {"weights": "initial"},
    {"weights": "ema", "context": "either"},
    pytest.param({"weights": "live", "context": "demonstration"}, marks=pytest.mark.slow),
], ids=["initial", "ema", "live"])  # fmt: skip
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_run_ends_as_one_that_was_not(
    teacher: dict[str, str], step: int, place: Path
) -> None:
    """In the middle of a round, and between two."""
    settings = hindsight(place, teacher=teacher, train={"max_steps": 4}, **EPOCHS)
    full, _ = train(settings | {"run": settings["run"] | {"dir": str(place / "whole")}})
    killed(settings, step)
    again, _ = train(settings)
    assert resumed_steps(place / "run") == [step - 1]
    assert all(torch.equal(p, weights(again)[name]) for name, p in weights(full).items())
    assert logged(place) == logged(place, "whole")
    if teacher["weights"] == "ema":
        one, other = (run.state.moving_teacher for run in (full, again))
        assert one is not None
        assert other is not None
        assert all(torch.equal(p, other.weights[name]) for name, p in one.weights.items())


def started(place: Path, **changes: Any) -> Trainer:
    """A run with the examples of its first round."""
    run = build_run(hindsight(place, **changes), quiet=True)
    run._prepare_step()
    return run


@pytest.mark.parametrize("lora", [{"rank": 2}, None], ids=["adapter", "all weights"])
@pytest.mark.parametrize("kind", ["initial", "ema", "live"])
def test_teacher_and_policy_have_the_temperature_of_sampling(
    kind: str, lora: dict[str, int] | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step, a teacher that reads the same prompt has no signal at all."""
    monkeypatch.setattr(
        Encoder, "encode_teacher_prompt", lambda self, prompt, *_: self.encode_prompt(prompt)
    )
    run = started(
        place, model={"lora": lora}, teacher={"weights": kind}, rollout={"temperature": 0.5}
    )
    objective, (units, _) = run.state.objective, run.examples.next_step()
    assert objective.policy.temperature == 0.5
    result = objective.run(units, backward=False)
    assert float(result.loss) == 0
    if isinstance(objective.teacher, FrozenReference):
        assert objective.teacher.engine.temperature == 1


def test_a_step_by_hand(place: Path) -> None:
    """The second step of a round: the policy has changed since it sampled the completions.

    The loss is the mean over completions of mean_t(-w_t A_t logp_t) at the temperature of sampling.
    """
    teacher, rollout = {"weights": "initial"}, {"temperature": 0.7, "epochs": 2}
    options = {"model": {"lora": None, "dtype": "float64"}, "loss": {"clip": 0.5}}
    run = started(place, teacher=teacher, rollout=rollout, **options)
    before = copy.deepcopy(run.policy)
    run._train_step()
    run._prepare_step()
    units, _ = run.examples.next_step()

    def logps(policy: Any, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            ids = torch.tensor([prompt + answer])
            logits = policy.causal(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        return (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0]

    losses: list[torch.Tensor] = []
    ratios: list[torch.Tensor] = []
    for unit in units:
        (answer,) = unit.answers
        now = logps(run.policy, unit.prompt_ids, answer.ids)
        old = logps(before, unit.prompt_ids, answer.ids)
        torch.testing.assert_close(dict(answer.columns)["old"], tuple(old.tolist()))
        signal = (logps(before, unit.teacher_ids, answer.ids) - now).clamp(-0.5, 0.5)
        ratios.append((now - old).exp())
        losses.append((-ratios[-1].clamp(max=2.0) * signal * now).mean())
    assert (torch.cat(ratios) - 1).abs().max() > 0.01
    result = run.state.objective.run(units, backward=False)
    assert float(result.loss) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)


def test_micro_batches_change_no_number(place: Path) -> None:
    runs = []
    for tokens in (64, 4096):
        options: dict[str, Any] = {"model": {"dtype": "float64"}, **EPOCHS}
        options["train"] = {"micro_batch_tokens": tokens, "max_steps": 2}
        options["run"] = {"dir": str(place / f"run-{tokens}")}
        train(hindsight(place, **options))
        runs.append(logged(place, f"run-{tokens}"))
    for ours, theirs in zip(*runs, strict=True):
        for name in ours.keys() - {"micro_batches", "tokens", "tokens_seen", "waste"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-7, abs=1e-9), name


def test_the_policy_learns_what_the_text_says(tmp_path: Path, monkeypatch: Any) -> None:
    """A model that obeys a hint in its prompt, and otherwise answers a or b equally often. The
    reward is always 0 and says `hint b`.
    """
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    shown = [{"prompt": f"hint {x}\n\nsay: ", "completion": x} for x in "ab"]
    shown += [{"prompt": "say: ", "completion": x} for x in "ab"]
    Path("shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in shown))
    Path("ask.jsonl").write_text(json.dumps({"prompt": "say: "}) + "\n")
    data: dict[str, Any] = {"as_chat": False, "max_length": 64}
    model: dict[str, Any] = {"name": "model", "dtype": "float32"}
    valence.train(
        method="sft", model=model, data=data | {"train": ["shown.jsonl"]}, quiet=True,
        train={"batch_size": 4, "learning_rate": 1e-2, "epochs": 100}, run={"dir": "start"},
    )  # fmt: skip

    def share_of_b(folder: str, prompt: str = "say: ") -> float:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            probs = loaded(ids).logits[0, -1].softmax(-1)
        a, b = (tokenizer(x).input_ids[0] for x in "ab")
        return float(probs[b] / (probs[a] + probs[b]))

    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained("model")
    assert share_of_b("start/model", "hint b\n\nsay: ") > 0.95
    assert share_of_b("start/model", "hint a\n\nsay: ") < 0.05
    before = share_of_b("start/model")
    assert 0.3 < before < 0.7
    run = valence.train(
        method="hindsight", model=model | {"name": "start/model"}, quiet=True,
        data=data | {"train": ["ask.jsonl"]}, reward="tests.training.online.rewards:names_b",
        teacher={"template": "{feedback}"}, rollout={"num_rollouts": 16, "max_new_tokens": 2},
        train={"batch_size": 1, "learning_rate": 3e-3, "max_steps": 20}, run={"dir": "end"},
    )  # fmt: skip
    assert share_of_b("end/model") > 0.9
    signals = [record["signal/size"] for record in run.history if "signal/size" in record]
    assert signals[-1] < signals[0]


# Settings


@pytest.mark.parametrize(("changes", "code", "where", "fix"), [
    ({"reward": "length"}, "setting-conflict", "teacher.context", "demonstration"),
    ({"rollout": {"num_rollouts": 1}, "teacher": {"context": "either"}}, "setting-conflict",
     "rollout.num_rollouts", "teacher.context: feedback"),
    ({"rollout": {"top_p": 0.9}}, "setting-conflict", "rollout.top_p", "rollout.top_p: 1"),
    ({"rollout": {"top_n": 2}}, "setting-no-effect", "rollout.top_n", "rejection"),
    ({"teacher": {"rate": 0.1}}, "setting-no-effect", "teacher.rate", "ema"),
    ({"teacher": {"weights": "live"}, "rollout": {"measure_kl": False},
      "reference": {"model": "x"}}, "setting-no-effect", "reference.model", "measure_kl"),
])  # fmt: skip
def test_settings_without_effect_and_conflicts(
    changes: dict[str, Any], code: str, where: str, fix: str, place: Path
) -> None:
    with raises_error(code, where=where, fix=fix):
        valence.train(hindsight(place, **changes))


def test_stored_rows_have_one_context(place: Path) -> None:
    settings = hindsight(place, teacher={"context": "either"})
    for name in ("reward", "rollout"):
        del settings[name]
    with raises_error("setting-conflict", where="teacher.context", fix="reward"):
        valence.train(settings)


def test_a_reward_that_says_nothing_stops_the_run(place: Path) -> None:
    reward = "tests.training.online.rewards:vowels"
    settings = hindsight(place, reward=reward, rollout={"max_resample": 1})
    with raises_error("nothing-to-learn", where="step 0", fix="teacher.context") as raised:
        train(settings)
    assert "24 without a text" in raised.error.message
