"""The step of a case in Valence, with the formulas of HALOs, and in TRL, which runs in a separate
process and environment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from benchmarks.parity.cases import Case, change
from benchmarks.parity.halos_formulas import HalosStep, halos
from benchmarks.parity.hindsight_formula import hindsight
from benchmarks.parity.inputs import Inputs, as_kind, shortened
from benchmarks.peers import peer_environment
from valence.batching.micro_batches import make_micro_batch
from valence.distributed.process_group import SingleProcess
from valence.methods import METHODS, ONLINE
from valence.methods.sample_builders import RolloutGroup
from valence.models.build import build_policy, build_reference, load_model
from valence.models.policy_model import PolicyModel
from valence.models.reference import Reference
from valence.training.metrics import Meter
from valence.training.step import Objective
from valence.types import Completion, Mean, TokenizedExample

Figures = Mapping[str, float]
BUDGET = 400
"""Tokens of a micro-batch of Valence: few, so that its step has several and TRL's one."""


def folders(case: Case, inputs: Inputs) -> tuple[Path, Path]:
    """Folders of the policy and of the reference."""
    return (inputs.second, inputs.first) if case.swapped else (inputs.first, inputs.second)


def source_rows(case: Case, inputs: Inputs) -> tuple[TokenizedExample, ...]:
    """The rows that the other side reads."""
    rows = inputs.rows(case.source)
    if case.partial:
        rows = tuple(replace(row, teacher_ids=()) if i % 2 else row for i, row in enumerate(rows))
    return shortened(rows) if case.short else rows


def precision(case: Case) -> torch.dtype:
    """Dtype of the weights and of the computation on both sides."""
    return torch.float64 if case.double else torch.float32


def max_length(units: Sequence[TokenizedExample]) -> int:
    """Length of the longest row, so that only mismatched completions are truncated."""
    return max(len(unit.prompt_ids) + len(answer.ids) for unit in units for answer in unit.answers)


class LocalSides:
    """Runs Valence and the formulas of HALOs in this process.

    Models are loaded once, because no case changes a weight.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.engines = cache(self._engines)
        self.plain = cache(self._plain)

    def _engines(
        self, policy: Path, reference: Path, dtype: torch.dtype
    ) -> tuple[PolicyModel, Reference]:
        engine = build_policy(load_model(str(policy), dtype=dtype), dtype=dtype)
        other = load_model(str(reference), dtype=dtype)
        return engine, build_reference(engine, fresh_adapter=False, model=other, name="second")

    def _plain(
        self, policy: Path, reference: Path, dtype: torch.dtype
    ) -> tuple[nn.Module, nn.Module]:
        """Load both models without a PolicyModel, which would replace the attention."""
        first, second = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            for folder in (policy, reference)
        )
        return first.eval(), second.eval()

    def ours(self, case: Case) -> Figures:
        """A step of Valence without an update, computed as in training."""
        method = (ONLINE if case.is_sampled else METHODS)[case.method]
        source = source_rows(case, self.inputs)
        if method.sample_builder is None:
            units = as_kind(source, method.kind)
        else:
            rollout = SimpleNamespace(mask_truncated=False)
            groups = [self.group(case, row) for row in source]
            units = method.sample_builder(groups, rollout, method.resolve(case.ours))
        if method.loss.needs_teacher:  # rows without feedback are left out before a step
            units = tuple(unit for unit in units if unit.teacher_ids)
        policy, other = self.engines(*folders(case, self.inputs), precision(case))
        policy.zero_grad()
        reference = other if method.asks_reference else None
        objective = Objective(
            method,
            method.resolve(case.ours),
            policy,
            reference,
            SingleProcess(),
            BUDGET,
            max_length(source),
        )
        for _ in range(case.steps - 1):
            objective.update_statistics(objective.run(units, backward=False))
        outcome = objective.run(units, backward=True)
        meter = Meter()
        meter.pool(outcome.metrics)
        meter.add({"loss": Mean(outcome.loss, torch.ones(()))})
        return meter.reduce(objective.group) | {"grad_norm": grad_norm(policy)}

    @torch.no_grad()
    def group(self, case: Case, row: TokenizedExample) -> RolloutGroup:
        """A ranking as completions that the policy has sampled, before it has changed."""
        policy, reference = self.engines(*folders(case, self.inputs), precision(case))
        columns: list[dict[str, tuple[float, ...]]] = []
        for answer in row.answers:
            unit = replace(row, kind="demonstration", answers=(answer,), scores=())
            batch = make_micro_batch([unit])
            now, ref = policy(batch).logp[batch.scored], reference(batch)[batch.scored]
            by = torch.tensor(change(answer.ids) if case.stale else 0.0).to(now)
            columns.append({"old": tuple((now - by).tolist()), "ref": tuple(ref.tolist())})
        completions = (
            Completion(row.id, answer.ids, (), "", "eos", index=i)
            for i, answer in enumerate(row.answers)
        )
        return RolloutGroup(row, tuple(completions), row.scores, tuple(columns))

    def formulas(self, case: Case) -> Figures:
        """The same step with the formulas of HALOs, or of the paper of hindsight."""
        rows = source_rows(case, self.inputs)
        policy, reference = self.plain(*folders(case, self.inputs), precision(case))
        if case.peer == "paper":
            return hindsight(policy, rows, **case.theirs) | {"grad_norm": grad_norm(policy)}
        figures = halos(
            HalosStep(policy, reference, case.theirs, max_length(rows)), rows, case.batch
        )
        return figures | {"grad_norm": grad_norm(policy)}


def grad_norm(model: nn.Module) -> float:
    """Norm of the gradient over all weights."""
    return torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    ).item()


@dataclass(frozen=True)
class TrlResults:
    """TRL's figures of every case, and the versions of the libraries."""

    versions: Mapping[str, str]
    figures: tuple[Figures, ...]


def run_trl(cases: Sequence[Case], python: Path, inputs: Inputs, scratch: Path) -> TrlResults:
    """Run cases with TRL. Raises RuntimeError if TRL fails or trains on different tokens."""
    jobs = [trl_job(case, inputs) for case in cases]
    job, results = scratch / "job.json", scratch / "results.json"
    job.write_text(json.dumps(jobs))
    script = Path(__file__).with_name("trl_side.py")
    command = [str(python), str(script), str(job), str(results)]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, env=peer_environment()
    )
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr[-4000:]}")
    output = json.loads(results.read_text())
    for case, job, case_results in zip(cases, jobs, output["cases"], strict=True):
        _check_tokens(case, job, case_results["rows"])
    return TrlResults(
        output["versions"], tuple(case_results["figures"] for case_results in output["cases"])
    )


def trl_job(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The input of trl_side.py for a case."""
    units = source_rows(case, inputs)
    policy, reference = folders(case, inputs)
    return {
        "trainer": case.trainer,
        "config": dict(case.theirs),
        "rows": [trl_row(unit) for unit in units],
        "batch": case.batch,
        "policy": str(policy),
        "reference": str(reference),
        "max_length": max_length(units),
        "eos": inputs.eos,
        "double": case.double,
        "stale": case.stale,
    }


def trl_row(unit: TokenizedExample) -> dict[str, Any]:
    """A row in the format of TRL. Raises RuntimeError if its mask is not TRL's."""
    if not all(all(answer.mask) for answer in unit.answers) or any(unit.prompt_mask):
        raise RuntimeError(
            f"{unit.origin}: TRL trains on all of a completion and nothing of a prompt"
        )
    if unit.kind == "feedback":
        feedback = unit.teacher_ids[len(unit.prompt_ids) :]
        [answer] = unit.answers
        return {
            "prompt": list(unit.prompt_ids),
            "completion": list(answer.ids),
            "feedback": list(feedback),
        }
    if unit.kind == "ranking":
        answers = [list(answer.ids) for answer in unit.answers]
        return {
            "prompt": list(unit.prompt_ids),
            "completions": answers,
            "rewards": list(unit.scores),
            "changes": [change(ids) for ids in answers],
        }
    names = ("chosen", "rejected") if unit.kind == "preference" else ("completion",)
    texts = {name: list(answer.ids) for name, answer in zip(names, unit.answers, strict=True)}
    return (
        {"prompt": list(unit.prompt_ids)}
        | texts
        | ({} if unit.label is None else {"label": unit.label})
    )


def _check_tokens(
    case: Case, job: Mapping[str, Any], prepared_rows: Sequence[Mapping[str, Any]]
) -> None:
    """Raise RuntimeError unless TRL's prepared rows have the tokens of the job."""
    if case.is_sampled:  # in an order at random
        expected = [(row["prompt"], ids) for row in job["rows"] for ids in row["completions"]]
        rows = [(row["prompt_ids"], row["completion_ids"]) for row in prepared_rows]
        if sorted(expected) != sorted(rows):
            raise RuntimeError(f"{case.name}: TRL trains on other completions than it was given")
        return
    for row, prepared in zip(job["rows"], prepared_rows, strict=True):
        if case.trainer == "sft":
            same = prepared["input_ids"] == row["prompt"] + row["completion"]
        elif case.trainer == "sdpo":
            same = prepared == {
                "prompt_ids": row["prompt"],
                "completion_ids": row["completion"],
                "teacher_ids": row["prompt"] + row["feedback"] + row["completion"],
            }
        elif case.trainer in ("cpo", "orpo"):
            same = all(
                prepared[f"{side}_input_ids"] == row["prompt"] + row[side]
                for side in ("chosen", "rejected")
            )
        else:
            same = all(prepared[f"{name}_ids"] == row[name] for name in row if name != "label")
        if not same:
            raise RuntimeError(f"{case.name}: TRL prepared other tokens than it was given")
