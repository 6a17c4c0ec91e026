"""The values that travel between the parts: a row becomes an Example, then a TokenizedExample, and
several of these become a MicroBatch.

Letters used for axes everywhere: T tokens, S sequences, P pairs, V vocabulary.
All of these are frozen: a data step returns new objects and never edits what it was given.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: ``role``, ``content``, and whatever else the template reads (``tool_calls``,
``name``, ...). An assistant turn with ``weight`` 0 is context only: it is not trained on.
"""

Kind = Literal["judgement", "preference", "demonstration", "ranking", "prompt", "scored"]
"""What a method reads.

``judgement``: with a label; ``scored``: judgements with a label, a score or attributes, whichever.
"""


def noun(kind: str) -> str:
    """What messages call a row of a kind."""
    return {"scored": "scored answer", "judgement": "rated answer"}.get(kind, kind)


def plural(kind: str) -> str:
    """What messages call several rows of a kind."""
    return f"{noun(kind)}s"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from: the file as the user named it, and its 1-based line (or record
    number).
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat messages, with the tools that the template may show.

    A prompt ends with a user or tool turn.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """How an answer came about.

    ``logps``: of each token (nats, in the distribution that it was drawn from: at this temperature,
    from the most likely tokens that have ``top_p`` together). ``vocabulary``: of the tokenizer, a
    digest ("": unknown).
    """

    logps: tuple[float, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    vocabulary: str = ""

    @property
    def plain(self) -> bool:
        """Whether the log-probabilities are those of the model as it is."""
        return self.temperature == self.top_p == 1.0


@dataclass(frozen=True, slots=True)
class Ids:
    """Text that was tokenised by someone else and is taken as it is.

    ``sampled``: known of an answer that a model gave.
    """

    ids: tuple[int, ...]
    # identities are made of what is shown
    sampled: Sampled | None = field(default=None, compare=False, repr=False)


Content = str | Chat | Ids
"""A prompt or a completion.

The completion of a ``Chat`` prompt is a ``Chat`` of the turns that follow it.
"""


def content_id(*parts: object) -> str:
    """16 hexadecimal digits that depend on nothing but the content given (sha256 of its canonical
    JSON).
    """

    def plain(part: object) -> object:
        if isinstance(part, Chat):
            return {
                "messages": [dict(m) for m in part.messages],
                "tools": [dict(t) for t in part.tools],
            }
        return {"ids": list(part.ids)} if isinstance(part, Ids) else part

    text = json.dumps([plain(p) for p in parts], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One completion with a verdict: thumbs up (``label=True``) or down, a ``score``, scores of
    several ``attributes`` by their names, or more than one of these. ``error``: why it has none,
    where what was to judge it has failed. ``is_truncated``: it is known that sampling ended at the
    length limit.
    """

    prompt: Content
    completion: Content
    label: bool | None = None
    score: float | None = None
    attributes: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    is_truncated: bool = False
    weight: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def id(self) -> str:
        more = (dict(self.attributes),) if self.attributes else ()
        return content_id("judgement", self.prompt, self.completion, self.label, self.score, *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two completions of one prompt, the first preferred.

    ``margin``: by how much (0 when unknown). ``soft``: the probability that the first is the better
    one (None when unknown).
    """

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float = 0.0
    soft: float | None = None
    weight: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def id(self) -> str:
        more = () if self.soft is None else (self.soft,)
        return content_id("preference", self.prompt, self.chosen, self.rejected, self.margin, *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One completion to imitate."""

    prompt: Content
    completion: Content
    weight: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def id(self) -> str:
        return content_id("demonstration", self.prompt, self.completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """k completions of one prompt with a score each (larger is better)."""

    prompt: Content
    completions: tuple[Content, ...]
    scores: tuple[float, ...]
    weight: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def id(self) -> str:
        return content_id("ranking", self.prompt, self.completions, self.scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to be answered; ``info`` travels with it."""

    prompt: Content
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight: float = 1.0
    origin: Origin

    @property
    def id(self) -> str:
        # what a reward reads: two rows may ask the same and want other answers
        more = (dict(self.info),) if self.info else ()
        return content_id("prompt", self.prompt, *more)


Example = Judgement | Preference | Demonstration | Ranking | Prompt
"""``info`` of each: metadata of the row (rater, comment, tags, model, ...).

It is never trained on, and it is not part of the ``id``, except for a Prompt, whose reward reads
it.
"""


@dataclass(frozen=True, slots=True)
class TokenizedCompletion:
    """One completion as tokens.

    ``mask[i]``: does a loss read token i. ``complete``: it ends with its end-of-turn token.
    ``columns``: (name, a number for each token) of what was known of it when it was sampled: `old`,
    `adv` and others of ``losses.views``.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    complete: bool = True
    columns: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedExample:
    """One unit of training as tokens: a prompt and its answers, which stay together in one
    micro-batch.

    A judgement or demonstration has one answer; a preference has (chosen, rejected); a ranking k; a
    prompt has none. ``prompt_mask`` is False throughout unless earlier assistant turns are trained
    on too. ``scores``: one for each answer of a ranking, or that of a judgement, or none.
    ``attributes``: (name, score), sorted by name. ``soft``: see Preference.
    """

    id: str
    origin: Origin
    kind: Kind
    prompt_ids: tuple[int, ...]
    prompt_mask: tuple[bool, ...]
    answers: tuple[TokenizedCompletion, ...]
    label: bool | None = None
    scores: tuple[float, ...] = ()
    attributes: tuple[tuple[str, float], ...] = ()
    margin: float = 0.0
    soft: float | None = None
    weight: float = 1.0
    source: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of all of its sequences: the prompt once per answer."""
        return sum(len(self.prompt_ids) + len(a.ids) for a in self.answers)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """The same on the device, without waiting until that has done what it was given before."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def path_to(segments: Sequence[tuple[int, int, int]], segment: int) -> list[int]:
    """Indices of the segments from the root of a prefix tree to this one."""
    path: list[int] = []
    while segment >= 0:
        path.append(segment)
        segment = segments[segment][2]
    return path[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch: S sequences in T rows, and the columns that losses read.

    A prefix that several sequences share is stored once. A loss reads N of the rows.

    tokens[T]            token ids
    position_ids[T]      position in the sequence
    previous[T]          row of the token before, which predicts this one (-1: none)
    sequence_ids[T]      the sequence that reads a row, else one that the row is part of
    loss_mask[T]         whether a loss reads the log-probability of the row
    scored[N]            rows where loss_mask is True, ascending
    cpu_tokens[T]        tokens on the CPU, where reading them does not wait for a device
    cpu_scored[2, N]     scored, and the sequence that reads each row, on the CPU
    segments             (first row, last row + 1, parent or -1) of the prefix tree, parents first
    leaves[S]            the segment that each sequence ends with
    requires_grad[S]     False for sequences without gradient
    unit[S]              index of the example in the step
    side[S]              0 for the only or the chosen completion, 1 for the rejected one
    label[S]             True desirable, False undesirable; None if the data has no labels
    weight[S]            weight of the example
    margin[S]            margin of the pair, the same on both sides
    soft[S]              probability that the chosen side is the better one (NaN: not given)
    target[S, A]         scores of the data (NaN: none) for each attribute; None if it has none
    group[S]             index of the statistic of the step that a sequence belongs to
    num_groups           number of such statistics
    ids[S]               content id of the example
    token_columns[N]     by name: columns of ``TokenizedCompletion``, in the order of scored
    """

    tokens: Tensor
    position_ids: Tensor
    previous: Tensor
    sequence_ids: Tensor
    loss_mask: Tensor
    scored: Tensor
    cpu_tokens: Tensor
    cpu_scored: Tensor
    segments: tuple[tuple[int, int, int], ...]
    leaves: tuple[int, ...]
    requires_grad: tuple[bool, ...]
    unit: Tensor
    side: Tensor
    label: Tensor | None
    weight: Tensor
    margin: Tensor
    soft: Tensor
    target: Tensor | None
    group: Tensor
    num_groups: int
    ids: tuple[str, ...]
    token_columns: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])

    @property
    def sequences(self) -> int:
        return len(self.leaves)

    def path(self, segment: int) -> list[int]:
        """The segments from the root to this one."""
        return path_to(self.segments, segment)

    def rows(self, sequence: int) -> Tensor:
        """Rows of a sequence, in order."""
        spans = [self.segments[k][:2] for k in self.path(self.leaves[sequence])]
        return self.tokens.new_tensor([row for start, end in spans for row in range(start, end)])

    def part(self, *, requires_grad: bool) -> MicroBatch:
        """The same rows, of which losses read only the sequences with (or without) gradient."""
        sequences = [
            s for s, has_grad in enumerate(self.requires_grad) if has_grad is requires_grad
        ]
        if len(sequences) == self.sequences:
            return self
        device = self.sequence_ids.device
        new_ids = self.cpu_scored.new_full((self.sequences,), -1)
        new_ids[sequences] = new_ids.new_tensor(range(len(sequences)))
        index = sent(new_ids.new_tensor(sequences), device)
        readers = new_ids[self.cpu_scored[1]]
        is_read = readers >= 0
        cpu_scored = self.cpu_scored[:, is_read]
        cpu_scored[1] = readers[is_read]
        places = sent(is_read.nonzero().squeeze(1), device)
        sequence_ids = sent(new_ids, device)[self.sequence_ids]
        columns = {
            name: getattr(self, name)[index]
            for name in ("unit", "side", "weight", "margin", "soft", "group")
        }
        return replace(
            self,
            sequence_ids=sequence_ids.clamp(min=0),
            loss_mask=self.loss_mask & (sequence_ids >= 0),
            scored=sent(cpu_scored[0], device),
            cpu_scored=cpu_scored,
            leaves=tuple(self.leaves[s] for s in sequences),
            requires_grad=(requires_grad,) * len(sequences),
            label=None if self.label is None else self.label[index],
            target=None if self.target is None else self.target[index],
            ids=tuple(self.ids[s] for s in sequences),
            token_columns={name: values[places] for name, values in self.token_columns.items()},
            **columns,
        )


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """What the engine returns.

    ``logp[T]``: natural log of p(token | everything before it in its sequence), float32 (or float64
    when the model is), 0 where ``mask`` is False. When asked for, ``entropy[T]`` (nats),
    ``sum_sq[T]``, the sum over the vocabulary of squared probabilities, and ``value[T]``, a value
    head's estimate of the return from before the token on. ``score[S, A]``: of a reward model,
    whose logp is 0 throughout. ``router_aux_loss``: the load-balancing loss of a mixture of experts
    over the tokens of the sequences that train, a scalar.
    """

    logp: Tensor
    entropy: Tensor | None = None
    sum_sq: Tensor | None = None
    score: Tensor | None = None
    value: Tensor | None = None
    router_aux_loss: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be pooled: the sum of some numbers and how many they are (a count of zero: no
    such number).
    """

    total: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Ranked:
    """Numbers [S] beside others [S] (NaN: none, such a row does not count), pooled into a statistic
    of both columns: of classes (1 should rank higher) the area under the ROC curve or the
    calibration error of probabilities, of numbers a correlation or the share of the others'
    variance that is explained.
    """

    values: Tensor
    others: Tensor
    statistic: Literal["auc", "calibration_error", "pearson", "spearman", "explained"] = "auc"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer: its token ids (end-of-turn included when it stopped there), the sampler's
    log-probability of each (nats, of the distribution sampled from), the text without special
    tokens, why it stopped, and the policy version.

    What a reward is also given: ``prompt`` as its row has it (text, or chat messages), and its
    ``tools``; ``rendered``: the text of the tokens that were answered, template and all; ``info``:
    the other columns of its row. ``index``: which of the answers to its prompt.
    """

    prompt_id: str
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    stop: Literal["eos", "length", "stop"]
    """stop: at a string that the request named. Then ``text`` ends before this string."""
    version: int = 0
    versions: tuple[int, ...] = ()
    """Of each token, where the weights changed in the middle of an answer."""
    index: int = 0
    prompt: str | tuple[Message, ...] = ""
    rendered: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward says of a completion.

    ``value``: None where it failed, and then ``error`` says why: a failure is never a number.
    ``parts``: the numbers that it is made of, by name.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""


class Reward(Protocol):
    """Judges completions: one score each, in order.

    ``name``: of its numbers in the log. ``deterministic``: the same completion always has the same
    score, so that scores may be kept.
    """

    @property
    def name(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    async def __call__(self, completions: Sequence[Completion]) -> list[Score]: ...
    async def close(self) -> None:
        """Gives back connections and processes."""
        ...
