"""Sample completions from the policy in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from valence.data.encode import Encoder
from valence.errors import UserError
from valence.methods import Method
from valence.models.policy_model import PolicyModel
from valence.rollouts import HFGenerator, Sampling
from valence.rollouts.hf import evaluating
from valence.rollouts.protocol import ignore_progress
from valence.training.episodes import EpisodeRun, completions_of, sample_episodes
from valence.types import Completion

if TYPE_CHECKING:
    from valence.rollouts.continuous import ContinuousBatch

NOT_FINITE_FIX = "lower train.learning_rate, or use model.dtype: float32"
"""What helps against a policy whose weights or logits are not finite."""


def check_can_generate(method: Method, where: str = "sample") -> None:
    """Raise UserError for a method that trains a reward model. where: what names the model."""
    if method.is_reward_model:
        raise UserError(
            "reward models cannot generate text",
            code="reward-model-cannot-generate",
            where=where,
            fix="use a language model; to score answers with this model, use `valence score`",
        )


class PolicySampler:
    """Samples from the policy with the weights that it has. It is one of the rollout engines.

    version: the number of optimizer steps that completions are marked with.
    """

    is_server = False

    def __init__(
        self,
        policy: PolicyModel,
        encoder: Encoder,
        *,
        version: Callable[[], int],
        batch_size: int | None = None,
    ) -> None:
        """batch_size: completions that are sampled at once."""
        model: Any = policy.model
        size = {} if batch_size is None else {"batch_size": batch_size}
        self.policy, self._version = policy, version
        self.generator = HFGenerator(model, encoder.tokenizer, end_ids=encoder.end_ids, **size)

    @property
    def at_once(self) -> int:
        """Completions per batch."""
        return self.generator.batch_size

    def phase(self, name: str) -> AbstractContextManager[object]:
        return nullcontext()

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int = 0,
        positions: Sequence[int] | None = None,
        progress: Callable[[int], None] = ignore_progress,
        on_completion: Callable[[int, Completion], None] | None = None,
        episodes: Sequence[EpisodeRun] = (),
    ) -> list[list[Completion]]:
        """Return n completions of each prompt. first: the position of the first prompt, which
        random numbers depend on. progress: called with the number of completions that have ended
        since the last call. positions, on_completion: see ``HFGenerator.generate``. episodes: with
        tools, n of each prompt, whose turns are sampled.

        Raises FloatingPointError when the policy's logits are not finite.
        """
        version = self.generator.version = self._version()
        if episodes:
            places = {id(episode): i // n for i, episode in enumerate(episodes)}

            def report(episode: EpisodeRun) -> None:
                if on_completion is not None:
                    on_completion(places[id(episode)], episode.completion(version))

            with self.policy.sampling(), torch.no_grad(), evaluating(self.generator.model):
                sample_episodes(
                    self.generator, episodes, sampling, progress=progress, on_end=report
                )
            return completions_of(episodes, n, version)
        with self.policy.sampling():
            return self.policy.with_gathered_weights(
                lambda: self.generator.generate(
                    prompts,
                    n,
                    sampling,
                    first=first,
                    positions=positions,
                    progress=progress,
                    on_completion=on_completion,
                )
            )

    def sample_continuously(self, action: Callable[[ContinuousBatch], None]) -> None:
        """Run an action that samples from a batch which prompts can join at any time."""
        from valence.rollouts.continuous import ContinuousBatch

        self.generator.version = self._version()
        batch = ContinuousBatch(self.generator)
        with self.policy.sampling(), evaluating(self.generator.model):
            self.policy.with_gathered_weights(lambda: action(batch))

    def begin(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun] = (),
    ) -> Future[list[list[Completion]]]:
        raise UserError(
            "rollout.engine: hf samples in the training process, which cannot sample during a step",
            code="rollout-ahead-unsupported",
            where="rollout.ahead",
            fix="remove it, or set rollout.engine: vllm",
        )

    def close(self) -> None:
        pass


def sampling_failed(error: FloatingPointError, step: int) -> UserError:
    """The error for a policy whose logits are not finite."""
    return UserError(
        f"the policy cannot be sampled: {error}",
        code="sampling-failed",
        where=f"step {step}",
        fix=NOT_FINITE_FIX,
    )
