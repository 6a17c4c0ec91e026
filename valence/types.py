"""Data types that the packages exchange.

A row becomes an ``Example``, then a ``TokenizedExample``. Several tokenized examples become a
``MicroBatch``.

Axes in shapes: T tokens, S sequences, P pairs, V vocabulary, A attributes.
All of these types are frozen: a processing step returns new objects and never modifies its input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Message = Mapping[str, Any]
"""One chat turn: ``role``, ``content``, and any other keys that the chat template reads
(``tool_calls``, ``name``, ...).

An assistant turn with ``weight`` 0 is context: it is not trained on.
"""

Kind = Literal[
    "judgement", "preference", "demonstration", "ranking", "prompt", "scored", "feedback"
]
"""The kind of examples that a method trains on.

``judgement``: completions with a label. ``scored``: completions with a label, a score or
attributes. ``feedback``: completions with what their reader wrote about them.
"""


def noun(kind: str) -> str:
    """The name of one row of this kind in messages."""
    return {
        "scored": "scored answer",
        "judgement": "rated answer",
        "feedback": "answer with feedback",
    }.get(kind, kind)


def plural(kind: str) -> str:
    """The name of several rows of this kind in messages."""
    return "answers with feedback" if kind == "feedback" else f"{noun(kind)}s"


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of a row: the file as the user named it, and the line or record number in it
    (from 1).
    """

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Chat:
    """Chat messages, and the tools that the chat template may include.

    A prompt ends with a user or tool turn. ``transcript``: the text that the messages were read
    from, which is trained on if no chat template is used.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    # identities are made of the messages
    transcript: str | None = field(default=None, compare=False, repr=False)

    def with_user_text(self, text: str) -> Chat:
        """The chat with a text at the end of its last user turn, or in a new one without any."""
        messages = list(self.messages)
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=None)
        if last is None:
            messages.append({"role": "user", "content": text})
        else:
            content: Any = messages[last]["content"]
            is_text = not isinstance(content, list)
            part = {"type": "text", "text": text}
            longer: Any = f"{content}{text}" if is_text else [*content, part]
            messages[last] = {**messages[last], "content": longer}
        return replace(self, messages=tuple(messages), transcript=None)


@dataclass(frozen=True, slots=True)
class Sampled:
    """How a completion was sampled.

    ``logps``: log-probability of each token (nats) in the distribution that it was sampled from,
    which is that at this ``temperature``, truncated to ``top_p`` (nucleus sampling).
    ``vocabulary``: digest of the tokenizer's vocabulary ("" if unknown). ``is_truncated``: whether
    sampling is known to have ended at the length limit. ``mask``: for each token, whether it was
    sampled, and not the result of a tool; empty: all were.
    """

    logps: tuple[float, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    vocabulary: str = ""
    is_truncated: bool = False
    mask: tuple[bool, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the log-probabilities are those at temperature 1 without top_p."""
        return self.temperature == self.top_p == 1.0


@dataclass(frozen=True, slots=True)
class Ids:
    """Token ids that were computed outside Valence and are used unchanged.

    ``sampled``: how a model sampled them, and with which vocabulary; None: with that of the model
    that reads them. ``readable``: the text that they are the tokens of, if the row has it; it is
    only trained on if the vocabulary is another one.
    """

    ids: tuple[int, ...]
    # identities are made of what is shown
    sampled: Sampled | None = field(default=None, compare=False, repr=False)
    readable: str | Chat | None = field(default=None, compare=False, repr=False)


Content = str | Chat | Ids
"""A prompt or a completion.

The completion of a ``Chat`` prompt is a ``Chat`` with the turns that follow the prompt.
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
    """One completion with what is known about its quality: thumbs up (``label=True``) or down, a
    ``score``, scores of several ``attributes`` by name, what its reader wrote (``feedback``), or
    more than one of these.

    ``error``: why the rating is missing, if the rater failed. ``is_truncated``: whether sampling is
    known to have ended at the length limit.
    """

    prompt: Content
    completion: Content
    label: bool | None = None
    score: float | None = None
    attributes: Mapping[str, float] = field(default_factory=dict[str, float])
    feedback: str = ""
    error: str = ""
    is_truncated: bool = False
    weight: float = 1.0
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    origin: Origin

    @property
    def id(self) -> str:
        more = (dict(self.attributes),) if self.attributes else ()
        more += (self.feedback,) if self.feedback else ()
        return content_id("judgement", self.prompt, self.completion, self.label, self.score, *more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A chosen and a rejected completion of one prompt.

    ``margin``: how much better the chosen one is (0 if unknown). ``soft``: the probability that the
    chosen one is better (None if unknown). ``is_contradicted``: whether the row has scores of which
    that of the rejected one is larger.
    """

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float = 0.0
    soft: float | None = None
    is_contradicted: bool = False
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
    """k completions of one prompt, with one score each (larger is better)."""

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
    """A prompt for which completions are sampled. The reward reads its ``info``."""

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
"""Every example has ``info``: metadata of the row (rater, comment, tags, model, ...).

Metadata is never trained on. It is only part of the ``id`` of a ``Prompt``, because the reward
reads it.
"""


@dataclass(frozen=True, slots=True)
class TokenizedCompletion:
    """One completion as tokens.

    ``mask[i]``: whether a loss reads token i. ``complete``: whether the completion ends with its
    end-of-turn token. ``columns``: (name, one number per token), recorded when the completion was
    sampled: ``old``, ``adv`` and other columns of ``losses.views``.
    """

    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    complete: bool = True
    columns: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedExample:
    """One training example as tokens: a prompt and its answers, which stay together in one
    micro-batch.

    A judgement or demonstration has one answer, a preference two (chosen, rejected), a ranking k,
    and a prompt none. ``prompt_mask`` is False everywhere unless earlier assistant turns are
    trained on. ``scores``: one per answer of a ranking, the score of a judgement, or empty.
    ``attributes``: (name, score), sorted by name. ``soft``: see ``Preference``. ``teacher_ids``:
    the prompt of the teacher, which reads more than the policy; empty without a teacher.
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
    teacher_ids: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences. The prompt counts once per answer."""
        return sum(len(self.prompt_ids) + len(a.ids) for a in self.answers)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for pending work of the device."""
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
    """One micro-batch: S sequences, stored as T token rows, and the columns that losses read.

    A prefix that several sequences share is stored once. Losses read N of the T rows.

    tokens[T]            token ids
    position_ids[T]      position in the sequence
    previous[T]          row of the preceding token, which predicts this one (-1: none)
    sequence_ids[T]      the sequence for which a loss reads the row; if none, one that contains it
    loss_mask[T]         whether a loss reads the log-probability of the row
    scored[N]            rows where loss_mask is True, ascending
    cpu_tokens[T]        copy of tokens in CPU memory: reading it needs no device synchronization
    cpu_scored[2, N]     copy of scored in CPU memory, and the sequence that reads each row
    segments             (first row, last row + 1, parent or -1) of the prefix tree, parents first
    leaves[S]            last segment of each sequence
    requires_grad[S]     False for sequences without gradient
    unit[S]              index of the example in the step
    side[S]              0 for the only or the chosen completion, 1 for the rejected one
    label[S]             True desirable, False undesirable; None if the data has no labels
    weight[S]            weight of the example
    margin[S]            margin of the pair, the same on both sides
    soft[S]              probability that the chosen side is the better one (NaN: missing)
    target[S, A]         scores in the data for each attribute (NaN: missing); None without scores
    group[S]             index of the reference point (z0 of KTO) that the sequence belongs to
    num_groups           number of reference points
    ids[S]               content id of the example
    token_columns[N]     columns of ``TokenizedCompletion`` by name, in the order of scored
    teacher              the same completions after the prompts of the teacher; None without one
    teacher_rows[N]      for each row in scored, the row of ``teacher`` with the same token
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
    teacher: MicroBatch | None = None
    teacher_rows: Tensor | None = None

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

    def scored_tokens(self) -> list[tuple[int, ...]]:
        """The tokens of each sequence that losses read, in order."""
        sequences: list[list[int]] = [[] for _ in self.leaves]
        rows, owners = self.cpu_scored.numpy()
        ids: list[int] = self.cpu_tokens.numpy()[rows].tolist()
        indices: list[int] = owners.tolist()
        for token_id, index in zip(ids, indices, strict=True):
            sequences[index].append(token_id)
        return [tuple(sequence) for sequence in sequences]

    def part(self, *, requires_grad: bool) -> MicroBatch:
        """The same rows, but losses only read the sequences with (or without) gradient."""
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
            teacher_rows=None if self.teacher_rows is None else self.teacher_rows[places],
            **columns,
        )


@dataclass(frozen=True, slots=True)
class PolicyOutput:
    """Output of ``PolicyModel``.

    ``logp[T]``: log-probability of each token given all tokens before it in its sequence (nats), in
    float32 (float64 for float64 models); 0 where ``loss_mask`` is False. ``score[S, A]``: scores of
    a reward model; its ``logp`` is 0 everywhere.

    Only on request: ``entropy[T]`` (nats). ``sum_sq[T]``: sum over the vocabulary of the squared
    probabilities. ``value[T]``: the value head's estimate of the return at the state before the
    token. ``router_aux_loss``: scalar load-balancing loss of a mixture of experts, over the tokens
    of the sequences with gradient. ``divergence[T]``: that of teacher and policy, and
    ``teacher[T]``: log-probabilities of the teacher (nats); with them, ``logp`` has no gradient.
    """

    logp: Tensor
    entropy: Tensor | None = None
    sum_sq: Tensor | None = None
    score: Tensor | None = None
    value: Tensor | None = None
    router_aux_loss: Tensor | None = None
    divergence: Tensor | None = None
    teacher: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can be pooled: the sum of some numbers, and their count (0: there are none)."""

    total: Tensor
    count: Tensor


@dataclass(frozen=True, slots=True)
class Ranked:
    """Two columns of numbers, ``values[S]`` and ``others[S]``, that can be pooled into one
    statistic. Rows with NaN in ``others`` do not count.

    ``others`` are classes (1 should rank higher) for ``auc``, the area under the ROC curve, and for
    ``calibration_error``, for which ``values`` are probabilities. They are numbers for the
    correlations ``pearson`` and ``spearman``, and for ``explained``, the share of the variance of
    ``others`` that ``values`` explain.
    """

    values: Tensor
    others: Tensor
    statistic: Literal["auc", "calibration_error", "pearson", "spearman", "explained"] = "auc"


@dataclass(frozen=True, slots=True)
class Episode:
    """The turns of a completion that may call tools.

    ``messages``: the turns after the prompt. ``calls``: for each call, its ``turn``, ``name``,
    ``arguments`` and ``seconds``, its ``error`` with the ``detail`` of where it happened, and
    whether its result ``is_cut``. ``end``: ``answer`` (a turn without calls), ``turns`` or
    ``length`` (limits). ``reset_text``: what the environment has added to the last user turn of the
    prompt. ``prompt_ids``: the tokens of the prompt, if it has added something. ``reward``: that of
    the environment, which includes ``turn_rewards``, one for each turn of the policy. ``error``:
    why the episode cannot be scored.
    """

    messages: tuple[Message, ...]
    calls: tuple[Mapping[str, Any], ...] = ()
    end: Literal["answer", "turns", "length"] = "answer"
    prompt_ids: tuple[int, ...] = ()
    reward: float | None = None
    error: str = ""
    reset_text: str = ""
    turn_rewards: tuple[float, ...] = ()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Episode:
        """The episode of ``dataclasses.asdict``, also after JSON."""
        names = ("messages", "calls", "prompt_ids", "turn_rewards")
        lists = {name: tuple(record.get(name, ())) for name in names}
        return replace(cls(**record), **lists)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    ``tokens``: token ids, including the end-of-turn token if sampling ended with it. ``logps``:
    log-probability of each token (nats) in the distribution that it was sampled from. ``text``:
    without special tokens. ``stop``: why sampling ended. ``version``: of the policy.

    With several turns, ``tokens`` are those of all turns, ``mask`` says which were sampled, and the
    others, of results of tools, have the log-probability 0. ``text`` is that of the last assistant
    turn, and ``episode`` has all turns.

    Further fields for rewards: ``prompt`` (text or chat messages) and ``tools`` as in the row;
    ``rendered``: the prompt as the model read it, with the chat template; ``info``: the other
    columns of the row; ``index``: number of this completion among those of its prompt.
    """

    prompt_id: str
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    stop: Literal["eos", "length", "stop"]
    """``eos``: end-of-turn token. ``length``: token limit. ``stop``: a stop string of the request,
    which ``text`` does not include.
    """
    version: int = 0
    versions: tuple[int, ...] = ()
    """The version for each token, if the weights changed during sampling."""
    index: int = 0
    prompt: str | tuple[Message, ...] = ""
    rendered: str = ""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: tuple[Mapping[str, Any], ...] = ()
    mask: tuple[bool, ...] = ()
    """For each token, whether it was sampled; empty: all were."""
    episode: Episode | None = None

    @property
    def sampled(self) -> tuple[bool, ...]:
        """For each token, whether it was sampled."""
        return self.mask or (True,) * len(self.tokens)

    @property
    def num_turns(self) -> int:
        """Number of turns of the policy."""
        if self.episode is None:
            return 1
        return sum(message["role"] == "assistant" for message in self.episode.messages)

    @property
    def sampled_tokens(self) -> tuple[int, ...]:
        """The tokens that were sampled."""
        return tuple(compress(self.tokens, self.sampled))


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion.

    ``value``: None if the reward failed; ``error`` then has the reason. A failure never has a
    number. ``parts``: the numbers that the value is computed from, by name. ``feedback``: what the
    reward says about the completion in words, such as the error message of a test.
    ``turn_rewards``: for a completion of several turns, how much of the value each turn has earned;
    what they do not add up to belongs to the last one.
    """

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    error: str = ""
    feedback: str = ""
    turn_rewards: Sequence[float] = ()

    @property
    def record(self) -> list[Any]:
        """The fields in a form that processes can exchange; ``Score(*record)`` restores it."""
        return [self.value, dict(self.parts), self.error, self.feedback, list(self.turn_rewards)]


class Reward(Protocol):
    """A callable that returns one score per completion, in order.

    ``name``: name of its scores in the log. ``deterministic``: whether the same completion always
    has the same score, so that scores may be cached.
    """

    @property
    def name(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    async def __call__(self, completions: Sequence[Completion]) -> list[Score]: ...
    async def close(self) -> None:
        """Release connections and processes."""
        ...
