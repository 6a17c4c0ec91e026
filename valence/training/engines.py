"""What samples completions in online training: the policy itself, or a server."""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property
from heapq import nsmallest
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from valence.batching.micro_batches import make_micro_batches
from valence.distributed.process_group import Group, SingleProcess, ignore
from valence.errors import UserError
from valence.models.adapters import has_adapter, largest_rank, save_adapter
from valence.models.shape import shape_of
from valence.rollouts import Sampling
from valence.rollouts.client import ServerGone
from valence.rollouts.protocol import Named, Pair, Served
from valence.rollouts.servers import Placement, Server, absolute_model, place_server
from valence.rollouts.transports import narrow
from valence.rollouts.vllm import VLLMGenerator
from valence.training.episodes import EpisodeRun, completions_of
from valence.training.folder import Messages
from valence.training.model_files import gather_adapter
from valence.training.prepare import Prepared
from valence.training.sampling import PolicySampler
from valence.training.state import TrainState
from valence.types import Completion, Origin, TokenizedCompletion, TokenizedExample
from valence.user_code.attempt import Raised, attempt
from valence.user_code.load import describe_raised
from valence.user_code.plugins import load_plugin

if TYPE_CHECKING:
    from valence.rollouts.transports import WeightTransfer

Completions = list[list[Completion]]


class RolloutEngine(Protocol):
    """Samples completions of the prompts of a run.

    is_server: rank 0 asks servers for all of them; else each process samples some. at_once:
    completions per batch, if this process decides.
    """

    is_server: bool

    @property
    def at_once(self) -> int | None: ...

    def phase(self, name: str) -> AbstractContextManager[object]:
        """Around the calls of ``generate`` and ``begin``, in all processes."""
        ...

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun] = (),
    ) -> Completions:
        """Return n completions of each prompt. first: the position of the first prompt in its
        round. progress: called with the number of completions that have ended since the last call.
        episodes: with tools, n of each prompt, whose turns are sampled.
        """
        ...

    def begin(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun] = (),
    ) -> Future[Completions]:
        """Start to sample in the background, after what was begun earlier.

        If the weights have changed, nothing that was begun may be in progress. progress: called in
        another thread; it may raise CancelledError.
        """
        ...

    def close(self) -> None: ...


class ServerEngine:
    """Samples from servers, or with a plugin. Before that it sends the policy's weights, if they
    have changed, to those that accept any.

    Rank 0 asks all servers for the completions of all processes: it alone knows which have arrived.

    Weights that are split over processes are gathered one tensor at a time, which takes all
    processes: inside ``phase`` the others do what rank 0 asks for.

    folder: of the run, for the server's log and for weights. world: all processes. server_share:
    returns the share of a GPU's memory for a server that a training process shares the GPU with.
    """

    is_server = True
    at_once = None

    def __init__(
        self,
        prepared: Prepared,
        state: TrainState,
        messages: Messages,
        folder: Path | None,
        *,
        world: Group | None = None,
        server_share: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._world = world or SingleProcess()
        self._call_assistants: Callable[[], None] = ignore
        self._stream: Generator[tuple[str, Tensor]] | None = None
        self._prepared, self._state, self._messages = prepared, state, messages
        self._recipe, self._policy = prepared.recipe, state.policy
        self.rollout = prepared.recipe.rollout
        self._run_folder, self._server_share = folder, server_share
        self.server: Server | None = None
        if self.rollout.engine == "vllm":
            _ = self._placement  # raises before anything is sampled
        self._sent_step = -1
        self._has_agreed = False
        self._thread = ThreadPoolExecutor(1, "valence-rollout")
        self._is_closed = Event()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._policy.device.type == "cuda":
            if self._sleeps:  # else the server would lack what the processes have reserved
                torch.cuda.empty_cache()
            self._world.barrier("before sampling")  # it may use the GPUs of several
        with self._world.long_phase(name, self._assist) as self._call_assistants:
            try:
                yield
            finally:
                self._close_stream()

    def generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        *,
        first: int,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun] = (),
    ) -> Completions:
        assert first == 0
        with self._awake():
            self._sync(sampling)
            return self._generate(prompts, n, sampling, progress, episodes)

    def begin(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun] = (),
    ) -> Future[Completions]:
        self._sync(sampling)

        def advance(count: int) -> None:
            if self._is_closed.is_set():
                raise CancelledError
            progress(count)

        return self._thread.submit(self._generate, prompts, n, sampling, advance, episodes)

    def _generate(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        sampling: Sampling,
        progress: Callable[[int], None],
        episodes: Sequence[EpisodeRun],
    ) -> Completions:
        """Sample. What a plugin returns is checked, and marked with the step of its weights."""
        if episodes:
            assert isinstance(self.generator, VLLMGenerator)
            version = self.generator.version
            self.generator.sample_turns(episodes, sampling, progress=progress)
            return completions_of(episodes, n, version)
        if not self.rollout.uses_plugin:
            return self.generator.generate(prompts, n, sampling, progress=progress)
        result = attempt(lambda: self.generator.generate(prompts, n, sampling, progress=progress))
        problem = ""
        if isinstance(result, Raised):
            if isinstance(result.error, UserError | CancelledError):
                raise result.error
            problem = describe_raised(result.error, __file__)
        else:
            size = self._policy.causal.get_input_embeddings().weight.shape[0]
            problem = _completions_problem(result, len(prompts), n, sampling, size)
        if problem or isinstance(result, Raised):
            raise UserError(
                f"the engine {self.rollout.engine} {problem}",
                code="engine-failed",
                where="rollout.engine",
                fix="fix the engine: generate returns n Completions for each prompt",
            )
        step = max(self._sent_step, 0)
        return [[replace(answer, version=step) for answer in group] for group in result]

    def close(self) -> None:
        """Cancel sampling, close connections, and stop the server if it was started here."""
        self._is_closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if "generator" in self.__dict__ and hasattr(self.generator, "close"):
            self.generator.close()
        if self.server is not None:
            self.server.stop()

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Inside the block, the server has its GPU memory. If the block succeeds, the server then
        frees that memory for training.
        """
        generator = self.generator
        if not (self._sleeps and isinstance(generator, VLLMGenerator)):
            yield
            return
        generator.wake()
        yield
        generator.sleep()

    # Weights

    def _sync(self, sampling: Sampling) -> None:
        """Send the weights if they are new, and compare the log-probabilities of both sides."""
        state, policy = self._state, self._policy
        if self.rollout.engine == "openai" or self._sent_step == state.step:
            return
        if self.rollout.engine == "vllm" or hasattr(self.generator, "sync"):
            self.generator.sync(
                state.step, self._weights, self._save_adapter if has_adapter(policy.model) else None
            )
        self._sent_step = state.step
        if not self.rollout.check_prompts or self.rollout.uses_plugin:
            return
        from valence.rollouts.check import Evidence, check

        prompts = self._checked_prompts
        config = policy.causal.config.get_text_config()
        evidence = Evidence(
            dtypes=(self._recipe.model.dtype, ""),
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            agreed=self._has_agreed,
            adapter=has_adapter(policy.model),
        )
        servers = cast("VLLMGenerator", self.generator).split_by_server()
        lost: list[ServerGone] = []
        for server in servers:
            url = server.pool.clients[0].url if len(self.rollout.urls) > 1 else ""
            try:
                check(
                    server,
                    prompts,
                    sampling,
                    self._measure,
                    self._mismatch,
                    evidence=replace(evidence, url=url),
                )
            except ServerGone as error:  # the others do without it until it is back
                lost.append(error)
        if len(lost) == len(servers):
            raise lost[0]
        self._has_agreed = True

    @cached_property
    def _checked_prompts(self) -> list[tuple[int, ...]]:
        """The longest prompts: in short ones, a prefix that was cached by mistake does not show."""
        prompts = {unit.prompt_ids for unit in self._prepared.corpora["train"].units}
        return nsmallest(self.rollout.check_prompts, prompts, key=lambda ids: (-len(ids), ids))

    @cached_property
    def _mismatch(self) -> float:
        """Allowed difference in nats per token.

        An output head with outdated values was seen to differ by 0.06, and bfloat16 by 0.03.
        """
        if self.rollout.max_mismatch is not None:
            return self.rollout.max_mismatch
        is_float32 = self._recipe.model.dtype == "float32" and (
            self.server is not None or self.generator.dtype == "float32"
        )
        return 0.005 if is_float32 else 0.1

    def _weights(self) -> Named:
        """All weights of the policy, full tensors one by one."""
        if self._policy.device.type == "cuda":
            torch.cuda.set_device(self._policy.device)  # this may be a thread
        if not self._state.has_split_weights:
            return self._policy.causal.named_parameters()
        dtype = self.generator.weight_dtype if isinstance(self.generator, VLLMGenerator) else None
        self._ask("weights", dtype and str(dtype).removeprefix("torch."))
        self._stream = self._stream_weights(dtype)
        return self._stream

    def _stream_weights(self, dtype: torch.dtype | None) -> Generator[tuple[str, Tensor]]:
        weights = self._gather_weights(dtype)
        try:
            for named in weights:  # noqa: UP028 (`yield from` would close it first)
                yield named
        finally:
            for _ in weights:  # after an error too, because the other processes gather all of them
                pass

    def _gather_weights(self, dtype: torch.dtype | None) -> Generator[tuple[str, Tensor]]:
        """All weights, in this dtype if it is narrower; all processes iterate at the same time."""
        for name, tensor in narrow(self._policy.causal.named_parameters(), dtype):
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _ask(self, *job: Any) -> None:
        """Make the other processes take part in a job (see ``_assist``)."""
        self._close_stream()
        self._call_assistants()
        self._world.broadcast(job)

    def _assist(self) -> None:
        """Take part in the job that rank 0 asks for."""
        kind, *arguments = self._world.broadcast(None)
        if kind == "weights":
            for _ in self._gather_weights(arguments[0] and getattr(torch, arguments[0])):
                pass
        elif kind == "adapter":
            gather_adapter(self._policy.model, keep=False)
        else:
            self._measure_together(*arguments)

    def _save_adapter(self, folder: Path) -> None:
        if not self._state.has_split_weights:
            save_adapter(self._policy.model, folder)
            return
        self._ask("adapter")
        values = gather_adapter(self._policy.model, keep=True)
        save_adapter(self._policy.model, folder, values)

    def _measure(self, pairs: Sequence[Pair], temperature: float) -> list[list[float]]:
        """The policy's log-probability of each token of each completion (nats)."""
        if self._state.has_split_weights or self._policy.context is not None:
            self._ask("measure", [[list(part) for part in pair] for pair in pairs], temperature)
        return self._measure_together(pairs, temperature)

    @torch.no_grad()
    def _measure_together(self, pairs: Sequence[Pair], temperature: float) -> list[list[float]]:
        policy = self._policy
        units = [_as_example(*pair) for pair in pairs]
        logps: dict[int, list[float]] = {}
        policy.eval()
        try:
            with policy.tempered(temperature):
                size = self._state.objective.micro_batch_tokens
                for batch in make_micro_batches(units, size, policy.device):
                    values = policy(batch).logp[batch.scored].cpu()
                    for s, i in enumerate(batch.unit.tolist()):
                        logps[i] = values[batch.cpu_scored[1] == s].tolist()
        finally:
            policy.train()
        return [logps[i] for i in range(len(units))]

    # The server

    @cached_property
    def generator(self) -> Served:
        """The client of the servers. Starts a server: only a process that asks it calls this."""
        rollout, encoder = self.rollout, self._prepared.encoder
        options: dict[str, Any] = {
            "end_ids": encoder.end_ids,
            "timeout": rollout.timeout,
            "log": self._messages.warn,
        }
        if rollout.uses_plugin:
            factory = load_plugin("engines", rollout.engine, "rollout.engine")
            return factory(self._policy.causal, encoder.tokenizer, rollout)
        if rollout.engine == "openai":
            from valence.rollouts.openai import OpenAIGenerator

            return cast(
                "Served",
                OpenAIGenerator(
                    rollout.urls, encoder.tokenizer, prefix=encoder.vocab.prefix, **options
                ),
            )
        if rollout.start:
            self.server = self._start()
            options["revive"] = self.server.revive
        urls = [self.server.url] if self.server else rollout.urls
        transfer = self._transfer(self._transfer_name)
        return VLLMGenerator(urls, transfer, encoder.tokenizer, **options)

    @cached_property
    def _placement(self) -> Placement | None:
        """The GPUs of the server; None if it is not started here, or on no GPU."""
        rollout = self.rollout
        if not rollout.start or (self._policy.device.type != "cuda" and not rollout.devices):
            return None
        return place_server(
            rollout.devices,
            rollout.sleep,
            rollout.transport,
            ahead=rollout.ahead > 0,
            has_adapter=has_adapter(self._policy.model),
            num_processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            num_devices=torch.cuda.device_count(),
        )

    @property
    def _sleeps(self) -> bool:
        """Whether the server frees its GPU memory while the policy is trained."""
        return self._placement.sleeps if self._placement else self.rollout.sleep is True

    @property
    def _transfer_name(self) -> str:
        if self._placement:
            return self._placement.transport
        if self.rollout.transport != "auto":
            return self.rollout.transport
        if has_adapter(self._policy.model):
            return "lora"
        return "nccl" if self._policy.device.type == "cuda" else "disk"

    def _transfer(self, name: str) -> WeightTransfer:
        from valence.rollouts import transports

        if name in ("disk", "lora"):
            # Several runs may name the same folder. Each has a subfolder, where it removes what
            # an earlier process left.
            digest = zlib.crc32(str(self._folder.absolute()).encode())
            shared = self.rollout.folder
            folder = (
                Path(shared) / f"{self._folder.name}-{digest:08x}"
                if shared
                else self._folder / "weights"
            )
            return (
                transports.LoraTransfer(folder)
                if name == "lora"
                else transports.DiskTransfer(folder)
            )
        timeout, copies = self.rollout.timeout, self.rollout.ahead > 0
        if name == "gloo":
            return transports.GlooTransfer(timeout, copies=copies)
        if name == "ipc":
            return transports.IpcTransfer(timeout, self._policy.device, copies=copies)
        return transports.NcclTransfer(timeout, self._policy.device, copies=copies)

    def _start(self) -> Server:
        recipe, placement = self._recipe, self._placement
        extra = ["--trust-remote-code"] if recipe.model.trust_remote_code else []
        if named := recipe.model.tokenizer:
            extra += ["--tokenizer", absolute_model(named)]
        dtype = "bfloat16" if recipe.model.dtype == "bfloat16" else "float32"
        share = recipe.rollout.memory_share
        if share is None and placement and placement.is_shared:
            share = self._server_share()
        server = Server(
            recipe.model.name,
            folder=self._folder / "server",
            python=self.rollout.python,
            transport=self._transfer_name,
            rank=largest_rank(self._policy.model),
            dtype=dtype,
            length=recipe.data.max_length,
            devices=placement.devices if placement else (),
            memory_share=share,
            sleeps=self._sleeps,
            timeout=self.rollout.timeout,
            extra=extra,
        )
        gpus = ", ".join(map(str, placement.devices)) if placement else ""
        where = f" on GPU {gpus}" if gpus else ""
        limit = f" with {share:.0%} of its memory" if share is not None else ""
        self._messages.note_once(f"starting a vLLM server{where}{limit} ({server.log})")
        return server.start()

    @cached_property
    def _folder(self) -> Path:
        return self._run_folder or Path(tempfile.mkdtemp(prefix="valence-"))


def _completions_problem(
    result: Any, num_prompts: int, n: int, sampling: Sampling, vocabulary_size: int
) -> str:
    """What is wrong with the completions of a plugin; empty if nothing is."""
    is_list = isinstance(result, list | tuple)
    groups = cast(Sequence[Any], result) if is_list else ()
    if len(groups) != num_prompts or any(
        not isinstance(group, list | tuple) or len(cast(Sequence[Any], group)) != n
        for group in groups
    ):
        return f"did not return {num_prompts} lists of {n} completions"
    for answer in (answer for group in groups for answer in group):
        if not isinstance(answer, Completion):
            return f"returned a value of type {type(answer).__name__} instead of a Completion"
        tokens = answer.tokens
        if not 1 <= len(tokens) <= sampling.max_new_tokens or not all(
            isinstance(token, int) and 0 <= token < vocabulary_size for token in tokens
        ):
            return (
                f"returned {len(tokens)} tokens, of which there may be 1 to "
                f"{sampling.max_new_tokens}, each below {vocabulary_size}"
            )
        if len(answer.logps) not in (0, len(tokens)) or answer.stop not in ("eos", "length"):
            return (
                f"returned {len(answer.logps)} log-probabilities for {len(tokens)} tokens, or the "
                f"stop {answer.stop!r} instead of eos or length"
            )
    return ""


def _as_example(prompt: Sequence[int], completion: Sequence[int]) -> TokenizedExample:
    ids = tuple(prompt)
    return TokenizedExample(
        id="compared",
        origin=Origin("", 0),
        kind="demonstration",
        prompt_ids=ids,
        prompt_mask=(False,) * len(ids),
        answers=(TokenizedCompletion(tuple(completion), (True,) * len(completion)),),
    )


def make_engine(
    prepared: Prepared,
    state: TrainState,
    messages: Messages,
    folder: Path | None,
    *,
    world: Group,
    server_share: Callable[[], float | None],
) -> RolloutEngine:
    """Return the engine that ``rollout.engine`` names. See ``ServerEngine``."""
    if prepared.recipe.rollout.engine == "hf":
        return make_policy_engine(prepared, state)
    return ServerEngine(prepared, state, messages, folder, world=world, server_share=server_share)


def make_policy_engine(prepared: Prepared, state: TrainState) -> PolicySampler:
    """Return an engine that samples from the policy in this process."""
    return PolicySampler(
        state.policy,
        prepared.encoder,
        version=lambda: state.step,
        batch_size=prepared.completions_per_batch(
            shape_of(state.policy.causal), state.policy.device
        ),
    )
