"""What a run will take, before it runs: steps, tokens, memory."""

from __future__ import annotations

from valence.engine.memory import Memory, predict, skeleton
from valence.engine.models import DTYPES
from valence.training.setup import Prepared, check_vocabulary


def describe_plan(prepared: Prepared) -> list[str]:
    """Lines to print: optimizer steps, tokens per epoch, trained weights, and the memory they are predicted to need.

    Raises UserError when the tokenizer is larger than the model.
    """
    recipe, method = prepared.recipe, prepared.method
    spec = recipe.model
    units = prepared.corpora["train"].units
    per_epoch = prepared.sampler.steps_per_epoch
    mismatched = " and as many mismatched ones, measured only," if method.mismatches else ""
    model = skeleton(spec.name, trust_remote_code=spec.trust_remote_code, gguf_file=spec.gguf_file)
    check_vocabulary(model, prepared.tokenizer)
    tokens = max(unit.tokens for unit in units)
    memory = predict(
        model,
        width=DTYPES[spec.dtype].itemsize,
        lora=spec.lora,
        adapter=spec.adapter,
        tokens=max(tokens, min(recipe.train.micro_batch_tokens, sum(unit.tokens for unit in units))),
        frozen_copy=method.needs_reference and (spec.lora is None or recipe.reference.model is not None),
        checkpointing=recipe.train.checkpointing,
    )
    lines = [
        f"steps: {prepared.total_steps} ({per_epoch} per epoch of {len(units)} {method.kind}s)",
        f"tokens: {sum(unit.tokens for unit in units):,}{mismatched} per epoch",
        f"weights: {memory.parameters:,}, {_trained(memory)}",
        f"memory: about {_gigabytes(memory.total)} "
        f"(program {_gigabytes(memory.program)}, weights {_gigabytes(memory.weights)}, reference {_gigabytes(memory.reference)}, "
        f"gradient and optimizer {_gigabytes(memory.optimizer)}, activations {_gigabytes(memory.activations)})",
    ]
    if tokens > recipe.train.micro_batch_tokens:
        lines.append(f"the largest row has {tokens} tokens, more than train.micro_batch_tokens: such rows run alone")
    if prepared.ends_early:
        lines.append(prepared.ends_early)
    return lines


def _trained(memory: Memory) -> str:
    return "all of which train" if memory.trained == memory.parameters else f"of which {memory.trained:,} train"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
