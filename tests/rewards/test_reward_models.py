"""Reward models as rewards: their scores for chats and text, with and without attributes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import normalizers
from transformers import AutoConfig, AutoModelForSequenceClassification

from tests.errors import raises_error
from tests.rewards.kit import answer, entry, has_words, scores, values
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from valence.rewards import reward_of
from valence.rewards.cache import cache_key
from valence.rewards.combine import Combined
from valence.training.reward_models import reward_model
from valence.types import Completion


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes a reward model with these attributes into the folder judge, and gives it."""
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), dtype=torch.float32, seed=0).save_pretrained("model")  # type: ignore[operator]
    tokenizer.save_pretrained("model")

    def save_judge(*names: str, normalised: bool = True) -> Any:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(
            "model", num_labels=len(names), id2label=dict(enumerate(names))
        )
        if normalised:
            config.update({"reward_mean": [0.5] * len(names), "reward_std": [2.0] * len(names)})
        model: Any = AutoModelForSequenceClassification.from_config(config)
        model.save_pretrained("judge")
        tokenizer.save_pretrained("judge")
        return model.eval()

    return save_judge


def of(
    target: str = "judge", *, cache: Path | None = None, batch_size: int = 64, **settings: Any
) -> Combined:
    return reward_of(
        [entry(target, settings=settings, batch_size=batch_size)], model=reward_model, cache=cache
    )


TURNS = ({"role": "user", "content": "What is the capital of France?"},)
COMPLETIONS = [
    answer(" Paris", "The capital is"),
    answer("It is Paris.", TURNS),
    answer(" Lyon or so", "The capital is"),
]


def expected(
    model: Any, value: Sequence[Completion] = COMPLETIONS, *, as_chat: bool = True
) -> torch.Tensor:
    """[answers, attributes], by the library alone. as_chat: a text prompt is a user message, as the
    tokenizer has a template.
    """
    tokenizer: Any = tiny_tokenizer()
    results: list[torch.Tensor] = []
    for item in value:
        if isinstance(item.prompt, str) and not as_chat:
            ids = [
                *tokenizer(item.prompt).input_ids,
                *tokenizer(item.text).input_ids,
                tokenizer.eos_token_id,
            ]
        else:
            request = (
                [{"role": "user", "content": item.prompt}]
                if isinstance(item.prompt, str)
                else item.prompt
            )
            turns = [*request, {"role": "assistant", "content": item.text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False).rstrip("\n")
            ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            results.append(model(torch.tensor([ids])).logits[0])
    return torch.stack(results).double()


def test_its_scores_are_those_of_the_library(judge: Callable[..., Any], tmp_path: Path) -> None:
    model = judge("reward")
    wanted = expected(model)[:, 0].tolist()
    cached = of(cache=tmp_path / "kept")
    assert values(cached, COMPLETIONS) == pytest.approx(wanted, abs=1e-4)
    assert values(of(batch_size=1, tokens=1), COMPLETIONS) == pytest.approx(wanted, abs=1e-4)
    as_text = expected(model, as_chat=False)[:, 0].tolist()
    assert values(of(as_chat=False), COMPLETIONS) == pytest.approx(as_text, abs=1e-4)
    assert values(of(normalised=True), COMPLETIONS) == pytest.approx(
        [(value - 0.5) / 2 for value in wanted], abs=1e-4
    )
    assert cached.deterministic
    again: Any = of(cache=tmp_path / "kept").parts[0].reward
    assert values(again, COMPLETIONS) == values(cached, COMPLETIONS)
    assert again.misses == 0
    judge("reward")
    with torch.no_grad():
        model.score.weight.add_(0.1)
    model.save_pretrained("judge")
    other: Any = of(cache=tmp_path / "kept").parts[0].reward
    assert values(other, COMPLETIONS) == pytest.approx(expected(model)[:, 0].tolist(), abs=1e-4)
    assert other.misses == 3  # other weights, other scores


def test_the_tools_of_a_prompt_are_read(judge: Callable[..., Any]) -> None:
    """As in the rows that it was trained on, and where scores are kept."""
    judge("reward")
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + tokenizer.chat_template
    )
    tokenizer.save_pretrained("judge")
    plain = answer("It is Paris.", TURNS)
    armed = replace(plain, tools=({"name": "clock and map"},))
    one, other = values(of(), [plain, armed])
    assert one != pytest.approx(other, abs=1e-6)
    assert cache_key(plain) != cache_key(armed)


def test_attributes_are_chosen_or_weighted_and_kept_as_parts(judge: Callable[..., Any]) -> None:
    wanted = expected(judge("clear", "kind"))
    assert values(of(attribute="kind"), COMPLETIONS) == pytest.approx(
        wanted[:, 1].tolist(), abs=1e-4
    )
    result = scores(of(attribute={"clear": 2.0, "kind": -1.0}), COMPLETIONS)
    assert [score.value for score in result] == pytest.approx(
        (2 * wanted[:, 0] - wanted[:, 1]).tolist(), abs=1e-4
    )
    assert result[0].parts["judge/clear"] == pytest.approx(wanted[0, 0].item(), abs=1e-4)


def test_what_it_cannot_read_is_an_error(judge: Callable[..., Any]) -> None:
    judge("reward")
    result = scores(of(max_length=24), [*COMPLETIONS, answer(" word" * 50, "x")])
    assert result[0].value is not None
    assert result[3].value is None
    assert has_words(result[3].error, 24)


def test_an_answer_that_ended_at_once_has_a_score(judge: Callable[..., Any]) -> None:
    """That of its end: else nothing would teach a model not to end so."""
    empty = [answer("", TURNS), answer("", "The capital is")]
    model = judge("reward")
    assert values(of(), empty) == pytest.approx(expected(model, empty)[:, 0].tolist(), abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*packed sequences")
def test_a_score_that_is_not_finite_is_an_error(judge: Callable[..., Any]) -> None:
    model = judge("reward")
    with torch.no_grad():
        model.score.weight.fill_(3e38)
    model.save_pretrained("judge")
    assert values(of(), COMPLETIONS) == [None] * 3


@pytest.mark.parametrize(
    ("target", "settings", "code", "where", "words"),
    [
        ("model", {}, "reward-not-a-reward-model", "reward.0.reward: model", []),
        ("judge", {"atribute": "x"}, "reward-setting-unknown", "reward.0.settings.atribute", []),
        ("judge", {"max_length": "x"}, "reward-setting-value", "reward.0.settings.max_length", []),
        (
            "judge",
            {"attribute": "honest"},
            "reward-attribute",
            "reward.0.settings.attribute",
            ["clear, kind", "honest"],
        ),
        ("judge", {}, "reward-attribute", "reward.0.settings.attribute", ["clear, kind"]),
        (
            "judge",
            {"attribute": "kind", "normalised": True},
            "reward-not-normalised",
            "reward.0.settings.normalised",
            [],
        ),
        ("nobody/nothing", {}, "model-not-found", "reward.0.reward: nobody/nothing", []),
    ],
)
def test_what_is_no_reward_model_is_a_mistake(
    target: str,
    settings: dict[str, Any],
    code: str,
    where: str,
    words: list[str],
    judge: Callable[..., Any],
) -> None:
    judge("clear", "kind", normalised=False)
    with raises_error(code, where=where) as raised:
        of(target, **settings)
    assert has_words(str(raised.error), *words)


@pytest.mark.parametrize("change", ["normalizer", "chat template"])
def test_scores_of_another_tokenizer_or_template_are_not_reused(
    judge: Callable[..., Any], tmp_path: Path, change: str
) -> None:
    judge("quality")
    before = values(of(cache=tmp_path / "kept"), COMPLETIONS)
    tokenizer: Any = tiny_tokenizer()
    if change == "normalizer":
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    else:
        tokenizer.chat_template = "A" + tokenizer.chat_template
    tokenizer.save_pretrained("judge")
    after = values(of(cache=tmp_path / "kept"), COMPLETIONS)
    assert after == values(of(), COMPLETIONS)
    assert after != before
