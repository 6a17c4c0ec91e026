"""A signal in any phase ends the program with the documented status, and the same command then
resumes the run to the same result.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.crash.trial import differences, newest
from tests.command import command
from tests.crash.helpers import CASE, STEPS, Place, in_step
from valence.models.cache import CachedReference
from valence.training import model_files, start
from valence.training.signals import DUPLICATE_KEY_SECONDS
from valence.training.state_files import Snapshot
from valence.training.trainer import Trainer

slow = pytest.mark.slow
KTO = CASE["kto, lora"]
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
NO_BEST = {"run": {"keep_best": None}}
SAMPLED = {
    "train": {"micro_batch_tokens": 40},
    "run": {"samples": {"prompts": 2, "max_new_tokens": 4}},
}


def before(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[[], None], call: int = 1
) -> None:
    """Calls ``act`` before a call of a function, the first by default."""
    original, calls = getattr(owner, name), list[int]()

    def wrapped(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            act()
        return original(*args, **more)

    monkeypatch.setattr(owner, name, wrapped)


def amid(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], name: str) -> None:
    """Calls ``act`` in the second evaluation of this name, between micro-batches."""
    measured, observed = Trainer.evaluate, list[int]()

    def evaluate(self: Trainer, rows: Any = None, *, name: str = "eval") -> Any:
        observed.append(1) if name == wanted else None
        if name == wanted and (len(observed) == 2 or name == "test"):
            act()
        return measured(self, rows, name=name)

    wanted = name
    monkeypatch.setattr(Trainer, "evaluate", evaluate)


PHASES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Callable[[], None]], None], int | None]] = {
    "audit": (lambda patch, act: before(patch, start, "show_audit", act), None),
    "loading": (lambda patch, act: before(patch, start, "build_models", act), None),
    "first sampling": (lambda patch, act: before(patch, Trainer, "sample", act), None),
    "training": (lambda patch, act: in_step(patch, 8, act), 8),
    "training, amid a step": (lambda patch, act: in_step(patch, 5, act, batch=1), 5),
    "evaluation": (lambda patch, act: amid(patch, act, "eval"), 4),
    "save": (lambda patch, act: before(patch, Snapshot, "write", act, 3), None),
    "test": (lambda patch, act: amid(patch, act, "test"), STEPS),
    "second sampling": (lambda patch, act: before(patch, Trainer, "sample", act, 2), STEPS),
    "export": (lambda patch, act: before(patch, model_files, "export", act), STEPS),
}
"""Phase -> how to act in it, and the step of the checkpoint that is there afterwards."""


def status_of(run: Path) -> str | None:
    path = run / "run.json"
    return json.loads(path.read_text(encoding="utf-8")).get("status") if path.is_file() else None


@pytest.mark.parametrize("phase", [
    "training, amid a step",
    *(pytest.param(phase, marks=slow) for phase in PHASES if phase != "training, amid a step"),
])  # fmt: skip
def test_sigterm_in_each_phase(
    phase: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    stopped(phase, signal.SIGTERM, place, tmp_path, monkeypatch)
    assert "Traceback" not in capfd.readouterr().err


@slow
@pytest.mark.parametrize("phase", ["audit", "training, amid a step", "export"])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_other_signals(
    number: signal.Signals,
    phase: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped(phase, number, place, tmp_path, monkeypatch)


def stopped(
    phase: str,
    number: signal.Signals,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, (mode, step) = tmp_path / "run", PHASES[phase]
    raised: list[int] = []

    def act() -> None:
        raised.append(1)
        signal.raise_signal(number)

    with monkeypatch.context() as patch:
        mode(patch, act)
        assert place.train(KTO, run, **SAMPLED) == 128 + number
    assert raised == [1]
    assert step is None or newest(run) == step
    assert status_of(run) in ("interrupted", None) or step is None
    handlers = [signal.getsignal(item) for item in SIGNALS]
    assert handlers == [signal.SIG_DFL, signal.SIG_DFL, signal.default_int_handler]
    assert place.train(KTO, run, **SAMPLED) == 0
    assert differences(run, place.undisturbed_run(KTO, **SAMPLED)) == []
    first, full = (
        json.loads((item / "samples.json").read_text())
        for item in (run, place.undisturbed_run(KTO, **SAMPLED))
    )
    assert first == full


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, marks=slow),
        pytest.param(signal.SIGUSR1, marks=slow),
        signal.SIGINT,
    ],
)
def test_a_signal_in_the_reference_pass(
    number: signal.Signals, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(place.recipe(KTO, run={"dir": str(tmp_path / "run")})))
    with monkeypatch.context() as patch:
        before(patch, CachedReference, "__call__", lambda: signal.raise_signal(number), 3)
        assert command("score", str(recipe)) == 128 + number
    assert command("score", str(recipe)) == 0
    assert command("train", str(recipe)) == 0
    assert differences(tmp_path / "run", place.undisturbed_run(KTO)) == []


@pytest.mark.parametrize(("first", "second"), [
    (signal.SIGTERM, signal.SIGINT),
    pytest.param(signal.SIGTERM, signal.SIGUSR1, marks=slow),
    pytest.param(signal.SIGINT, signal.SIGINT, marks=slow),
])  # fmt: skip
def test_a_second_signal_ends_at_once(
    first: signal.Signals,
    second: signal.Signals,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The run ends during the step, and nothing more is saved."""
    run, ended = tmp_path / "run", list[int]()

    def twice() -> None:
        signal.raise_signal(first)
        time.sleep(DUPLICATE_KEY_SECONDS)  # no key is pressed twice faster
        signal.raise_signal(second)
        ended.append(1)

    with monkeypatch.context() as patch:
        in_step(patch, 8, twice)
        assert place.train(KTO, run, **NO_BEST) == 128 + first
    assert not ended
    assert newest(run) == 6
    assert place.train(KTO, run, **NO_BEST) == 0
    assert differences(run, place.undisturbed_run(KTO)) == []


@slow
def test_a_signal_in_every_step(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, more = tmp_path / "run", {"run": {"save_every": 1000, "keep_best": None}}
    for step in range(1, STEPS):
        with monkeypatch.context() as patch:
            in_step(patch, step, lambda: signal.raise_signal(signal.SIGUSR1))
            assert place.train(KTO, run, **more) == 138
        assert newest(run) == step
    assert place.train(KTO, run, **more) == 0
    assert differences(run, place.undisturbed_run(KTO)) == []
