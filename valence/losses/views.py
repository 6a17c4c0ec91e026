"""What a loss may read: named tensors taken out of a micro-batch and the engine's answer.

A loss names its inputs by its positional parameters; a view supplies exactly those. It is made of
token columns, which have a number for every token that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from valence.losses.lazy import Tensor
from valence.types import MicroBatch, PolicyOutput

View = Literal["token", "answer", "seq", "pair", "score", "score_pair"]
Named = dict[str, Tensor]


def token_columns(batch: MicroBatch, out: PolicyOutput, ref: Tensor | None) -> Named:
    """Of tokens that are read, in batch order: logp_t[N], ref_t[N] (log-probabilities, nats),
    sum_sq_t[N] (of all probabilities),
    critic_t[N] (value head's estimate, units of reward; both when asked for); score[S, A]: what a
    reward model says.

    What was known of them when they were sampled, by the names of ``Answer.columns``: old_t[N],
    sampler_t[N] (nats), adv_t[N],
    value_t[N] (critic_t at that time), return_t[N]. Where there is an adv_t and no old_t, the
    policy has answered just now: old_t is what it says, without a gradient.
    """
    rows = batch.scored
    columns = {
        f"{name}_t": values.to(out.logp.dtype) for name, values in batch.token_columns.items()
    }
    columns["logp_t"] = out.logp[rows]
    if ref is not None:
        columns["ref_t"] = ref[rows]
    if "old_t" not in columns and "adv_t" in columns:
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
    """Sums a token column [N] over each sequence: [S]."""
    return sum_by_index(values, batch.sequence_ids[batch.scored], batch.sequences)


def lengths(batch: MicroBatch, like: Tensor) -> Tensor:
    """n[S]: how many tokens of each sequence are read."""
    return seq_sum(like.new_ones(len(batch.scored)), batch)


def token_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Tokens that are read, in batch order: logp_t, ref_t, old_t (of the policy that answered: for
    stored answers the reference stands in), adv_t (advantage), n_t (tokens of its sequence),
    weight_t (of its row), and what else is known: [N] each.
    """
    seq, logp = batch.sequence_ids[batch.scored], columns["logp_t"]
    named = {name: values for name, values in columns.items() if name.endswith("_t")}
    if "ref_t" in named and "old_t" not in named:
        named["old_t"] = named["ref_t"]
    return named | {"weight_t": batch.weight.to(logp.dtype)[seq], "n_t": lengths(batch, logp)[seq]}


def answer_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """Tokens that are read, and one number per sequence: logp[S], ref[S], old[S], sampler[S] (sums
    over its tokens, nats), adv[S] (their mean), n[S] (tokens, at least 1), weight[S].
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
    """One number per sequence. logp[S], ref[S] (sums over its tokens, nats), n[S] (tokens),
    label[S], weight[S], unit[S] (its place in the step).
    """
    logp = columns["logp_t"]
    named = {
        name[:-2]: seq_sum(columns[name], batch) for name in ("logp_t", "ref_t") if name in columns
    }
    named |= {"n": lengths(batch, logp), "weight": batch.weight.to(logp.dtype), "unit": batch.unit}
    # the confidence that WPO weighs by: mean over tokens of log(p / sum_v p_v^2)
    if "sum_sq_t" in columns:
        named["confidence"] = (
            seq_sum((logp - columns["sum_sq_t"].log()).detach(), batch) / named["n"]
        )
    if batch.label is not None:
        named["label"] = batch.label
    return named


def sides(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Indices of the chosen and of the rejected sequence of each pair, both [P], in the order of
    their units.
    """
    # All chosen sides come first, then as many rejected ones: no device has to be asked how many
    # there are.
    order = (batch.side * (batch.unit.max() + 1) + batch.unit).argsort()
    chosen, rejected = order.chunk(2)
    return chosen, rejected


def pair_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """One number per pair and side: logp_w, logp_l, ref_w, ref_l, n_w, n_l; margin, soft (NaN:
    none), weight, unit: all [P].
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
    """What a reward model is trained on, answer by answer: score[S, A], target[S, A], given[S, A]
    (False where the row gives no target, which is then 0), weight[S].
    """
    score = columns["score"]
    named = {"score": score, "weight": batch.weight.to(score.dtype)}
    if batch.target is not None:
        given = ~batch.target.isnan()
        named |= {"target": batch.target.nan_to_num().to(score.dtype), "given": given}
    return named


def score_pair_view(batch: MicroBatch, columns: Mapping[str, Tensor]) -> Named:
    """What a reward model says of a pair: score_w[P], score_l[P]; margin[P], soft[P], weight[P]."""
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
