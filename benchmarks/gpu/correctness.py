"""python -m benchmarks.gpu.correctness: compute the figures of ``reference.json`` again.

Packed sequences of several thousand tokens, which fill many blocks of attention, are compared with
the model's own forward of one sequence at a time on the same device, and with log-probabilities and
gradients of a CPU in float64. Steps of KTO, DPO and GRPO are compared with the same steps in
float64. Weights and tokens come from a random generator that is the same in all versions.

Part A reads the figures from the file, so that a GPU does not wait for a CPU.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.head import head_of, oracle
from benchmarks.step.cases import Case, Shape
from benchmarks.step.inputs import MAX_LENGTH, config_of, draw_sets
from valence.batching.micro_batches import make_micro_batch
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS
from valence.models.build import build_policy, build_reference
from valence.models.head import HEAD_BACKENDS
from valence.models.policy_model import PolicyModel
from valence.training.step import Objective
from valence.types import MicroBatch, Origin, TokenizedCompletion, TokenizedExample

GROUPED = Shape(
    "7 heads to a key",
    vocabulary=512,
    hidden=256,
    intermediate=384,
    layers=2,
    heads=7,
    kv_heads=1,
    head_dim=64,
)
GROUPED_SMALL = replace(
    GROUPED, vocabulary=128, hidden=32, intermediate=48, head_dim=16, name="small"
)
"""For the simulated device."""
PROMPT_TOKENS, NUM_COMPLETIONS = 400, 8
BACKENDS = ("flex", "flash", "sdpa")
STEPS = {
    "kto": Case("kto check", "kto", prompts=8),
    "dpo": Case("dpo check", "dpo", prompts=4, answers=2),
    "grpo": Case("grpo check", "grpo", prompts=2, answers=4),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "kto": {"beta": 1.0},
    "dpo": {"beta": 1.0},
    "grpo": {"kl_weight": 1.0},
}
"""With a reference that differs from the policy, a weight of 1 lets every error change the loss."""
REFERENCE_NOISE = 0.05
"""Distance of the reference from the policy, relative to each weight's standard deviation."""
MICRO_BATCH_TOKENS = 1024
"""A step has several micro-batches, and KL pairs without a gradient."""
REFERENCE_FILE = Path(__file__).with_name("reference.json")
PACKED_LIMITS = {
    torch.float32: {
        "logp_rms": 2e-4, "logp_max": 1e-3, "grad": 1e-3,
        "cpu_logp_rms": 2e-4, "cpu_grad_norms": 1e-3,
    },
    torch.bfloat16: {
        "logp_rms": 0.02, "logp_max": 0.1, "grad": 0.05,
        "cpu_logp_rms": 0.03, "cpu_grad_norms": 0.01,
    },
}  # fmt: skip
STEP_LIMITS = {
    torch.float32: {"loss": 2e-3, "margins": 5e-3, "grad_norm": 2e-3},
    torch.bfloat16: {"loss": 0.05, "margins": 0.3, "grad_norm": 0.06},
}
"""Relative differences, except of the loss. A CPU in bfloat16 has a third of them."""
HEAD_LIMITS = {
    torch.float32: {"logp_max": 1e-4, "grad": 1e-4},
    torch.bfloat16: {"logp_max": 1e-3, "grad": 0.01},
}


def backends_for(dtype: torch.dtype) -> list[str]:
    """The attention backends to compare. FlashAttention does not compute float32."""
    return [name for name in BACKENDS if name != "flash" or dtype != torch.float32]


# ---------------------------------------------------------------- inputs


def long_examples(vocabulary: int) -> list[TokenizedExample]:
    """A prompt of 400 tokens with 8 completions of different lengths, and two separate sequences:
    2,900 tokens.
    """
    draw = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, vocabulary) for _ in range(count))

    def example(name: str, prompt: int, *completions: int) -> TokenizedExample:
        return TokenizedExample(
            id=name,
            origin=Origin("random", 1),
            kind="ranking" if len(completions) > 1 else "judgement",
            prompt_ids=ids(prompt),
            prompt_mask=(False,) * prompt,
            answers=tuple(
                TokenizedCompletion(ids(count), (True,) * count) for count in completions
            ),
            label=None if len(completions) > 1 else True,
            scores=(0.0,) * len(completions) if len(completions) > 1 else (),
        )

    lengths = [60 + 45 * k for k in range(NUM_COMPLETIONS)]
    return [
        example("group", PROMPT_TOKENS, *lengths),
        example("long", 130, 570),
        example("short", 3, 57),
    ]


def long_batch(vocabulary: int, device: torch.device) -> MicroBatch:
    """Return the micro-batch of ``long_examples``. Three sequences have no gradient, so that the
    passes with and without a gradient have different sizes.
    """
    batch = make_micro_batch(long_examples(vocabulary), device=device)
    is_measured = {1, NUM_COMPLETIONS - 1, NUM_COMPLETIONS + 1}
    return replace(batch, requires_grad=tuple(s not in is_measured for s in range(batch.sequences)))


def random_model(shape: Shape, *, noise: float = 0.0) -> Qwen3ForCausalLM:
    """Return a model in float32 whose weights are the same for all versions of the libraries.

    Its matrices are three times as large as those of a new model, whose attention is nearly
    uniform. noise: as for the reference.
    """
    model = Qwen3ForCausalLM(config_of(shape))
    stream, noise_stream = np.random.RandomState(0), np.random.RandomState(1)
    with torch.no_grad():
        for name, weights in sorted(model.named_parameters()):
            values = stream.standard_normal(weights.shape)
            values += noise * noise_stream.standard_normal(weights.shape)
            scaled = 0.06 * values if weights.ndim > 1 else 1 + 0.1 * values
            weights.copy_(torch.from_numpy(scaled))
            assert weights.is_contiguous(), name
    return model


def policy_of(shape: Shape, dtype: torch.dtype, device: torch.device) -> PolicyModel:
    return build_policy(random_model(shape).to(device), dtype=dtype)  # pyright: ignore[reportArgumentType]


def slopes(batch: MicroBatch) -> Tensor:
    """The gradient of each log-probability [T]."""
    return torch.from_numpy(np.random.RandomState(2).standard_normal(len(batch.tokens))).float()


# ---------------------------------------------------------------- packed sequences


@cache
def _one_by_one(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[PolicyModel, tuple[Tensor, dict[str, Tensor]]]:
    """A policy, and its values and gradients of one sequence at a time."""
    policy = policy_of(shape, dtype, device)
    return policy, _values_and_gradients(policy, shape, None)


def compare_packed(
    shape: Shape, dtype: torch.dtype, device: torch.device, backend: str
) -> dict[str, float]:
    """Compare a backend of packed attention with one sequence at a time and with a CPU.

    logp_rms, logp_max: root mean square and largest difference of the log-probabilities (nats).
    grad: difference of the gradient relative to its norm. cpu_logp_rms: that to the CPU.
    cpu_grad_norms: largest difference of the norm of a weight's gradient, relative to the norm of
    the complete gradient.
    """
    policy, (expected, expected_grads) = _one_by_one(shape, dtype, device)
    logps, grads = _values_and_gradients(policy, shape, backend)
    exact = expected_figures(shape)["packed"]
    difference = logps - expected
    exact_norm = torch.tensor(list(exact["grad_norms"].values())).norm()
    return {
        "logp_rms": rms(difference),
        "logp_max": difference.abs().max().item(),
        "grad": relative_distance(grads, expected_grads),
        "cpu_logp_rms": rms(logps - torch.tensor(exact["logps"])),
        "cpu_grad_norms": max(
            abs(grads[name].norm().item() - value) for name, value in exact["grad_norms"].items()
        )
        / exact_norm.item(),
    }


def _values_and_gradients(
    policy: PolicyModel, shape: Shape, backend: str | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of the scored tokens, and the gradient of their sum weighted by
    ``slopes``, by the name of the weight. backend: None for one sequence at a time.
    """
    batch = long_batch(shape.vocabulary, policy.device)
    before = policy.attention_backend
    try:
        policy.lay_out(packed=backend is not None, attention=backend or before)
        policy.zero_grad()
        policy.max_joint_rows = 0
        logp = policy(batch).logp
        (logp * slopes(batch).to(policy.device)).sum().backward()
        grads = {
            name.removeprefix("model."): p.grad.float().cpu()
            for name, p in policy.causal.named_parameters()
            if p.grad is not None
        }
        return logp[batch.loss_mask].detach().float().cpu(), grads
    finally:
        del policy.max_joint_rows
        policy.lay_out(packed=True, attention=before)
        policy.zero_grad()


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def relative_distance(grads: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the difference of two gradients, relative to that of the second."""
    error = torch.stack([(grads[name] - value).norm() for name, value in expected.items()]).norm()
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    return (error / norm).item()


# ---------------------------------------------------------------- steps


def compare_step(
    method: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Compare a step of a method with that of a CPU.

    loss: difference. margins: root mean square of the differences of log-ratios of the policy to
    the reference, and grad_norm: difference of the norm of the gradient; both relative.
    """
    expected = expected_figures(shape)
    figures = _step_figures(method, shape, dtype, device, expected["old_logps"])
    exact = expected[method]
    margins = torch.tensor(figures["margins"]), torch.tensor(exact["margins"])
    return {
        "loss": abs(figures["loss"] - exact["loss"]),
        "margins": rms(margins[0] - margins[1]) / rms(margins[1]),
        "grad_norm": abs(figures["grad_norm"] / exact["grad_norm"] - 1),
    }


def _step_figures(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, old_logps: Sequence[float]
) -> dict[str, Any]:
    """old_logps: those of GRPO's completions when they were sampled, one after the other."""
    models = [random_model(shape, noise=noise) for noise in (0.0, REFERENCE_NOISE)]
    if dtype == torch.float64:
        models = [model.double() for model in models]
    model, other = (model.to(device) for model in models)  # pyright: ignore[reportArgumentType]
    policy = build_policy(model, dtype=dtype)
    reference = build_reference(policy, fresh_adapter=False, model=other, name="noisy")
    method = METHODS[name]
    objective = Objective(
        method,
        method.resolve(SETTINGS[name]),
        policy,
        reference,
        SingleProcess(),
        MICRO_BATCH_TOKENS,
        MAX_LENGTH,
    )
    examples = _step_examples(name, shape)
    if name == "grpo":
        examples = _with_rollout_columns(examples, old_logps)
    result = objective.run(examples, backward=True, rows=True)
    grads = [p.grad.double().norm() for p in policy.parameters() if p.grad is not None]
    rows = sorted(result.rows, key=lambda row: (row.unit, row.side))
    return {
        "loss": result.loss.item(),
        "margins": [round((row.logp or 0.0) - (row.ref or 0.0), 6) for row in rows],
        "grad_norm": torch.stack(grads).norm().item(),
    }


def _step_examples(name: str, shape: Shape) -> list[TokenizedExample]:
    return draw_sets(replace(STEPS[name], shape=shape), 1)[0]


def _with_rollout_columns(
    examples: list[TokenizedExample], old_logps: Sequence[float]
) -> list[TokenizedExample]:
    """Add advantages, and log-probabilities near ``old_logps``, so that no ratio is at the bounds
    of the clipping.
    """
    draw, logps = random.Random(0), iter(old_logps)

    def with_columns(answer: TokenizedCompletion) -> TokenizedCompletion:
        old = tuple(next(logps) + draw.gauss(0, 0.03) for _ in answer.ids)
        advantage = draw.uniform(0.5, 1.5)
        columns = (("old", old), ("adv", (advantage,) * len(old)))
        return replace(answer, columns=columns)

    return [
        replace(example, answers=tuple(map(with_columns, example.answers))) for example in examples
    ]


# ---------------------------------------------------------------- head


def compare_head(
    backend: str, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Compare a backend of the head with float64 on the same rounded operands.

    logp_max: largest difference of a log-probability (nats). grad: difference of the gradient of
    the hidden states relative to its norm. Raises RuntimeError if the backend does not run here.
    """
    torch.manual_seed(0)
    hidden = torch.randn(rows, shape.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(shape.vocabulary, shape.hidden, device=device) * 2.4 / shape.hidden**0.5
    weight = weight.to(dtype)
    target = torch.randint(0, shape.vocabulary, (rows,), device=device)
    grad = torch.randn(rows, device=device)
    head = head_of(backend, weight)
    if reason := HEAD_BACKENDS[backend].unsupported(head, hidden):
        raise RuntimeError(reason)
    logps = head(hidden, target)[0]
    logps.backward(grad.to(logps.dtype))
    assert hidden.grad is not None
    exact_logps, exact_grad = oracle(hidden, weight, target, grad)
    return {
        "logp_max": (logps.detach().double() - exact_logps).abs().max().item(),
        "grad": ((hidden.grad.double() - exact_grad).norm() / exact_grad.norm()).item(),
    }


# ---------------------------------------------------------------- figures of a CPU


def expected_figures(shape: Shape) -> Mapping[str, Any]:
    """Return the figures of ``reference.json`` for a model."""
    return _reference()[shape.name]


@cache
def _reference() -> dict[str, Any]:
    return json.loads(REFERENCE_FILE.read_text(encoding="utf-8"))


def compute_figures(shape: Shape) -> dict[str, Any]:
    """Compute the expected figures of a model in float64, on the CPU."""
    model = random_model(shape).double()
    batch, host = long_batch(shape.vocabulary, torch.device("cpu")), torch.device("cpu")
    logps = torch.zeros(len(batch.tokens), dtype=torch.float64)
    examples = long_examples(shape.vocabulary)
    weights = slopes(batch)
    for s in range(batch.sequences):
        rows = torch.nonzero(batch.loss_mask & (batch.sequence_ids == s)).squeeze(1)
        example = examples[int(batch.unit[s])]
        values = completion_logps(model, example, int(batch.side[s]))
        if batch.requires_grad[s]:
            (values * weights[rows]).sum().backward()
        logps[rows] = values.detach()
    norms = {
        name.removeprefix("model."): round(p.grad.norm().item(), 6)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    old_logps = [
        round(value, 5)
        for example in _step_examples("grpo", shape)
        for side in range(len(example.answers))
        for value in completion_logps(model, example, side).tolist()
    ]
    return {
        "packed": {
            "logps": [round(value, 5) for value in logps[batch.loss_mask].tolist()],
            "grad_norms": norms,
        },
        "old_logps": old_logps,
        **{name: _step_figures(name, shape, torch.float64, host, old_logps) for name in STEPS},
    }


def completion_logps(model: Qwen3ForCausalLM, example: TokenizedExample, side: int) -> Tensor:
    """Return the log-probability of each token of a completion, by the model's own forward."""
    prompt, answer = example.prompt_ids, example.answers[side].ids
    tokens = torch.tensor([*prompt, *answer])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, tokens[len(prompt) :, None]).squeeze(1)


if __name__ == "__main__":
    figures = {shape.name: compute_figures(shape) for shape in (GROUPED, GROUPED_SMALL)}
    REFERENCE_FILE.write_text(json.dumps(figures) + "\n", encoding="utf-8")
