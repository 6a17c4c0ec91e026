"""Views: the named tensors that losses read, from a micro-batch and the policy model's output.

A loss names its inputs by its positional parameters, and a view supplies them. Views are computed
from token columns, which have one value for each of the N scored tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from valence.losses.lazy import Tensor
from valence.types import MicroBatch, PolicyOutput

View = Literal["token", "answer", "seq", "pair", "score", "score_pair"]
Named = dict[str, Tensor]


def token_columns(batch: MicroBatch, out: PolicyOutput, ref: Tensor | None) -> Named:
    """Columns of the scored tokens, in batch order.

    From the policy model and the reference: logp_t[N], ref_t[N] (nats), sum_sq_t[N] (sum of squared
    probabilities), critic_t[N] (value estimate, units of reward); score[S, A] of a reward model.
    From sampling, by the names of ``TokenizedCompletion.columns``: old_t[N], sampler_t[N] (nats),
    adv_t[N], value_t[N] (critic_t at that time), return_t[N]. From the teacher, in nats:
    teacher_t[N], and divergence_t[N], that of the distributions of teacher and policy (0 unless the
    loss compares them).
    With adv_t or teacher_t and without old_t, old_t is logp_t without gradient: the current policy
    has just sampled the tokens, or it is not known how likely they were when they were sampled.
    """
    rows = batch.scored
    columns = {
        f"{name}_t": values.to(out.logp.dtype) for name, values in batch.token_columns.items()
    }
    columns["logp_t"] = out.logp[rows]
    if ref is not None:
        columns["ref_t"] = ref[rows]
    if out.divergence is not None and out.teacher is not None:
        columns |= {"teacher_t": out.teacher[rows], "divergence_t": out.divergence[rows]}
    elif "teacher_t" in columns:
        columns["divergence_t"] = columns["teacher_t"].new_zeros(len(rows))
    if "old_t" not in columns and not columns.keys().isdisjoint(("adv_t", "teacher_t")):
        columns["old_t"] = columns["logp_t"].detach()
    for name, values in (("sum_sq_t", out.sum_sq), ("critic_t", out.value)):
        if values is not None:
            columns[name] = values[rows]
    if out.score is not None:
        columns["score"] = out.score
    return columns


def sum_by_index(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum values[..., N] by index[N]: [..., count].

    The order of summation is always the same, so that a resumed run ends bit for bit as an
    undisturbed one would. On CUDA, ``index_add`` adds in the order in which its threads run.
    """
    blank = values.new_zeros(*values.shape[:-1], count)
    if not values.is_cuda:
        return blank.index_add(-1, index, values)
    return (
        blank.movedim(-1, 0)
        .index_put((index,), values.movedim(-1, 0), accumulate=True)
        .movedim(0, -1)
    )


def seq_sum(values: Tensor, batch: MicroBatch) -> Tensor:
    """Sum a token column [N] over each sequence: [S]."""
    return sum_by_index(values, batch.sequence_ids[batch.scored], batch.sequences)


def lengths(batch: MicroBatch, like: Tensor) -> Tensor:
    """n[S]: number of scored tokens of each sequence."""
    return seq_sum(like.new_ones(len(batch.scored)), batch)


def token_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """The token columns [N], with n_t (tokens of the sequence) and weight_t (of the row).

    Stored completions have no old_t: ref_t is used instead.
    """
    seq, logp = batch.sequence_ids[batch.scored], columns["logp_t"]
    named = {name: values for name, values in columns.items() if name.endswith("_t")}
    if "ref_t" in named and "old_t" not in named:
        named["old_t"] = named["ref_t"]
    return named | {"weight_t": batch.weight.to(logp.dtype)[seq], "n_t": lengths(batch, logp)[seq]}


def answer_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """The token view, and values per sequence, all [S].

    logp, ref, old, sampler (sums, nats), adv (mean), n (tokens, at least 1) and weight.
    """
    named = token_view(batch, columns)
    sums = {
        name: seq_sum(named[f"{name}_t"], batch)
        for name in ("logp", "ref", "old", "sampler", "adv")
        if f"{name}_t" in named
    }
    n = lengths(batch, columns["logp_t"]).clamp(min=1)  # masked answers count, with sums of 0
    named |= sums | {"n": n, "weight": batch.weight.to(columns["logp_t"].dtype)}
    if "adv" in named:
        named["adv"] = named["adv"] / named["n"]
    return named


def seq_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Values per sequence, all [S].

    logp, ref, teacher (sums over tokens, nats), n (tokens), label, weight and unit (example of the
    step).
    """
    logp = columns["logp_t"]
    named = {
        name[:-2]: seq_sum(columns[name], batch)
        for name in ("logp_t", "ref_t", "teacher_t")
        if name in columns
    }
    named |= {"n": lengths(batch, logp), "weight": batch.weight.to(logp.dtype), "unit": batch.unit}
    # the weight of WPO: mean over tokens of log(p / sum_v p_v^2)
    if "sum_sq_t" in columns:
        named["confidence"] = (
            seq_sum((logp - columns["sum_sq_t"].log()).detach(), batch) / named["n"]
        )
    if batch.label is not None:
        named["label"] = batch.label
    return named


def sides(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Indices of the chosen and the rejected sequence of each pair, both [P], in unit order."""
    # All chosen sides come first, then as many rejected ones, which needs no count from the device.
    order = (batch.side * (batch.unit.max() + 1) + batch.unit).argsort()
    chosen, rejected = order.chunk(2)
    return chosen, rejected


def pair_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Values per pair, all [P].

    logp_w, logp_l, ref_w, ref_l, n_w, n_l, margin, soft (NaN: none), weight and unit.
    """
    sums = seq_view(batch, columns)
    named = _of_pairs(batch, sums["weight"])
    chosen, rejected = sides(batch)
    for name in ("logp", "ref", "n", "confidence"):
        if name in sums:
            named |= {f"{name}_w": sums[name][chosen], f"{name}_l": sums[name][rejected]}
    return named


def _of_pairs(batch: MicroBatch, weight: Tensor) -> Named:
    chosen, _ = sides(batch)
    margin, soft = (values.to(weight.dtype)[chosen] for values in (batch.margin, batch.soft))
    return {"margin": margin, "soft": soft, "weight": weight[chosen], "unit": batch.unit[chosen]}


def score_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Inputs of reward models of single completions, one row per completion.

    score[S, A], target[S, A] (0 where the row has none), target_mask[S, A], weight[S].
    """
    score = columns["score"]
    named = {"score": score, "weight": batch.weight.to(score.dtype)}
    if batch.target is not None:
        named["target"] = batch.target.nan_to_num().to(score.dtype)
        named["target_mask"] = ~batch.target.isnan()
    return named


def score_pair_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Inputs of reward models of pairs: score_w, score_l, margin, soft and weight, all [P]."""
    score = columns["score"][:, 0]
    chosen, rejected = sides(batch)
    return _of_pairs(batch, batch.weight.to(score.dtype)) | {
        "score_w": score[chosen],
        "score_l": score[rejected],
    }


VIEWS: dict[View, Callable[[MicroBatch, Mapping[str, Tensor]], Named]] = {
    "token": token_view,
    "answer": answer_view,
    "seq": seq_view,
    "pair": pair_view,
    "score": score_view,
    "score_pair": score_pair_view,
}

_TOKENS = frozenset(
    ("logp_t", "ref_t", "old_t", "adv_t", "sampler_t", "value_t", "return_t", "critic_t")
) | {"teacher_t", "divergence_t", "sum_sq_t", "n_t", "weight_t"}
_OF_PAIRS = frozenset(("margin", "soft", "weight", "unit"))
INPUTS: dict[View, frozenset[str]] = {
    "token": _TOKENS,
    "seq": frozenset(("logp", "ref", "teacher", "n", "label", "weight", "unit", "confidence")),
    "pair": _OF_PAIRS
    | {f"{name}_{side}" for name in ("logp", "ref", "n", "confidence") for side in "wl"},
    "answer": _TOKENS | {"logp", "ref", "old", "sampler", "adv", "n", "weight"},
    "score": frozenset(("score", "target", "target_mask", "weight")),
    "score_pair": _OF_PAIRS | {"score_w", "score_l"},
}
"""The names in each view. A loss has the first view that contains all its inputs."""
COMPUTED = frozenset(("z0", "delta", "wrong", "thresholds"))
"""Inputs of losses that no view has: statistics, and what modifiers and models add."""
OF_SAMPLES = frozenset(
    f"{name}{end}" for name in ("old", "adv", "sampler", "value", "return") for end in ("", "_t")
)
"""Inputs that only completions with scores or advantages have."""
