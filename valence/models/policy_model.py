"""Log-probabilities of the tokens of a micro-batch under a model: the seam between systems work and
algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from valence.models.adapters import has_adapter, keep_input_dtype
from valence.models.attention import NAME, KeyValueMemory, key_value_memory
from valence.models.flex import BLOCK, visible
from valence.models.gradients import write_embedding_gradients
from valence.models.head import (
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

_Found = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Rows, and what was found there: log-probability, entropy, sum of squared probabilities, value."""
ROUND = 16  # tokens


class PolicyModel(nn.Module):
    """A causal language model that answers with log-probabilities of given tokens.

    The layout is a forest (sequences end to end, what they share once, each seeing its own path
    alone) where a start-up check finds it equal to the model's own forward, else one sequence at a
    time, which is slower and always exact. ``compute``: the type of the products when it differs
    from that of the weights that train (bfloat16 over float32 masters).
    """

    compiled = False  # whether the layers are
    along = 48  # rows that are only measured, up to which they go along with those that train
    # whether the weights are split over processes, so that each run is one of all of them
    is_sharded = False
    shared = False  # whether other processes take part in each run of this one's rows
    home: torch.device | None = None  # where it computes, when its weights are kept elsewhere
    temperature: (
        float  # divides the logits: all log-probabilities are those of answers that were sampled so
    )

    def __init__(self, model: nn.Module, *, compute: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.compute, self.temperature = compute, 1.0
        self.requested_head_backend = requested_head_backend()
        self.head_backend: str | None = None
        self.critic: Critic | None = None  # given by ``values.add_values``
        self.most: Callable[[int], int] = (
            int  # of the numbers of all processes that run in lockstep
        )
        # A model may have been given to an engine before: its own attention is then on record.
        found: str = self.causal.config._attn_implementation
        self.flexes = self.device.type == "cuda"
        self.stock_attention: str = found if found != NAME else self.causal.stock_attention
        if self.stock_attention == "sdpa" and getattr(
            self.causal.config, "attn_logit_softcapping", None
        ):
            # SDPA has no soft-capping, and transformers 5.17 leaves it out without a word
            self.stock_attention = "eager"
        self.causal.stock_attention = self.stock_attention
        write_embedding_gradients(self.causal)
        self.lay_out(packed=True)

    @property
    def how(self) -> str:
        """What values depend on besides the weights: product type, layout and temperature."""
        temperature = "" if self.temperature == 1 else f" temperature {self.temperature!r}"
        backend = self.requested_head_backend
        head = "" if backend == "auto" else f" head {backend}"
        return (
            f"{self.compute} "
            f"{'forest' if self.packs else 'one by one'}"
            f"{' compiled' if self.compiled else ''}{temperature}{head}"
        )

    @property
    def causal(self) -> Any:
        """The Hugging Face model itself, inside an adapter's wrapper if there is one."""
        inner: Any = self.model
        return inner.get_base_model() if hasattr(inner, "get_base_model") else inner

    def lay_out(self, *, packed: bool) -> None:
        """From now on packed, or one sequence at a time with the model's own attention."""
        self.packs = packed
        # For good, not around each forward: a checkpointed layer runs again in the backward pass.
        self.causal.set_attn_implementation(NAME if packed else self.stock_attention)
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.lay_out(packed=packed)

    @contextmanager
    def stock(self) -> Iterator[None]:
        """The model with its own attention inside the block, and without compiled programs: for all
        but packed micro-batches. When answers are sampled every layer would become a program of its
        own, and soon be one too many.
        """
        self.causal.set_attn_implementation(self.stock_attention)
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            if self.packs:
                self.causal.set_attn_implementation(NAME)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """As ``stock``, with products as those of packed micro-batches.

        Weights that this makes narrower are so once a block. But on a CPU float32 weights are
        multiplied as they are: for few rows at a time that was measured to be faster.
        """
        head: Any = self.causal.get_output_embeddings()
        as_they_are = self.device.type == "cpu" and head.weight.dtype != self.compute
        plain = type(head) is nn.Linear and not hasattr(head.weight, "placements")
        keeps_logits_wide = self.compute == torch.bfloat16 and plain and not as_they_are
        with self.stock(), nullcontext() if as_they_are else self.autocast():
            try:
                if keeps_logits_wide:
                    vars(head)["forward"] = partial(float32_logits, head)
                yield
            finally:
                if keeps_logits_wide:
                    del vars(head)["forward"]

    @contextmanager
    def tempered(self, temperature: float) -> Iterator[None]:
        """Inside the block, log-probabilities are those at this temperature."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    @property
    def device(self) -> torch.device:
        return self.home or next(self.model.parameters()).device

    def within(self, action: Callable[[], Any]) -> Any:
        """What an action gives that runs the model itself: embedding and head are whole
        meanwhile.
        """
        return action()

    def forward(self, batch: MicroBatch, want: Collection[str] = ()) -> PolicyOutput:
        """Log-probability of each token that a loss reads, given the tokens before it.

        Only sequences with requires_grad have a gradient. want: further outputs, of entropy,
        sum_sq (without gradient), value and router_aux_loss: see PolicyOutput. Raises ValueError
        for values of a model without a critic.
        """
        if "value" in want and self.critic is None:
            raise ValueError("there is no critic: call valence.models.values.add_values first")
        balance = self._router_balance(want)
        want = [name for name in want if name != ROUTER_AUX_LOSS]
        out = (
            self._as_forest(batch, want, balance)
            if self.packs
            else self._one_by_one(batch, want, balance)
        )
        return out if balance is None else replace(out, router_aux_loss=balance.loss())

    def _router_balance(self, want: Collection[str]) -> RouterBalance | None:
        """Return what collects the routers' choices in a forward pass, if their loss is wanted."""
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
        """The type of the products inside the block."""
        if self.compute is None:
            yield
            return
        narrow = keep_input_dtype(self.model) if has_adapter(self.model) else nullcontext()
        with torch.autocast(self.device.type, self.compute), narrow:
            yield

    def _as_forest(
        self, batch: MicroBatch, want: Collection[str], balance: RouterBalance | None
    ) -> PolicyOutput:
        found: list[_Found] = []
        with self.autocast():
            hidden = self._hidden(batch, balance)
            head = Head.of(
                self.causal,
                rounds_to_bfloat16=(self.compute or hidden.dtype) == torch.bfloat16,
                temperature=self.temperature,
                backend=self.requested_head_backend,
            )
            self.head_backend = choose_head_backend(head, hidden, "entropy" in want)
            critic = self.critic if "value" in want else None
            theirs = (
                hidden if critic is None or critic.trunk is None else critic.trunk.states(batch)
            )
            for trains in sorted(set(batch.requires_grad), reverse=True):
                ours = batch.part(requires_grad=trains).scored
                with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
                    before = hidden[batch.previous[ours]]
                    squares = head.sum_sq(before) if "sum_sq" in want else None
                    value = None if critic is None else critic(theirs[batch.previous[ours]])
                    found.append(
                        (ours, *head(before, batch.tokens[ours], "entropy" in want), squares, value)
                    )
        return _scatter(batch, found)

    def states(self, batch: MicroBatch, balance: RouterBalance | None = None) -> Tensor:
        """The decoder's last hidden states [T, h], packed. balance: counts how the tokens are
        routed.
        """
        with self.autocast():
            return self._hidden(batch, balance)

    def states_alone(self, tokens: Tensor, balance: RouterBalance | None = None) -> Tensor:
        """The decoder's last hidden states [n, h] of one sequence tokens[n] by itself. balance:
        counts how they are routed.
        """
        self._forget_lengths()
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        with self.autocast():
            found = decoder(input_ids=tokens[None], use_cache=False, **_router_outputs(balance))
            if balance is not None:
                balance.add(found.router_logits, torch.ones(len(tokens), device=tokens.device))
            return found.last_hidden_state[0]

    def _hidden(self, batch: MicroBatch, balance: RouterBalance | None = None) -> Tensor:
        """The decoder's last hidden states [T, h].

        Rows that only measured sequences have are run without a gradient, over the keys and values
        of those that train; a few of them go along with the others, which is cheaper than a second
        pass.
        """
        grad = torch.is_grad_enabled() and any(batch.requires_grad)
        counted = None if balance is None else (balance, token_weights(batch))
        with torch.set_grad_enabled(grad):
            if not grad or all(batch.requires_grad):
                return self._decoded(
                    batch.tokens, batch.position_ids, segment_table(batch.segments), counted
                )
            padded_length = partial(filled, device=self.device.type)
            split = split_by_gradient(
                batch.segments,
                [batch.path(leaf) for leaf in batch.leaves],
                batch.requires_grad,
                padded_length,
            )
            if len(split.no_grad_rows) <= self.along:
                return self._decoded(
                    batch.tokens, batch.position_ids, segment_table(batch.segments), counted
                )
            first_rows = sent(split.grad_rows, self.device)
            second_rows = sent(split.no_grad_rows, self.device)
            memory = KeyValueMemory(padded_length(len(first_rows)))
            with key_value_memory(memory, is_reading=False):
                weights = None if counted is None else (counted[0], counted[1][first_rows])
                first = self._decoded(
                    batch.tokens[first_rows],
                    batch.position_ids[first_rows],
                    split.grad_table,
                    weights,
                )
            with torch.no_grad(), key_value_memory(memory, is_reading=True):
                second = self._decoded(
                    batch.tokens[second_rows], batch.position_ids[second_rows], split.no_grad_table
                )
            return torch.cat([first, second])[torch.cat([first_rows, second_rows]).argsort()]

    def _decoded(
        self,
        tokens: Tensor,
        pos: Tensor,
        forest: Tensor,
        counted: tuple[RouterBalance, Tensor] | None = None,
    ) -> Tensor:
        """[T, h] of tokens[T] at pos[T]; forest: the table of ``layout.py``. counted: what counts
        how the tokens are routed, and their weights [T].
        """
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        count = len(tokens)
        # Products of round sizes are faster, and compiled ones meet few shapes: what is missing is
        # a sequence of its own.
        missing = filled(count, self.device.type) - count
        if missing:
            end = int(forest[:, 1].max())
            forest = torch.cat([forest, forest.new_tensor([[end, end + missing, -1, 1]])])
            tokens, pos = (
                torch.cat([tokens, tokens.new_zeros(missing)]),
                torch.cat([pos, pos.new_zeros(missing)]),
            )
        more: dict[str, Any] = (
            {"visible": visible(forest, self._windows, self.device)} if self.flexes else {}
        )
        more |= _router_outputs(counted)
        # Without a mask, transformers would look into the positions for one, and wait for the
        # device.
        mask = torch.ones_like(tokens[None])
        found = decoder(
            input_ids=tokens[None],
            attention_mask=mask,
            position_ids=pos[None],
            use_cache=False,
            forest=forest,
            **more,
        )
        if counted is not None:
            balance, weights = counted
            balance.add(found.router_logits, weights)
        return found.last_hidden_state[0, :count]

    @property
    def _windows(self) -> tuple[int, ...]:
        """The windows of the model's layers; 0 for layers without."""
        own = getattr(self.causal.config.get_text_config(), "sliding_window", None)
        return (0, own) if isinstance(own, int) else (0,)

    def _one_by_one(
        self, batch: MicroBatch, want: Collection[str], balance: RouterBalance | None
    ) -> PolicyOutput:
        found: list[_Found] = []
        critic = self.critic if "value" in want else None
        decoder = getattr(self.causal, self.causal.base_model_prefix)
        for s, path in self._alone(batch):
            read = torch.nonzero(batch.loss_mask[path] & (batch.sequence_ids[path] == s)).squeeze(1)
            tokens = batch.tokens[path]
            with torch.set_grad_enabled(batch.requires_grad[s] and torch.is_grad_enabled()):
                counted = balance if batch.requires_grad[s] else None
                with said_by(decoder) as said:
                    logits = self._outputs(tokens, read - 1, **_router_outputs(counted))
                if counted is not None:
                    counted.add(
                        said[0].router_logits, torch.ones(len(tokens), device=tokens.device)
                    )
                logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
                logits = logits if self.temperature == 1 else logits / self.temperature
                logps = torch.log_softmax(logits, -1) if want else logits
                spread = -(logps.exp() * logps).sum(-1) if "entropy" in want else None
                squares = (2 * logps.detach()).exp().sum(-1) if "sum_sq" in want else None
                value = None
                if critic is not None:
                    states = (
                        said[0].last_hidden_state[0]
                        if critic.trunk is None
                        else critic.trunk.states_alone(tokens)
                    )
                    value = critic(states[read - 1])
                logp: Any = TargetLogProb.apply(logits, tokens[read])
                found.append((path[read], logp, spread, squares, value))
        out = _scatter(batch, found[: batch.sequences])
        return replace(
            out, logp=out.logp + nothing(logp for _, logp, *_ in found[batch.sequences :])
        )

    def _alone(self, batch: MicroBatch) -> Iterator[tuple[int, Tensor]]:
        """Each sequence and the rows of its tokens.

        In lockstep the last one comes again as often as another process has more.
        """
        for s in range(self.most(batch.sequences)):
            s = min(s, batch.sequences - 1)
            yield s, batch.rows(s)

    def outputs(self, tokens: Tensor) -> Tensor:
        """Outputs of the model's own forward for one sequence tokens[n] by itself: logits [n, V],
        or scores [n, A] of a reward model.
        """
        return self._outputs(
            tokens, None
        ).clone()  # not a view of something larger, by which sharded weights would miss its slope

    def _outputs(self, tokens: Tensor, at: Tensor | None, **more: Any) -> Tensor:
        self._forget_lengths()
        keep = 0 if at is None else at
        with self.autocast():
            return self.causal(
                input_ids=tokens[None], use_cache=False, logits_to_keep=keep, **more
            ).logits[0]

    def _forget_lengths(self) -> None:
        """The lengths of earlier sequences must not stay in rotary frequencies."""
        for module in rotary_by_length(self.causal):
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device, copy=True)
            module.max_seq_len_cached = module.original_max_seq_len


class Critic(nn.Module):
    """V(state) = w . h + b, h being the last hidden state of the token that the state ends with:
    the policy's own, or that of a trunk of its own (Schulman et al. 2016, arXiv 1506.02438; for
    language models Ziegler et al. 2019, arXiv 1909.08593).
    """

    def __init__(self, policy: PolicyModel, trunk: PolicyModel | None) -> None:
        super().__init__()
        embedding = policy.causal.get_input_embeddings().weight
        wide = torch.promote_types(torch.float32, embedding.dtype)
        width: int = policy.causal.config.get_text_config().hidden_size
        # Its own random start would be overwritten, and must not move the generator that later
        # draws come from.
        self.head: Any = nn.utils.skip_init(nn.Linear, width, 1, device=policy.device, dtype=wide)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.trunk = trunk

    def forward(self, hidden: Tensor) -> Tensor:
        """[N] of hidden[N, h], in float32 at least."""
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(1)


def rotary_by_length(model: nn.Module) -> list[Any]:
    """The modules whose rotary frequencies follow the longest position that they are given."""
    kinds = [(module, str(getattr(module, "rope_type", ""))) for module in model.modules()]
    return [module for module, kind in kinds if "dynamic" in kind or "longrope" in kind]


@contextmanager
def said_by(module: nn.Module) -> Iterator[list[Any]]:
    """Collects what a module gives inside the block."""
    found: list[Any] = []
    handle = module.register_forward_hook(lambda _module, _inputs, out: found.append(out))
    try:
        yield found
    finally:
        handle.remove()


def _router_outputs(collector: object | None) -> dict[str, bool]:
    """Return the argument by which a model also returns its router logits, where something collects
    them.
    """
    return {} if collector is None else {"output_router_logits": True}


def filled(tokens: int, device: str) -> int:
    """How many tokens a pass is filled up to: a multiple of a few; on CUDA one of few sizes, an
    eighth apart, and whole blocks of FlexAttention, which has another kernel for less than one of
    them that many shapes of heads have no program for.
    """
    return tokens + -tokens % (
        max(BLOCK, 2 ** (tokens.bit_length() - 4)) if device == "cuda" else ROUND
    )


def nothing(values: Iterable[Tensor]) -> Tensor | int:
    """0, with a slope of 0 in all of these, whatever they are."""
    return sum(
        each.masked_fill(torch.ones_like(each, dtype=torch.bool), 0).sum() for each in values
    )


def _scatter(batch: MicroBatch, found: list[_Found]) -> PolicyOutput:
    """Puts values where their rows are, and 0 elsewhere."""
    rows, logps, *others = zip(*found, strict=True)
    index = (torch.cat(rows),)
    logp = torch.cat(logps)
    blank = torch.zeros(batch.tokens.shape[0], dtype=logp.dtype, device=logp.device)
    entropy, sum_sq, value = (
        None if parts[0] is None else blank.index_put(index, torch.cat(parts)) for parts in others
    )
    return PolicyOutput(blank.index_put(index, logp), entropy, sum_sq, value=value)
