"""Losses that read a chosen and a rejected completion of one prompt. All return one number per pair [P], not reduced."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Lt
from torch import Tensor
from torch.nn.functional import logsigmoid


def dpo(
    logp_w: Tensor,
    logp_l: Tensor,
    ref_w: Tensor,
    ref_l: Tensor,
    margin: Tensor,
    *,
    beta: Annotated[float, Gt(0)] = 0.1,
    label_smoothing: Annotated[float, Ge(0), Lt(0.5)] = 0.0,
) -> Tensor:
    """Direct preference optimisation: raise the log-ratio of the chosen completion over that of the rejected one.

    -(1-e) log s(beta*d - margin) - e log s(-beta*d), d = (logp_w - ref_w) - (logp_l - ref_l), e = label_smoothing.
    Rafailov et al. 2023, arXiv 2305.18290, Eq. 7; with e > 0 it is conservative DPO.

    logp_w, logp_l, ref_w, ref_l [P]: summed log-probabilities of chosen and rejected (nats);
    margin[P]: by how much the chosen one should win (units of beta*d; 0 when the data gives none).

    beta: strength of the pull towards the reference.
    label_smoothing: assumed share of pairs whose verdict is wrong.
    """
    logits = beta * ((logp_w - ref_w) - (logp_l - ref_l))
    return -(1 - label_smoothing) * logsigmoid(logits - margin) - label_smoothing * logsigmoid(-logits)
