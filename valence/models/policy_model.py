"""Log-probabilities of the tokens of a micro-batch under a model: the interface between models and
losses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from valence.errors import UserError
from valence.models.adapters import has_adapter, keep_input_dtype
from valence.models.attention import (
    AUTOMATIC_CUDA_BACKENDS,
    NAME,
    KeyValueMemory,
    attention_candidates,
    key_value_memory,
    layout_inputs,
)
from valence.models.checkpointing import Checkpointing
from valence.models.context import (
    ContextGroup,
    TokenShard,
    padded_length,
    shard_table,
)
from valence.models.divergence import Distributions, TeacherDistributions
from valence.models.flex import BLOCK
from valence.models.gradients import write_embedding_gradients
from valence.models.head import (
    MAX_COLUMNS,
    Head,
    TargetLogProb,
    choose_head_backend,
    float32_logits,
    requested_head_backend,
)
from valence.models.layout import segment_table, split_by_gradient
from valence.models.router import (
    ROUTER_AUX_LOSS,
    RouterBalance,
    num_experts_per_token,
    token_weights,
)
from valence.types import MicroBatch, PolicyOutput, sent

_RowOutputs = tuple[Tensor, dict[str, Tensor]]
"""Rows, and columns of ``PolicyOutput`` for them."""
CPU_TOKEN_MULTIPLE = 16


class LocalStates(NamedTuple):
    """Hidden states [n, h] of rows of a micro-batch.

    place[T]: the place of each row's state, -1 if another process has it; None: the states are
    those of all rows.
    """

    states: Tensor
    place: Tensor | None = None

    def at(self, rows: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Return the states of those of these rows that this process has, and which of them these
        are.
        """
        if self.place is None:
            return self.states[rows], slice(None)
        place = self.place[rows]
        is_local = place >= 0
        return self.states[place[is_local]], is_local


def local_states(states: Tensor, rows: Tensor, total: int) -> LocalStates:
    """Return the hidden states [n, h] of rows[n] of a micro-batch of ``total`` rows."""
    place = torch.full((total,), -1, device=states.device)
    place[rows] = torch.arange(len(rows), device=states.device)
    return LocalStates(states, place)


def _answer_other_callers(decoder: Any, stock_attention: str) -> None:
    """Let a decoder that packs sequences compute calls from outside with its own attention and
    without checkpointing, such as ``model(ids)`` and ``model.generate`` of the user who passed the
    model.
    """
    if "stock_attention" not in vars(decoder):
        decoder.register_forward_pre_hook(_prepare_call, with_kwargs=True)
        decoder.register_forward_hook(_end_call, always_call=True)
    decoder.stock_attention = stock_attention


def _prepare_call(decoder: Any, _: Any, kwargs: Mapping[str, Any]) -> None:
    _end_call(decoder)  # PyTorch skips the hook after a call that KeyboardInterrupt ended
    if decoder.config._attn_implementation == NAME and "prefix_tree" not in kwargs:
        decoder.set_attn_implementation(decoder.stock_attention)
        # Layers would run again with the packed attention, or in another dtype.
        decoder.paused_checkpointing = [
            layer for layer in decoder.modules() if getattr(layer, "gradient_checkpointing", False)
        ]
        for layer in decoder.paused_checkpointing:
            layer.gradient_checkpointing = False


def _end_call(decoder: Any, *_: Any) -> None:
    if (layers := vars(decoder).pop("paused_checkpointing", None)) is not None:
        for layer in layers:
            layer.gradient_checkpointing = True
        decoder.set_attn_implementation(NAME)


class PolicyModel(nn.Module):
    """A causal language model that returns the log-probabilities of given tokens.

    Sequences are packed into a prefix tree: a shared prefix is stored once, and each sequence only
    attends to its own path in the tree. If a check at the start finds that packing changes the
    model's output, the model runs one sequence at a time, which is slower and always exact.

    compute: dtype of matrix products, if it differs from that of the trained weights (bfloat16 with
    float32 master weights).
    """

    compiled_layers: Sequence[Any] = ()
    """The decoder layers that are compiled."""
    checkpointing: Checkpointing = "off"
    """Which decoder layers run again in the backward pass."""
    max_joint_rows = 48
    """Rows without a gradient, up to which they are computed in the same pass as the others."""
    max_columns = MAX_COLUMNS
    """Columns of the logits that exist at once."""
    is_sharded = False
    """Whether the weights are split over processes, which then run each forward together."""
    is_tensor_parallel = False
    """Whether other processes compute a part of each product of this process's rows."""
    context: ContextGroup | None = None
    """The processes that share the tokens of a micro-batch; None: this process has all of them."""
    compute_device: torch.device | None = None
    """The device of the computation, if the weights are stored on another one."""
    temperature: float
    """Divides the logits, as when completions are sampled."""
    head_backend: str | None
    """Name of the backend that computed the head most recently (``head.HEAD_BACKENDS``)."""
    attention_backend: str
    """Name of the backend of packed attention (see ``attention.attention_candidates``)."""

    def __init__(self, model: nn.Module, *, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute, self.temperature = compute, 1.0
        self.requested_head_backend = requested_head_backend()
        self.head_backend = None
        self.critic: Critic | None = None  # set by ``values.add_values``
        # With sharded weights, the maximum of a number over all processes.
        self.max_over_ranks: Callable[[int], int] = int
        implementation: str = self.causal.config._attn_implementation
        self.attention_candidates = attention_candidates(self.device)
        self.attention_backend = self.attention_candidates[0]
        # A model that was in a PolicyModel before has recorded its original attention.
        self.stock_attention: str = (
            self.causal.stock_attention if implementation == NAME else implementation
        )
        if self.stock_attention == "sdpa" and getattr(
            self.causal.config, "attn_logit_softcapping", None
        ):
            # SDPA has no soft-cap, and transformers 5.17 silently omits it.
            self.stock_attention = "eager"
        self.causal.stock_attention = self.stock_attention
        _answer_other_callers(self.causal.base_model, self.stock_attention)
        write_embedding_gradients(self.causal)
        self.lay_out(packed=self.attention_backend != "one_by_one")

    @property
    def computation(self) -> str:
        """Settings besides the weights that results depend on: dtype, layout, temperature and
        backend. Part of the keys of the reference cache.
        """
        temperature = "" if self.temperature == 1 else f" temperature {self.temperature!r}"
        backend = self.requested_head_backend
        head = "" if backend == "auto" else f" head {backend}"
        is_default = not self.packs or self.attention_backend in (
            "auto",
            AUTOMATIC_CUDA_BACKENDS[0],
        )
        attention = "" if is_default else f" attention {self.attention_backend}"
        return (
            f"{self.compute} "
            f"{'prefix tree' if self.packs else 'one by one'}"
            f"{' compiled' if self.compiled else ''}{temperature}{head}{attention}"
        )

    @property
    def shares_rows(self) -> bool:
        """Whether other processes take part in the forward of this process's rows."""
        return self.is_tensor_parallel or self.context is not None

    @property
    def causal(self) -> Any:
        """The Hugging Face model itself, inside an adapter's wrapper if there is one."""
        inner: Any = self.model
        return inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the model has an embedding for."""
        return int(self.causal.get_input_embeddings().weight.shape[0])

    def lay_out(self, *, packed: bool, attention: str | None = None) -> None:
        """Run packed sequences, or one sequence at a time with the model's own attention.

        attention: the backend of packed attention; None: as before.
        """
        self.packs = packed
        self.attention_backend = attention or self.attention_backend
        # Not set around each forward, because checkpointed layers run again in the backward pass.
        self.causal.set_attn_implementation(NAME if packed else self.stock_attention)
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.lay_out(packed=packed, attention=attention)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """Inside the block the model has its own attention and runs without compiled programs, as
        everything but packed micro-batches needs. Sampling would compile too many programs.
        """
        self.causal.set_attn_implementation(self.stock_attention)
        # Not with a setting of the compiler: those hold for all models and threads.
        programs = [
            (layer, layer._compiled_call_impl, vars(layer).pop("forward", None))
            for layer in self.compiled_layers
        ]
        try:
            for layer, _, _ in programs:
                layer._compiled_call_impl = None
            yield
        finally:
            for layer, call, forward in programs:
                layer._compiled_call_impl = call
                if forward is not None:
                    layer.forward = forward
            if self.packs:
                self.causal.set_attn_implementation(NAME)

    @property
    def compiled(self) -> bool:
        """Whether the decoder layers are compiled."""
        return bool(self.compiled_layers)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """``stock``, with the products of packed micro-batches.

        Weights are cast once per block. On a CPU float32 weights are not cast, which was measured
        to be faster for few rows.
        """
        head: Any = self.causal.get_output_embeddings()
        is_uncast = self.device.type == "cpu" and head.weight.dtype != self.compute
        is_plain = type(head) is nn.Linear and not hasattr(head.weight, "placements")
        has_float32_logits = self.compute == torch.bfloat16 and is_plain and not is_uncast
        with self.stock(), nullcontext() if is_uncast else self.autocast():
            try:
                if has_float32_logits:
                    vars(head)["forward"] = partial(float32_logits, head)
                yield
            finally:
                if has_float32_logits:
                    del vars(head)["forward"]

    @contextmanager
    def tempered(self, temperature: float) -> Iterator[None]:
        """Inside the block, log-probabilities are computed at this temperature."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return self.compute_device or next(self.model.parameters()).device

    def with_gathered_weights(self, action: Callable[[], Any]) -> Any:
        """Return the result of an action that runs the model itself; with sharded weights, the
        embedding and the head are gathered for it.
        """
        return action()

    def forward(
        self,
        batch: MicroBatch,
        want: Collection[str] = (),
        teacher: TeacherDistributions | None = None,
    ) -> PolicyOutput:
        """Compute the log-probability of each token that a loss reads, given the tokens before it.

        Only sequences with requires_grad have a gradient. want: names of further outputs, from
        entropy, sum_sq (without gradient), value and router_aux_loss (see ``PolicyOutput``).
        teacher: its distributions at the tokens of the sequences with a gradient, for the outputs
        divergence and teacher. Raises ValueError if value is requested from a model without a
        critic.
        """
        if "value" in want and self.critic is None:
            raise ValueError("there is no critic: call valence.models.values.add_values first")
        balance = self._router_balance(want)
        want = [name for name in want if name != ROUTER_AUX_LOSS]
        out = (
            self._packed(batch, want, balance, teacher)
            if self.packs
            else self._one_by_one(batch, want, balance)
        )
        return out if balance is None else replace(out, router_aux_loss=balance.loss())

    def _router_balance(self, want: Collection[str]) -> RouterBalance | None:
        """Return an accumulator of the routers' choices if their loss is requested."""
        if ROUTER_AUX_LOSS not in want:
            return None
        count = num_experts_per_token(self.causal)
        if count is None:
            raise ValueError(
                f"{type(self.causal).__name__} has no router: see "
                f"valence.models.router.check_router"
            )
        return RouterBalance(count)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Inside the block products are computed in ``compute``."""
        if self.compute is None:
            yield
            return
        adapter = keep_input_dtype(self.model) if has_adapter(self.model) else nullcontext()
        with torch.autocast(self.device.type, self.compute), adapter:
            yield

    def _packed(
        self,
        batch: MicroBatch,
        want: Collection[str],
        balance: RouterBalance | None,
        teacher: TeacherDistributions | None,
    ) -> PolicyOutput:
        outputs: list[_RowOutputs] = []
        with self.autocast():
            hidden = self._hidden(batch, balance)
            head = self._output_layer(hidden)
            self.head_backend = choose_head_backend(head, hidden.states)
            critic = self.critic if "value" in want else None
            critic_hidden = (
                hidden if critic is None or critic.trunk is None else critic.trunk.states(batch)
            )
            for requires_grad in sorted(set(batch.requires_grad), reverse=True):
                rows = batch.part(requires_grad=requires_grad).scored
                previous = batch.previous[rows]
                with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
                    states, is_local = hidden.at(previous)
                    rows = rows[is_local]
                    columns: dict[str, Tensor] = {}
                    if "sum_sq" in want:
                        columns["sum_sq"] = head.sum_sq(states)
                    if critic is not None:
                        columns["value"] = critic(critic_hidden.at(previous)[0])
                    if teacher is None:
                        logp, entropy = head(states, batch.tokens[rows], "entropy" in want)
                        columns |= {"logp": logp} | (
                            {} if entropy is None else {"entropy": entropy}
                        )
                    else:
                        local = teacher.at(is_local)
                        columns |= local.divergence(head, states, batch.tokens[rows])._asdict()
                    outputs.append((rows, columns))
        return _scatter(batch, outputs, self.context)

    def _output_layer(self, hidden: LocalStates) -> Head:
        return Head.of(
            self.causal,
            rounds_to_bfloat16=(self.compute or hidden.states.dtype) == torch.bfloat16,
            temperature=self.temperature,
            backend=self.requested_head_backend,
            max_columns=self.max_columns,
        )

    @torch.no_grad()
    def distributions(
        self, batch: MicroBatch, rows: Tensor, top_k: int | None = None
    ) -> Distributions:
        """Return the distributions of the tokens in these rows [N], given the tokens before them.

        top_k: not read; complete distributions contain the most likely tokens. Raises UserError for
        a model that runs one sequence at a time.
        """
        if not self.packs:
            raise UserError(
                f"{type(self.causal).__name__} cannot pack sequences, so distributions over its "
                f"vocabulary are not available",
                code="distribution-unavailable",
                where="loss.target",
                fix="set loss.target: token",
            )
        with self.autocast():
            hidden = self._hidden(batch)
            states, is_local = hidden.at(batch.previous[rows])
            if self.context is not None:  # the policy's rows may be those of other processes
                complete = states.new_zeros(len(rows), states.shape[1])
                complete[is_local] = states
                states = self.context.sum(complete)
            return Distributions(self._output_layer(hidden), states, self.vocabulary)

    def states(self, batch: MicroBatch, balance: RouterBalance | None = None) -> LocalStates:
        """Return the decoder's last hidden states of the rows of this process, packed. balance:
        accumulates how the tokens are routed.
        """
        with self.autocast():
            return self._hidden(batch, balance)

    def states_alone(self, tokens: Tensor, balance: RouterBalance | None = None) -> Tensor:
        """Return the decoder's last hidden states [n, h] of a single sequence tokens[n]. balance:
        accumulates how the tokens are routed.
        """
        self._reset_rotary_lengths()
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        with self.autocast():
            outputs = decoder(input_ids=tokens[None], use_cache=False, **_router_outputs(balance))
            if balance is not None:
                balance.add(outputs.router_logits, torch.ones(len(tokens), device=tokens.device))
            return outputs.last_hidden_state[0]

    def _hidden(self, batch: MicroBatch, balance: RouterBalance | None = None) -> LocalStates:
        """Return the decoder's last hidden states.

        Rows that belong only to sequences without a gradient run in a second pass without one, and
        attend to the keys and values of the first pass. A few of them are computed in the first
        pass, which is cheaper than a second one.
        """
        grad = torch.is_grad_enabled() and any(batch.requires_grad)
        routing = None if balance is None else (balance, token_weights(batch))
        with torch.set_grad_enabled(grad):
            if not grad or all(batch.requires_grad):
                return self._all_decoded(batch, routing)
            split = split_by_gradient(
                batch.segments,
                [batch.path(leaf) for leaf in batch.leaves],
                batch.requires_grad,
                self._padded,
            )
            if len(split.no_grad_rows) <= self.max_joint_rows:
                return self._all_decoded(batch, routing)
            first_rows = sent(split.grad_rows, self.device)
            second_rows = sent(split.no_grad_rows, self.device)
            memory = KeyValueMemory(self._padded(len(first_rows)))
            with key_value_memory(memory, is_reading=False):
                first_routing = None if routing is None else (routing[0], routing[1][first_rows])
                first, first_places = self._decoded(
                    batch.tokens[first_rows],
                    batch.position_ids[first_rows],
                    split.grad_table,
                    first_routing,
                )
            with torch.no_grad(), key_value_memory(memory, is_reading=True):
                second, second_places = self._decoded(
                    batch.tokens[second_rows], batch.position_ids[second_rows], split.no_grad_table
                )
            states = torch.cat([first, second])
            if first_places is None or second_places is None:
                return LocalStates(states[torch.cat([first_rows, second_rows]).argsort()])
            rows = torch.cat([first_rows[first_places], second_rows[second_places]])
            return local_states(states, rows, len(batch.tokens))

    def _all_decoded(
        self, batch: MicroBatch, routing: tuple[RouterBalance, Tensor] | None
    ) -> LocalStates:
        """Return the hidden states of all rows of a micro-batch, from one pass."""
        table = segment_table(batch.segments)
        states, rows = self._decoded(batch.tokens, batch.position_ids, table, routing)
        if rows is None:
            return LocalStates(states)
        return local_states(states, rows, len(batch.tokens))

    def _padded(self, tokens: int) -> int:
        """Return the number of rows of a pass after padding."""
        pad = partial(padded_size, device=self.device.type)
        if self.context is None:
            return pad(tokens)
        return padded_length(tokens, self.context.size, pad)

    def _decoded(
        self,
        tokens: Tensor,
        pos: Tensor,
        prefix_tree: Tensor,
        routing: tuple[RouterBalance, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states [n, h] of tokens[T] at positions pos[T], and which tokens [n] they
        are of; None: of all.

        prefix_tree: the segment table of ``layout.py``. routing: accumulates how the tokens are
        routed, with their weights [T].
        """
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        count = len(tokens)
        # Products of round sizes are faster, and compiled programs get few shapes. The padding is a
        # separate sequence.
        padding = self._padded(count) - count
        if padding:
            end = int(prefix_tree[:, 1].max())
            prefix_tree = torch.cat(
                [prefix_tree, prefix_tree.new_tensor([[end, end + padding, -1, 1]])]
            )
            tokens = torch.cat([tokens, tokens.new_zeros(padding)])
            pos = torch.cat([pos, pos.new_zeros(padding)])
        options: dict[str, Any] = _router_outputs(routing)
        rows: Tensor | None = None
        if self.context is not None:
            shard = TokenShard.of(self.context, len(tokens), self.device)
            prefix_tree = shard_table(prefix_tree, shard)
            rows = sent(shard.rows, self.device)
            tokens, pos = tokens[rows], pos[rows]
            options["shard"] = shard
            rows = rows[: int((shard.rows < count).sum())]  # padding comes last
        options |= layout_inputs(prefix_tree, self._windows, self.device, self.attention_backend)
        # Without a mask, transformers would derive one from the positions, and block on the device.
        mask = torch.ones_like(tokens[None])
        outputs = decoder(
            input_ids=tokens[None],
            attention_mask=mask,
            position_ids=pos[None],
            use_cache=False,
            prefix_tree=prefix_tree,
            **options,
        )
        if routing is not None:
            balance, weights = routing
            balance.add(outputs.router_logits, weights)
        return outputs.last_hidden_state[0, : count if rows is None else len(rows)], rows

    @property
    def _windows(self) -> tuple[int, ...]:
        """The windows of the model's layers; 0 for layers without."""
        window = getattr(self.causal.config.get_text_config(), "sliding_window", None)
        return (0, window) if isinstance(window, int) else (0,)

    def _one_by_one(
        self, batch: MicroBatch, want: Collection[str], balance: RouterBalance | None
    ) -> PolicyOutput:
        outputs: list[_RowOutputs] = []
        critic = self.critic if "value" in want else None
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        for s, path in self._sequences(batch):
            read = torch.nonzero(batch.loss_mask[path] & (batch.sequence_ids[path] == s)).squeeze(1)
            tokens = batch.tokens[path]
            with torch.set_grad_enabled(batch.requires_grad[s] and torch.is_grad_enabled()):
                counting = balance if batch.requires_grad[s] else None
                with record_outputs(decoder) as decoded:
                    logits = self._outputs(tokens, read - 1, **_router_outputs(counting))
                if counting is not None:
                    counting.add(
                        decoded[0].router_logits, torch.ones(len(tokens), device=tokens.device)
                    )
                logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
                logits = logits if self.temperature == 1 else logits / self.temperature
                logps = torch.log_softmax(logits, -1) if want else logits
                entropy = -(logps.exp() * logps).sum(-1) if "entropy" in want else None
                squares = (2 * logps.detach()).exp().sum(-1) if "sum_sq" in want else None
                value = None
                if critic is not None:
                    states = (
                        decoded[0].last_hidden_state[0]
                        if critic.trunk is None
                        else critic.trunk.states_alone(tokens)
                    )
                    value = critic(states[read - 1])
                logp: Any = TargetLogProb.apply(logits, tokens[read])
                columns = {"logp": logp, "entropy": entropy, "sum_sq": squares, "value": value}
                columns = {name: x for name, x in columns.items() if x is not None}
                outputs.append((path[read], columns))
        out = _scatter(batch, outputs[: batch.sequences])
        repeated = zero_with_gradient(columns["logp"] for _, columns in outputs[batch.sequences :])
        return replace(out, logp=out.logp + repeated)

    def _sequences(self, batch: MicroBatch) -> Iterator[tuple[int, Tensor]]:
        """Yield each sequence and the rows of its tokens.

        With sharded weights, the last one is repeated until all processes have yielded equally
        many.
        """
        for s in range(self.max_over_ranks(batch.sequences)):
            s = min(s, batch.sequences - 1)
            yield s, batch.rows(s)

    def outputs(self, tokens: Tensor) -> Tensor:
        """Return the outputs of the model's own forward for a single sequence tokens[n]: logits
        [n, V], or scores [n, A] of a reward model.
        """
        # A copy: sharded weights would miss the gradient of a view.
        return self._outputs(tokens, None).clone()

    def _outputs(self, tokens: Tensor, at: Tensor | None, **options: Any) -> Tensor:
        self._reset_rotary_lengths()
        keep = 0 if at is None else at
        with self.autocast():
            return self.causal(
                input_ids=tokens[None], use_cache=False, logits_to_keep=keep, **options
            ).logits[0]

    def _reset_rotary_lengths(self) -> None:
        """Reset rotary frequencies that depend on the lengths of earlier sequences."""
        for module in rotary_by_length(self.causal):
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device, copy=True)
            module.max_seq_len_cached = module.original_max_seq_len


class Critic(nn.Module):
    """V(state) = w . h + b, with the last hidden state h of the state's last token, of the policy
    or of a separate trunk (Schulman et al. 2016, arXiv 1506.02438; for language models Ziegler et
    al. 2019, arXiv 1909.08593).
    """

    def __init__(self, policy: PolicyModel, trunk: PolicyModel | None) -> None:
        super().__init__()
        embedding = policy.causal.get_input_embeddings().weight
        dtype = torch.promote_types(torch.float32, embedding.dtype)
        width: int = policy.causal.config.get_text_config().hidden_size
        # Random initial values would be overwritten, and would advance the random generator.
        self.head: Any = nn.utils.skip_init(nn.Linear, width, 1, device=policy.device, dtype=dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trunk = trunk

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values [N] of hidden[N, h], in float32 or float64."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(1)


def rotary_by_length(model: nn.Module) -> list[Any]:
    """Return the modules whose rotary frequencies depend on the longest position."""
    kinds = [(module, str(getattr(module, "rope_type", ""))) for module in model.modules()]
    return [module for module, kind in kinds if "dynamic" in kind or "longrope" in kind]


@contextmanager
def record_outputs(module: nn.Module) -> Iterator[list[Any]]:
    """Collect the outputs of a module inside the block."""
    outputs: list[Any] = []
    handle = module.register_forward_hook(lambda _module, _inputs, out: outputs.append(out))
    try:
        yield outputs
    finally:
        handle.remove()


def _router_outputs(collector: object | None) -> dict[str, bool]:
    """Return the argument that makes a model return its router logits, if there is a collector."""
    return {} if collector is None else {"output_router_logits": True}


def padded_size(tokens: int, device: str) -> int:
    """Return the number of tokens of a pass after padding.

    On CUDA there are few sizes, at most an eighth apart. They are multiples of FlexAttention's
    blocks, since its kernel for incomplete blocks does not support many shapes of heads.
    """
    if device != "cuda":
        return tokens + -tokens % CPU_TOKEN_MULTIPLE
    return tokens + -tokens % max(BLOCK, 2 ** (tokens.bit_length() - 4))


def zero_with_gradient(values: Iterable[Tensor]) -> Tensor | int:
    """Return 0 with a zero gradient with respect to these tensors, even if they are not finite."""
    return sum(x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0).sum() for x in values)


def _scatter(
    batch: MicroBatch, outputs: list[_RowOutputs], context: ContextGroup | None = None
) -> PolicyOutput:
    """Return the outputs of all processes in columns [T], 0 outside their rows."""
    index = (torch.cat([rows for rows, _ in outputs]),)
    columns = {name: torch.cat([c[name] for _, c in outputs]) for name in outputs[0][1]}
    blank = columns["logp"].new_zeros(batch.tokens.shape[0])
    columns = {name: blank.index_put(index, x) for name, x in columns.items()}
    if context is not None:
        columns = {name: context.sum(x) for name, x in columns.items()}
    return PolicyOutput(**columns)
