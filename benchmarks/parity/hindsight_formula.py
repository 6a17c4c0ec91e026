"""One step of hindsight by the formula of its paper: log-softmax, one sequence at a time, without
the losses of Valence. Kleine Buening et al. 2026, arXiv 2603.12273.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from valence.types import TokenizedExample


def token_logps(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probability of each token of an answer [T] (nats), in the precision of the model."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
    logps = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return logps[torch.arange(len(answer)), torch.tensor(answer)]


def hindsight(
    policy: nn.Module, rows: Sequence[TokenizedExample], first: int = 0
) -> dict[str, float]:
    """Loss of a step, whose teacher is the policy. The gradient stays in the policy.

    -A_t * logp_t with A_t = teacher_t - logp_t without a gradient, averaged over the tokens of each
    answer, then over answers. first: index of the first trained token of an answer.
    """
    policy.zero_grad()
    loss = 0.0
    for row in rows:
        ids = row.answers[0].ids
        with torch.no_grad():
            teacher = token_logps(policy, row.teacher_ids, ids)
        logps = token_logps(policy, row.prompt_ids, ids)
        terms = -(teacher - logps.detach()) * logps
        part = terms[first:].mean() / len(rows)
        part.backward()
        loss += part.item()
    return {"loss": loss}
