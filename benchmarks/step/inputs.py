"""The inputs of both sides: models in folders, and rows as tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from benchmarks.step.cases import Case, Lengths, Shape
from valence.types import Kind, Origin, TokenizedCompletion, TokenizedExample

KINDS: dict[str, Kind] = {
    "kto": "judgement",
    "dpo": "preference",
    "sft": "demonstration",
    "distill": "demonstration",
    "bradley_terry": "preference",
    "grpo": "ranking",
}
PAD, EOS = 0, 2
LONGEST_PROMPT, LONGEST_COMPLETION = 2048, 512
MAX_LENGTH = LONGEST_PROMPT + LONGEST_COMPLETION
"""No sequence is truncated, not even one with a mismatched completion."""


@dataclass(frozen=True)
class Models:
    """Folders of a policy, of a reference near it, of a reward model, and of an adapter for the
    policy if the case trains one.
    """

    shape: Shape
    policy: Path
    reference: Path
    scorer: Path
    adapter: Path | None = None

    def trained(self, case: Case) -> Path:
        """Folder of the model that the case trains."""
        return self.scorer if case.is_reward_model else self.policy


def config_of(shape: Shape) -> Qwen3Config:
    """Configuration of a Qwen3 language model or reward model."""
    return Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
        num_labels=1,  # pyright: ignore[reportCallIssue]
    )


def save_models(
    shape: Shape, folder: Path, *, lora: bool, scale: float = 1.0, noise: float = 0.05
) -> Models:
    """Save random weights, rounded to bfloat16, so that they are equal in every precision.

    scale: factor of all matrices. noise: distance of the reference from the policy, relative to
    each matrix's standard deviation. With 0.05, hardly any token is near the bounds of GRPO's
    clipping, where the rounding of bfloat16 logits would decide.
    """
    torch.manual_seed(0)
    config = config_of(shape)
    model = Qwen3ForCausalLM(config).bfloat16()
    matrices = [weights for weights in model.parameters() if weights.ndim > 1]
    models = Models(
        shape,
        *(folder / name for name in ("policy", "reference", "scorer")),
        folder / "adapter" if lora else None,  # pyright: ignore[reportCallIssue]
    )
    Qwen3ForSequenceClassification(config).bfloat16().save_pretrained(models.scorer)
    with torch.no_grad():
        for weights in matrices:
            weights.mul_(scale)
        model.save_pretrained(models.policy)
        initial_state = {name: value.clone() for name, value in model.state_dict().items()}
        for weights in matrices:
            weights += noise * weights.std() * torch.randn_like(weights)
        model.save_pretrained(models.reference)
    model.load_state_dict(initial_state)
    if models.adapter:
        _save_adapter(model, models)
    return models


def _save_adapter(model: Qwen3ForCausalLM, models: Models) -> None:
    from peft import LoraConfig, get_peft_model

    model.name_or_path = model.config.name_or_path = str(models.policy)
    random_both = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    get_peft_model(model, random_both).save_pretrained(str(models.adapter))


def draw_sets(case: Case, sets: int) -> list[list[TokenizedExample]]:
    """The rows of ``sets`` steps, the same at every call.

    Their lengths are evenly spaced quantiles in random order: few rows stand for the whole
    distribution.
    """
    rng = random.Random(case.name)
    prompts = _lengths(case.prompt, sets * case.prompts, LONGEST_PROMPT, rng)
    answers = _lengths(case.completion, sets * case.prompts * case.answers, LONGEST_COMPLETION, rng)

    def unit(number: int) -> TokenizedExample:
        return _unit(case, number, prompts.pop(), [answers.pop() for _ in range(case.answers)], rng)

    return [[unit(step * case.prompts + i) for i in range(case.prompts)] for step in range(sets)]


def _lengths(spread: Lengths, count: int, longest: int, rng: random.Random) -> list[int]:
    normal = NormalDist(
        math.log(spread.median), math.log(spread.p95 / spread.median) / NormalDist().inv_cdf(0.95)
    )
    lengths = [
        min(longest, max(2, round(math.exp(normal.inv_cdf((i + 0.5) / count)))))
        for i in range(count)
    ]
    rng.shuffle(lengths)
    return lengths


def _unit(
    case: Case, number: int, prompt: int, answers: list[int], rng: random.Random
) -> TokenizedExample:
    """One prompt with its answers, each of which ends with EOS.

    A ranking's scores are its answers' advantages.
    """

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, case.shape.vocabulary) for _ in range(count))

    return TokenizedExample(
        id=f"{case.name} {number}",
        origin=Origin("made", number + 1),
        kind=KINDS[case.method],
        prompt_ids=ids(prompt),
        prompt_mask=(False,) * prompt,
        answers=tuple(
            TokenizedCompletion((*ids(length - 1), EOS), (True,) * length) for length in answers
        ),
        label=number % 2 == 0 if case.method == "kto" else None,
        # All advantages have one sign. Otherwise the loss is a small difference of large numbers,
        # and rounding looks like a disagreement of the sides.
        scores=tuple((1.5, 0.5)[(number + k) % 2] for k in range(len(answers)))
        if case.method == "grpo"
        else (),
    )


def padded_tokens(units: list[TokenizedExample]) -> int:
    """Number of tokens of a batch of these rows, padded to the longest."""
    lengths = [len(unit.prompt_ids) + len(answer.ids) for unit in units for answer in unit.answers]
    return len(lengths) * max(lengths)
