"""Callbacks: users' code that runs at events of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from valence.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainerCallback

Run = Any
"""The ``Trainer`` of the run, whose module imports this one."""
Record = Mapping[str, Any]


class Callback:
    """Code that runs at events of a run. Override the methods of the events that you need.

    Every process calls them, so they must decide the same everywhere; ``on_save`` is called only in
    processes that write the checkpoint. ``run.end(reason)`` ends training after the current step.
    An exception ends the run, which saves its state before.
    """

    def on_start(self, run: Run) -> None:
        """Training starts or resumes, before its first step."""

    def on_step(self, run: Run) -> None:
        """An optimizer step was made; ``run.step`` counts it."""

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        """The rows of ``data.eval`` were measured."""

    def on_log(self, run: Run, record: Record) -> None:
        """A record was written to the log. A resumed run may repeat its last one."""

    def on_save(self, run: Run, folder: Path) -> None:
        """A checkpoint was started; with ``run.async_save`` it may be incomplete."""

    def on_end(self, run: Run, status: str) -> None:
        """The run ends: ``done`` (the model is written), ``interrupted`` or ``failed``."""


CallbackLike: TypeAlias = "Callback | TrainerCallback | Callable[[Run, Record], None]"
"""A ``Callback``, one of transformers, or a function that is called as ``on_log``."""


class Callbacks(Callback):
    """Calls several callbacks, in their order."""

    def __init__(self, callbacks: Sequence[CallbackLike]) -> None:
        """Raises UserError for an object that is none, or a TrainerCallback with other events."""
        if not isinstance(callbacks, list | tuple):  # a single one would be a common mistake
            raise UserError(
                "callbacks must be a list",
                code="callback-invalid",
                where="callbacks",
                fix="write callbacks=[CALLBACK]",
            )
        self._callbacks = [_callback(callback) for callback in callbacks]

    def on_start(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_start(run)

    def on_step(self, run: Run) -> None:
        for callback in self._callbacks:
            callback.on_step(run)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_evaluation(run, metrics)

    def on_log(self, run: Run, record: Record) -> None:
        for callback in self._callbacks:
            callback.on_log(run, record)

    def on_save(self, run: Run, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_save(run, folder)

    def on_end(self, run: Run, status: str) -> None:
        for callback in self._callbacks:
            callback.on_end(run, status)


def _callback(value: object) -> Callback:
    if isinstance(value, Callback):
        return _checked(value)
    if any(kind.__module__.startswith("transformers.") for kind in type(value).__mro__):
        from transformers import TrainerCallback  # takes long: loaded only for such a callback

        if isinstance(value, TrainerCallback):
            return _HuggingFaceCallback(value)
    if callable(value) and not isinstance(value, type):
        return _LogFunction(value)
    kind = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
    raise UserError(
        f"{kind} is not a callback",
        code="callback-invalid",
        where="callbacks",
        fix="pass a function (run, record), or an object of a valence.Callback or a transformers."
        "TrainerCallback",
    )


def _checked(callback: Callback) -> Callback:
    """The callback. Raises UserError if it has a method for an event that a run does not have."""
    events = [name for name in dir(Callback) if name.startswith("on_")]
    kind = type(callback)
    for name in dir(kind):
        if name.startswith("on_") and name not in events:
            close = get_close_matches(name, events, 1)
            raise UserError(
                f"{kind.__name__} reacts to {name}, which is no event",
                code="callback-event",
                where="callbacks",
                fix=f"{f'did you mean {close[0]}? ' if close else ''}the events are "
                f"{', '.join(events)}",
            )
    return callback


class _LogFunction(Callback):
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def on_log(self, run: Run, record: Record) -> None:
        self._function(run, record)


HF_EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_step_end",
    "on_evaluate",
    "on_log",
    "on_save",
    "on_train_end",
)
"""The events of transformers that a run has."""


class _HuggingFaceCallback(Callback):
    """Calls a callback of transformers with its arguments: args, state, control and keywords.

    ``args`` has only the settings that a recipe has too. Of ``control``, ``should_training_stop``
    and ``should_save`` are obeyed.
    """

    def __init__(self, callback: TrainerCallback) -> None:
        from transformers import TrainerCallback as base
        from transformers import TrainerControl, TrainerState

        events = [name for name in dir(base) if name.startswith("on_") and name not in HF_EVENTS]
        kind = type(callback)
        if other := [name for name in events if getattr(kind, name) is not getattr(base, name)]:
            raise UserError(
                f"{kind.__name__} reacts to {', '.join(other)}, which a run does not have",
                code="callback-event",
                where="callbacks",
                fix=f"use {', '.join(HF_EVENTS)}, or write a valence.Callback",
            )
        self._callback = callback
        self._state, self._control = TrainerState(log_history=[]), TrainerControl()

    def on_start(self, run: Run) -> None:
        self._call("on_init_end", run)
        self._call("on_train_begin", run)

    def on_step(self, run: Run) -> None:
        self._call("on_step_end", run)

    def on_evaluation(self, run: Run, metrics: Mapping[str, float]) -> None:
        named = {f"eval_{name}": value for name, value in metrics.items()}
        self._call("on_evaluate", run, metrics=named)

    def on_log(self, run: Run, record: Record) -> None:
        self._state.log_history.append(dict(record))
        self._call("on_log", run, logs=dict(record))

    def on_save(self, run: Run, folder: Path) -> None:
        self._call("on_save", run)

    def on_end(self, run: Run, status: str) -> None:
        self._call("on_train_end", run)

    def _call(self, event: str, run: Run, **more: Any) -> None:
        state, control, recipe = self._state, self._control, run.recipe
        state.global_step, state.max_steps = run.step, run.total_steps
        state.epoch = run.examples.epoch
        state.is_world_process_zero = state.is_local_process_zero = run.world.rank == 0
        args = SimpleNamespace(
            output_dir=recipe.run.dir,
            run_name=recipe.run.dir,
            learning_rate=recipe.train.learning_rate,
            num_train_epochs=recipe.train.epochs,
            max_steps=run.total_steps,
            logging_steps=recipe.run.log_every,
            save_steps=recipe.run.save_every,
            eval_steps=run.prepared.evaluation_interval if "eval" in run.prepared.corpora else None,
            seed=recipe.train.seed,
        )
        try:
            getattr(self._callback, event)(
                args,
                state,
                control,
                model=run.policy.model,
                processing_class=run.prepared.tokenizer,
                optimizer=run.state.optimizer,
                lr_scheduler=run.state.scheduler,
                **more,
            )
        except AttributeError as error:
            if error.obj is not args:
                raise
            raise UserError(
                f"{type(self._callback).__name__} reads args.{error.name}, which a recipe does not "
                "have",
                code="callback-event",
                where="callbacks",
                fix="write a valence.Callback, or use a setting: run.early_stop ends training",
            ) from error
        if control.should_training_stop:
            run.end(f"{type(self._callback).__name__} stopped it")
        if control.should_save:
            control.should_save = False
            run.save(wait=False)
