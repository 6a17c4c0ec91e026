"""Advice on a run names only what its method accepts."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.reports.synthetic import AUDIT
from tests.reports.test_signs import Json, ended, healthy, logged
from valence.methods import METHODS, ONLINE, WITHOUT_REWARD, Method
from valence.reports.diagnostics import Advice, CollapseDetector, diagnose
from valence.reports.run_record import RunRecord

__all__ = ["healthy"]

LONG = {"train": {**AUDIT["train"], "truncation": {"rows": 9, "too_long": 9, "max_length": 8}}}


def lengths(run: RunRecord) -> RunRecord:
    """Longer answers gain, of both classes; preferred ones are longer."""
    rng = random.Random(0)

    def change(row: Json) -> Json:
        changes: Json = {}
        for side in ("_chosen", "_rejected") if "tokens_chosen" in row else ("",):
            is_preferred = row["label"] if side == "" else side == "_chosen"
            tokens = int(rng.gauss(60 if is_preferred else 40, 10))
            changes |= {
                f"tokens{side}": tokens,
                f"reward{side}": (tokens - 50) / 20 + rng.gauss(0, 0.1),
                f"logp{side}": -1.4 * tokens,
            }
        return changes

    return ended(run, change)


def rarer(row: Json) -> Json:
    side = "_chosen" if "tokens_chosen" in row else ""
    return {f"logp{side}": row[f"logp{side}"] - 0.3 * row[f"tokens{side}"]}


def overfits(record: Json, at: float) -> Json:
    held_out = {"eval/loss": 0.5 - 0.2 * at + 0.3 * at * at} if "eval/loss" in record else {}
    return {"loss": 0.5 - 0.4 * at} | held_out


Change = Callable[[RunRecord], RunRecord]
OFFLINE: dict[str, Change] = {
    "not finite": lambda run: logged(run, lambda _, at: {"loss": "nan"} if at > 0.5 else {}),
    "skipped": lambda run: logged(run, lambda *_: {"skipped": 1.0}),
    "drift": lambda run: logged(run, lambda _, at: {"kl/raw": 200 * at}),
    "overfits": lambda run: logged(run, overfits),
    "too long": lambda run: replace(run, audit={**AUDIT, **LONG}),
    "rarer": lambda run: ended(run, rarer),
    "length": lengths,
}
PAIRS = OFFLINE | {
    "training accuracy stuck at 1": lambda run: logged(
        run, lambda _, at: {"rewards/accuracies": 1.0, "rewards/margins": 4 * at}
    ),
}
THUMBS = OFFLINE | {
    "one class": lambda run: ended(
        run, lambda row: {"reward": 0.02 * row["reward"]} if row["label"] else {}
    ),
}
ROUNDS: dict[str, Change] = {
    "length": lambda run: logged(
        replace(run, first=None, last=None), lambda _, at: {"rollout/length": 30 * (1 + at)}
    ),
    "divergence": lambda run: logged(run, lambda _, at: {"kl": 25 * at * at}),
    "cut off": lambda run: logged(run, lambda _, at: {"rollout/truncated": 0.4 * at}),
    "failed": lambda run: logged(run, lambda *_: {"rollout/failed": 0.2}),
    "tied": lambda run: logged(run, lambda *_: {"rollout/tied": 0.7}),
    "high kl": lambda run: logged(run, lambda *_: {"kl": 90.0}),
    "repetitive": lambda run: logged(run, lambda *_: {"rollout/distinct_4grams": 0.2}),
    "no gradient": lambda run: logged(run, lambda *_: {"grad_norm": 0.0}),
    "saturated reward": lambda run: logged(
        run, lambda *_: {"rollout/tied": 1, "reward/mean": 1, "reward/max": 1, "reward/min": 0}
    ),
}
CASES: dict[str, tuple[str, dict[str, Change], list[Method]]] = {
    "thumbs": ("thumbs", THUMBS, [m for m in METHODS.values() if m.kind == "judgement"]),
    "pairs": ("pairs", PAIRS, [m for m in METHODS.values() if m.kind == "preference"]),
    "online": ("own", ROUNDS, [m for m in ONLINE.values() if m.name not in WITHOUT_REWARD]),
}


def names_in(advice: str) -> tuple[set[str], set[str]]:
    """The settings of the loss, and the methods, that an advice names."""
    words = set(re.findall(r"[\w.]+\w", advice))
    return {word for word in words if word.startswith("loss.")}, words & {*METHODS, *ONLINE}


@pytest.mark.parametrize("case", CASES)
def test_advice_names_what_the_method_accepts(case: str, healthy: dict[str, RunRecord]) -> None:
    kind, changes, methods = CASES[case]
    assert len(methods) >= 4
    for name, change in changes.items():
        for method in methods:
            settings: dict[str, Any] = {
                setting: 0.1 if setting == "beta" else info.default
                for setting, info in method.settings.model_fields.items()
            }
            if name == "drift" and "beta" not in settings:
                continue
            config = {**healthy[kind].config, "method": method.name, "loss": settings}
            results = {d.name: d for d in diagnose(change(replace(healthy[kind], config=config)))}
            assert name in results, (method.name, list(results))
            advice = results[name].advice
            advised, others = names_in(advice)
            assert advised <= {f"loss.{setting}" for setting in settings}, (method.name, advice)
            table = ONLINE if method.online else METHODS
            assert others <= {other for other in table if table[other].kind == method.kind}
            assert method.name not in others


def test_thumbs_are_not_advised_to_use_a_loss_of_pairs(healthy: dict[str, RunRecord]) -> None:
    for name in ("length", "rarer"):
        (diagnosis,) = diagnose(OFFLINE[name](healthy["thumbs"]))
        assert names_in(diagnosis.advice)[1] == set()
    (diagnosis,) = diagnose(OFFLINE["length"](healthy["pairs"]))
    assert {"dpo_norm", "simpo"} <= names_in(diagnosis.advice)[1]


def test_a_detector_restores_its_state_and_not_its_advice() -> None:
    detector = CollapseDetector(Advice("grpo", ["kl_weight"]))
    other = CollapseDetector(Advice("online_dpo", ["beta"]))
    other.load_state_dict(detector.state_dict())
    records = [
        {"step": step, "kl": 40.0, "rollout/length": 30.0, "grad_norm": 1.0} for step in range(9)
    ]
    (diagnosis,) = [sign for record in records for sign in other.observe(record)]
    assert names_in(diagnosis.advice)[0] == {"loss.beta"}
