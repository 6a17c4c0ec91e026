"""Callbacks: the events of a run, in their order, also those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import valence
from tests.command import ROWS, place
from tests.errors import raises_error

__all__ = ["place"]

SETTINGS: dict[str, Any] = {
    "method": "kto",
    "model": "./model",
    "train": ROWS,
    "eval": ROWS[:4],
    "quiet": True,
    "data": {"max_length": 128},
    "train.batch_size": 5,
    "train.epochs": 2,
    "run.dir": "runs/events",
    "run.save_every": 2,
    "eval.every": 2,
}


class Recorder(valence.Callback):
    def __init__(self, end_at: int | None = None, event: str = "step") -> None:
        self.events: list[tuple[Any, ...]] = []
        self._end_at, self._event = end_at, event

    def _add(self, run: valence.Trainer, name: str, *values: Any) -> None:
        self.events.append((name, run.step, *values))
        if run.step == self._end_at and name == self._event:
            run.end("enough")

    def on_start(self, run: valence.Trainer) -> None:
        self._add(run, "start")

    def on_step(self, run: valence.Trainer) -> None:
        self._add(run, "step")

    def on_evaluation(self, run: valence.Trainer, metrics: Any) -> None:
        assert metrics["loss"] > 0
        self._add(run, "evaluation")

    def on_log(self, run: valence.Trainer, record: Any) -> None:
        assert record["step"] == run.step
        self._add(run, "log")

    def on_save(self, run: valence.Trainer, folder: Path) -> None:
        self._add(run, "save", folder.name)

    def on_end(self, run: valence.Trainer, status: str) -> None:
        self._add(run, "end", status)


def test_all_events_in_their_order_and_after_a_resume(place: Path) -> None:
    recorder, records = Recorder(), list[int]()
    valence.train(
        **SETTINGS, callbacks=[recorder, lambda run, record: records.append(record["step"])]
    )
    assert recorder.events == [
        ("start", 0),
        ("evaluation", 0),
        ("log", 0),
        ("step", 1),
        ("log", 1),
        ("step", 2),
        ("evaluation", 2),
        ("log", 2),
        ("save", 2, "step-2"),
        ("step", 3),
        ("log", 3),
        ("step", 4),
        ("evaluation", 4),
        ("log", 4),
        ("save", 4, "step-4"),
        ("end", 4, "done"),
    ]
    assert records == [0, 1, 2, 3, 4]
    again = Recorder()
    valence.train(**{**SETTINGS, "train.max_steps": 5}, callbacks=[again])
    assert again.events[0] == ("start", 4)
    assert again.events[-1] == ("end", 5, "done")


@pytest.mark.parametrize("event", ["step", "log", "evaluation", "save"])
def test_a_callback_may_end_training(place: Path, event: str) -> None:
    recorder = Recorder(end_at=2, event=event)
    run = valence.train(**SETTINGS, callbacks=[recorder])
    assert (run.step, run.ended_early) == (2, "enough")
    assert recorder.events[-1] == ("end", 2, "done")
    assert 2 in run.evaluations
    assert run.model_dir.is_dir()


def test_an_exception_of_a_callback_costs_no_step(place: Path) -> None:
    class Failing(Recorder):
        def on_step(self, run: valence.Trainer) -> None:
            super().on_step(run)
            if run.step == 3:
                raise ZeroDivisionError

    failing = Failing()
    with pytest.raises(ZeroDivisionError):
        valence.train(**SETTINGS, callbacks=[failing])
    assert failing.events[-1] == ("end", 3, "failed")
    again = Recorder()
    valence.train(**SETTINGS, callbacks=[again])
    assert [event for event in again.events if event[0] == "step"] == [("step", 4)]


class FromTransformers(TrainerCallback):
    def __init__(self, stop_at: int = 100, save_at: int = 100) -> None:
        self.events: list[tuple[Any, ...]] = []
        self._stop_at, self._save_at = stop_at, save_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        assert more["model"] is not None
        assert args.output_dir == "runs/events"
        self.events.append(("begin", state.global_step, state.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        control.should_training_stop = state.global_step == self._stop_at
        control.should_save = state.global_step == self._save_at
        self.events.append(("step", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        self.events.append(("log", logs["step"]))
        assert state.log_history[-1] == logs

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **more: Any) -> None:
        self.events.append(("evaluate", "eval_loss" in metrics))

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.events.append(("end", state.global_step))


def test_callbacks_of_transformers(place: Path) -> None:
    callback = FromTransformers(stop_at=3, save_at=1)
    run = valence.train(**SETTINGS, callbacks=[callback])
    assert run.step == 3
    assert "FromTransformers" in run.ended_early
    assert callback.events == [
        ("begin", 0, 4),
        ("evaluate", True),
        ("log", 0),
        ("step", 1),
        ("save", 1),
        ("log", 1),
        ("step", 2),
        ("evaluate", True),
        ("log", 2),
        ("save", 2),
        ("step", 3),
        ("evaluate", True),
        ("log", 3),
        ("save", 3),
        ("end", 3),
    ]


def test_other_objects_and_other_events_are_refused_before_a_model_is_loaded(place: Path) -> None:
    class AtEpochs(TrainerCallback):
        def on_epoch_end(self, *arguments: Any, **more: Any) -> None: ...

    with raises_error("callback-event", where="callbacks", fix="on_step_end"):
        valence.train(**SETTINGS, callbacks=[AtEpochs()])

    class Misspelled(valence.Callback):
        def on_evaluate(self, run: valence.Trainer, metrics: Any) -> None: ...

    with raises_error("callback-event", where="callbacks", fix="did you mean on_evaluation?"):
        valence.train(**SETTINGS, callbacks=[Misspelled()])
    for wrong in (3, Recorder):
        with raises_error("callback-invalid", where="callbacks"):
            valence.train(**SETTINGS, callbacks=[wrong])  # type: ignore[list-item]
    assert not Path("runs/events/checkpoints").exists()
