"""Out of memory: repeat the work with micro-batches of half the size, for the same result."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from valence.errors import UserError, out_of_memory
from valence.models.gradients import clear
from valence.training.folder import Messages, RunFolder
from valence.training.state import TrainState
from valence.training.state_files import RandomState
from valence.training.track import Phase

Result = TypeVar("Result")


def peak_memory(device: torch.device) -> dict[str, float]:
    """Metrics of the most memory in use so far, in GB: of a GPU by tensors, and reserved for them;
    else of this process.
    """
    if device.type == "cuda":
        return {
            "memory": torch.cuda.max_memory_allocated(device) / 1e9,
            "memory_reserved": torch.cuda.max_memory_reserved(device) / 1e9,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    return {"memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9}


class MemoryRetry:
    """Runs parts of a step again with smaller micro-batches when memory runs out."""

    def __init__(self, state: TrainState, messages: Messages, folder: RunFolder | None) -> None:
        self._state, self._messages, self._folder = state, messages, folder

    def run(self, phase: Phase, action: Callable[[], Result]) -> Result:
        """Return the result of the action.

        When memory runs out, micro-batches are halved and the action is repeated with the same
        random numbers. Raises UserError when that was done before or does not help.
        """
        state = self._state
        while True:
            random = RandomState()
            for objective in state.objectives:
                objective.micro_batch_tokens = state.budget.at(state.step, phase)
            try:
                return action()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if not state.is_consistent:
                    raise UserError(
                        "out of memory in the optimizer's step",
                        code="out-of-memory",
                        where=f"step {state.step}",
                        fix="set model.lora, train.optimizer: adamw_8bit, or "
                        "train.checkpointing: full",
                    ) from error
            state.budget.halve(state.step, phase)
            tokens = state.budget.at(state.step, phase)
            self._messages.warn(
                f"out of memory in step {state.step} ({phase}): halved the micro-batches to "
                f"{tokens} tokens; this does not change the result"
            )
            if self._folder:
                self._folder.record(micro_batch_tokens=state.budget.state_dict())
            clear(state.optimized_parameters, keep=False)
            if torch.cuda.is_available():
                # The error and the frames it passed through hold each other, and activations.
                gc.collect()
                torch.cuda.empty_cache()
            random.restore()
