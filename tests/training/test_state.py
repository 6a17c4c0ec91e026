"""All state that changes during training is saved, or has no effect."""

from __future__ import annotations

import copy
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.errors import raises_error
from tests.training.test_mix import PAIRS, SHOWN, run_of, written
from tests.training.walk import walk
from valence.training.callbacks import Callbacks
from valence.training.state_files import Registry, Snapshot, StateFunctions, load
from valence.training.trainer import Trainer

NOT_STATE = {
    r"\._?stop\b": "what asked this process to end",
    r"\._(base|reference)_digest$": "a digest, found when it is first needed",
    r"\.saver\.saved\b": "where the newest checkpoint of this folder stands",
    r"\.is_consistent$|\.state_before_skips$": "true and empty between steps",
    r"\._noted\.members": "what this process has printed",
    r"_orders\b": "the order of an epoch, computed when it is needed",
    r"\.(hits|misses|_trusted)\b": "what this process found in its cache",
    r"\.store\b|\._digest$": "a cache that is a folder of its own",
    r"budget$": "of an objective: set before each use from that of the run",
    r"grad$|\.grad_fn": "there is none between steps",
    r"_step_pre_hooks|_patched_|\._profile": "of torch, about this object alone",
    r"corpora.*\.examples\b": "found when they are first needed",
    r"_jsonl\b|\._?log\b|\.facts\b|\.folder\b": "of this folder",
    r"\.optimizer\.(param_groups\[\d+\]|_opt_called|_step_count)$": "of torch",
}
"""Paths that may differ, and why."""

CASES: dict[str, dict[str, Any]] = {
    "kto": {
        "model": {"name": "tiny", "lora": {"rank": 2, "dropout": 0.3}},
        "run": {"log_every": 3},
    },
    "bco": {
        "method": "bco",
        "reference": {"sync_every": 2, "sync_mix": 0.5},
        "loss": {"humanline": [-1.0, 1.5]},
        "run": {"log_every": 5, "keep_best": {}, "early_stop": {"patience": 9}},
        "eval": {"every": 2},
        "mix": True,
        "data": {"eval": True},
    },
    "sft": {
        "method": "sft",
        "run": {"log_every": 4},
        "train": {"batch_size": 3, "micro_batch_tokens": 30},
    },
}


def make_trainer(tmp_path: Path, name: str, folder: str) -> Trainer:
    sections = copy.deepcopy(CASES[name])
    if sections.get("mix"):
        sections["mix"] = [
            {
                "method": "bco_pair",
                "train": written(tmp_path / "pairs.jsonl", PAIRS),
                "batch_size": 3,
            }
        ]
    thumbs = [
        {"prompt": f"question {i} ", "completion": f"answer {i} {i}", "label": i % 3 == 0}
        for i in range(12)
    ]
    rows = written(tmp_path / f"{name}.jsonl", SHOWN if name == "sft" else thumbs)
    data: dict[str, Any] = {"train": rows, "max_length": 64, "as_chat": False}
    if sections.pop("data", None):
        data["eval"] = written(tmp_path / "held_out.jsonl", thumbs[:5])
    sections["train"] = {
        "batch_size": 4,
        "learning_rate": 1e-2,
        "epochs": 3,
        **sections.get("train", {}),
    }
    sections["run"] = {**sections["run"], "dir": str(tmp_path / folder)}
    return run_of(tmp_path, data=data, **sections)


def trained(run: Trainer, steps: int) -> Trainer:
    total, run.state.total_steps = run.total_steps, steps
    run.fit()
    run.state.total_steps = total
    return run


def lost(tmp_path: Path, name: str, spoilt: Any = lambda run: None) -> list[str]:
    """Paths whose value changed in a few steps and is not back, in a new run, after loading the
    state; without those that are explained above.
    """
    run = make_trainer(tmp_path, name, "first")
    spoilt(run)
    before = walk(run)
    after = walk(trained(run, 4))
    changed = [path for path in after if after[path] != before.get(path)]
    assert len(changed) > 30
    folder = tmp_path / "state"
    folder.mkdir()
    Snapshot(run.state_dict()).write(folder)
    other = make_trainer(tmp_path, name, "second")
    other.load_state_dict(load(folder))
    result = walk(other)
    return [
        p
        for p in changed
        if result.get(p) != after[p] and not any(re.search(pattern, p) for pattern in NOT_STATE)
    ]


@pytest.mark.parametrize("name", CASES)
def test_state_that_changes_in_training_is_saved(name: str, tmp_path: Path) -> None:
    assert lost(tmp_path, name) == []


@pytest.mark.parametrize(
    "place",
    [
        "policy",
        *(
            pytest.param(
                name,
                marks=pytest.mark.slow,
            )
            for name in ("state", "examples", "reference")
        ),
    ],
)
def test_state_that_is_not_saved_is_found(place: str, tmp_path: Path) -> None:
    """Whatever part keeps count of something, without being registered."""

    def spoilt(run: Trainer) -> None:
        owner = getattr(run, place)
        vars(owner)["remembered"] = [0]

        def count(*_: Any) -> None:
            vars(owner)["remembered"] = [run.step]

        run.callbacks = Callbacks([count])

    result = lost(tmp_path, "kto", spoilt)
    assert result
    assert all("remembered" in path for path in result)


def test_every_random_generator_resumes_at_its_state(tmp_path: Path) -> None:
    run = trained(make_trainer(tmp_path, "kto", "first"), 2)
    state = copy.deepcopy(run.state_dict()["processes"])

    def drawn() -> list[float]:
        return [
            torch.rand(1).item(),
            float(np.random.random()),
            float(np.random.normal()),
            random.random(),
            random.gauss(0, 1),
        ]

    wanted = drawn()
    drawn()
    run.state.registry.parts["processes"].load_state_dict(state)
    assert drawn() == wanted


def test_parts_of_another_version_are_refused_before_anything_changes() -> None:
    observed: list[Any] = []
    registry = Registry()
    registry.add("a", StateFunctions(lambda: 1, observed.append))
    registry.add("b", StateFunctions(lambda: 2, observed.append))
    for state in ({"a": 1}, {"a": 1, "b": 2, "c": 3}):
        with raises_error("checkpoint-version", where="checkpoint"):
            registry.load_state_dict(state)
    assert observed == []
    registry.load_state_dict(registry.state_dict())
    assert observed == [1, 2]
    with pytest.raises(ValueError, match=r"\ba\b"):
        registry.add("a", StateFunctions(lambda: 1, observed.append))
