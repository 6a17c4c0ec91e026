"""Memory that runs out: half as many tokens at once, and the same result."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from valence.errors import UserError
from valence.models.gradients import clear
from valence.models.memory import out_of_memory
from valence.runs.state import RandomState
from valence.training.track import Phase

if TYPE_CHECKING:
    from valence.training.loop import Run


def peak(device: torch.device) -> float:
    """The most memory that was in use so far, in GB: on a GPU of its own, else by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def with_memory(run: Run, phase: Phase, action: Callable[[], Any]) -> Any:
    """What the action gives.

    When memory runs out, it is done again with half as many tokens at once: that gives the same, by
    construction. Raises UserError when that does not help, or was done before.
    """
    while True:
        random = RandomState()
        before = random.state_dict()
        for objective in run.objectives:
            objective.micro_batch_tokens = run.budget.at(run.step, phase)
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if not run.whole:
                fix = "set model.lora, train.optimizer: adamw_8bit, or train.checkpointing: full"
                raise UserError(
                    "out of memory in the optimizer's step",
                    code="out-of-memory",
                    where=f"step {run.step}",
                    fix=fix,
                ) from error
        run.budget.halve(run.step, phase)
        tokens = run.budget.at(run.step, phase)
        run.warn(
            f"out of memory in step {run.step} ({phase}): from here on {tokens} tokens run at "
            f"once, half as many; "
            "the result is the same"
        )
        if run.folder:
            run.folder.state(micro_batch_tokens=run.budget.state_dict())
        clear((p for group in run.optimizer.param_groups for p in group["params"]), keep=False)
        if torch.cuda.is_available():
            # the error and the frames that it came through hold each other, and activations
            gc.collect()
            torch.cuda.empty_cache()
        random.load_state_dict(before)
