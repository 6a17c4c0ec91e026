"""What samples and what judges in an online run, as its recipe says."""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from valence.batching.micro_batches import make_micro_batches
from valence.config.schema import Recipe
from valence.errors import UserError
from valence.models.adapters import adapted, largest_rank
from valence.rewards.build import reward_of
from valence.rewards.combine import Combined
from valence.rollouts import HFGenerator, Sampling
from valence.rollouts.protocol import Named, Pair, Served
from valence.types import Completion, Origin, Score, TokenizedCompletion, TokenizedExample

if TYPE_CHECKING:
    from valence.rollouts.servers import Server
    from valence.rollouts.transports import WeightTransfer
    from valence.training.loop import Run

Answers = list[list[Completion]]


class RolloutEngine(Protocol):
    """Answers the prompts of a run.

    ``served``: by a server, which rank 0 asks; else each process samples some.
    """

    served: bool

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int,
        progress: Callable[[int], None],
    ) -> Answers:
        """n answers to each prompt. first: the place of the first of them in its round; progress:
        told how many more answers have ended.
        """
        ...

    def begin(
        self, prompts: Sequence[tuple[int, ...]], n: int, sampling: Sampling
    ) -> Future[Answers]:
        """The same, while something else is done.

        One such request at a time: an earlier one is given up.
        """
        ...

    def close(self) -> None: ...


class InProcess:
    """Sampling from the policy itself."""

    served = False

    def __init__(self, run: Run) -> None:
        encoder = run.prepared.encoder
        self.policy, self.run = run.policy, run
        model: Any = run.policy.model
        at_once = run.recipe.rollout.at_once
        self.generator = HFGenerator(
            model, encoder.tokenizer, end_ids=encoder.end_ids, batch_size=at_once
        )

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int,
        progress: Callable[[int], None],
    ) -> Answers:
        self.generator.version = self.run.step
        with self.policy.sampling():
            return self.policy.within(
                lambda: self.generator.generate(
                    prompts, n, sampling, first=first, progress=progress
                )
            )

    def begin(
        self, prompts: Sequence[tuple[int, ...]], n: int, sampling: Sampling
    ) -> Future[Answers]:
        raise UserError(
            "this process samples, and cannot train meanwhile",
            code="rollout-ahead-unsupported",
            where="rollout.ahead",
            fix="remove it",
        )

    def close(self) -> None:
        pass


class OnServer:
    """Sampling from a server, which is sent the policy's weights when they have changed, if it
    takes any.
    """

    served = True

    def __init__(self, run: Run) -> None:
        self.run, self.rollout = run, run.recipe.rollout
        if run.divided:
            what = "weights that are split over processes are not sent to a server"
            raise UserError(
                what,
                code="rollout-engine-unsupported",
                where="rollout.engine",
                fix="set it to hf, or parallel.shard: off and parallel.tensor: 1",
            )
        self.server: Server | None = None
        self.generator = self._generator()
        self.synced = -1
        self.agreed = False
        self._thread = ThreadPoolExecutor(1, "valence-rollout")
        self._unwanted = Event()

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int,
        progress: Callable[[int], None],
    ) -> Answers:
        assert first == 0
        self._sync(sampling)
        return self.generator.generate(prompts, n, sampling, progress=progress)

    def begin(
        self, prompts: Sequence[tuple[int, ...]], n: int, sampling: Sampling
    ) -> Future[Answers]:
        self._unwanted.set()
        self._sync(sampling)
        unwanted = self._unwanted = Event()

        def look(_: int) -> None:
            if unwanted.is_set():
                raise CancelledError

        return self._thread.submit(self.generator.generate, prompts, n, sampling, progress=look)

    def close(self) -> None:
        """Gives back connections, and stops the server if it was started here.

        What is still being answered is given up.
        """
        self._unwanted.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.generator.close()
        if self.server is not None:
            self.server.stop()

    # ------------------------------------------------------------------ weights

    def _sync(self, sampling: Sampling) -> None:
        """Sends the weights if they are new, and compares what both sides say with them."""
        run = self.run
        if self.rollout.engine != "vllm" or self.synced == run.step:
            return
        self.generator.sync(
            run.step, self._weights, self._adapter if adapted(run.policy.model) else None
        )
        self.synced = run.step
        if not self.rollout.check_prompts:
            return
        from valence.rollouts.check import Evidence, check

        longest = sorted(
            {unit.prompt_ids for unit in run.prepared.corpora["train"].units},
            key=lambda ids: (-len(ids), ids),
        )
        config = run.policy.causal.config.get_text_config()
        about = Evidence(
            dtypes=(run.recipe.model.dtype, ""),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            agreed=self.agreed,
            adapter=adapted(run.policy.model),
        )
        # in short ones a prefix that was kept by mistake does not show
        asked = longest[: self.rollout.check_prompts]
        check(self.generator, asked, sampling, self._measure, self._mismatch, evidence=about)
        self.agreed = True

    @cached_property
    def _mismatch(self) -> float:
        """Nats per token: an output head that kept its old values was seen to differ by 0.06, and
        bfloat16 by 0.03.
        """
        if self.rollout.max_mismatch is not None:
            return self.rollout.max_mismatch
        wide = self.run.recipe.model.dtype == "float32" and (
            self.server is not None or self.generator.dtype == "float32"
        )
        return 0.005 if wide else 0.1

    def _weights(self) -> Named:
        return self.run.policy.causal.named_parameters()

    def _adapter(self, folder: Path) -> None:
        model: Any = self.run.policy.model
        model.save_pretrained(str(folder))

    @torch.no_grad()
    def _measure(self, pairs: Sequence[Pair], temperature: float) -> list[list[float]]:
        """What the policy says of the tokens of answers (nats)."""
        run, policy = self.run, self.run.policy
        units = [_unit(*pair) for pair in pairs]
        found: dict[int, list[float]] = {}
        policy.eval()
        try:
            with policy.tempered(temperature):
                for batch in make_micro_batches(
                    units, run.objective.micro_batch_tokens, policy.device
                ):
                    logp = policy(batch).logp[batch.scored].cpu()
                    for s, i in enumerate(batch.unit.tolist()):
                        found[i] = logp[batch.cpu_scored[1] == s].tolist()
        finally:
            policy.train()
        return [found[i] for i in range(len(units))]

    # ------------------------------------------------------------------ the server

    def _generator(self) -> Served:
        run, rollout, encoder = self.run, self.rollout, self.run.prepared.encoder
        how: dict[str, Any] = {
            "end_ids": encoder.end_ids,
            "timeout": rollout.timeout,
            "say": run.warn,
        }
        if rollout.engine == "openai":
            from valence.rollouts.openai import OpenAIGenerator

            return cast(
                "Served",
                OpenAIGenerator(
                    rollout.url or "", encoder.tokenizer, prefix=encoder.vocab.prefix, **how
                ),
            )
        from valence.rollouts.vllm import VLLMGenerator

        name = self._transport_name()
        if rollout.start:
            self.server = self._start(name)
            how["revive"] = self.server.revive
        url = rollout.url or (self.server.url if self.server else "")
        return VLLMGenerator(url, self._transport(name), encoder.tokenizer, **how)

    def _transport_name(self) -> str:
        if self.rollout.transport != "auto":
            return self.rollout.transport
        if adapted(self.run.policy.model):
            return "lora"
        return "nccl" if self.run.policy.device.type == "cuda" else "disk"

    def _transport(self, name: str) -> WeightTransfer:
        from valence.rollouts import transports

        if name in ("disk", "lora"):
            # Of its own in a folder that several runs may name: each removes what it left there
            # when it was killed.
            own = f"{self._folder.name}-{zlib.crc32(str(self._folder.absolute()).encode()):08x}"
            folder = (
                Path(self.rollout.folder) / own if self.rollout.folder else self._folder / "weights"
            )
            return (
                transports.LoraTransfer(folder)
                if name == "lora"
                else transports.DiskTransfer(folder)
            )
        if name == "gloo":
            return transports.GlooTransfer(self.rollout.timeout)
        return transports.NcclTransfer(self.rollout.timeout, self.run.policy.device)

    def _start(self, transport: str) -> Server:
        from valence.rollouts.servers import Server, located

        recipe = self.run.recipe
        extra = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
        if named := recipe.model.tokenizer:
            extra += ["--tokenizer", located(named)]
        dtype = "bfloat16" if recipe.model.dtype == "bfloat16" else "float32"
        server = Server(
            recipe.model.name,
            folder=self._folder / "server",
            python=self.rollout.python,
            transport=transport,
            rank=largest_rank(self.run.policy.model),
            dtype=dtype,
            length=recipe.data.max_length,
            timeout=self.rollout.timeout,
            extra=extra,
        )
        self.run.say_once(f"starting a vLLM server ({server.log})")
        return server.start()

    @cached_property
    def _folder(self) -> Path:
        return (
            self.run.folder.path if self.run.folder else Path(tempfile.mkdtemp(prefix="valence-"))
        )


def _unit(prompt: Sequence[int], answer: Sequence[int]) -> TokenizedExample:
    ids = tuple(prompt)
    return TokenizedExample(
        id="compared",
        origin=Origin("", 0),
        kind="demonstration",
        prompt_ids=ids,
        prompt_mask=(False,) * len(ids),
        answers=(TokenizedCompletion(tuple(answer), (True,) * len(answer)),),
    )


def sampler_of(run: Run) -> RolloutEngine:
    """What the recipe's ``rollout.engine`` names."""
    return InProcess(run) if run.recipe.rollout.engine == "hf" else OnServer(run)


def check_rewards(recipe: Recipe) -> None:
    """Raises UserError for rewards that cannot be found, or called.

    Models are not loaded for it.
    """
    if recipe.reward:
        reward_of(recipe.reward, model=lambda name, settings, where: Unloaded())


def models_that_judge(recipe: Recipe) -> list[tuple[str, Mapping[str, Any], str]]:
    """The reward models among a recipe's rewards: the folder or hub id of each, its settings, and
    where these are.
    """
    found: list[tuple[str, Mapping[str, Any], str]] = []

    def note(*entry: Any) -> Unloaded:
        found.append(entry)
        return Unloaded()

    reward_of(recipe.reward, model=note)
    return found


class Unloaded:
    """Stands for a reward model that is there."""

    @property
    def identity(self) -> None:
        """Nothing is kept of it."""

    async def attempt(self, completions: Sequence[Completion]) -> list[Score]:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def reward_in(run: Run) -> Combined:
    """The recipe's rewards, added up. Scores that cannot change are kept in the run's folder."""
    if not run.prepared.has_rewards:
        raise ValueError("the run was opened without its rewards")
    from valence.training.reward_models import reward_model

    kept = run.folder.path / "scores" if run.folder else None
    return reward_of(run.recipe.reward, model=reward_model, cache=kept)
