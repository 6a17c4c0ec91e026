"""Default learning rates by method, for all weights and for an adapter, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Default peak learning rates of some methods.

    ``full``: all weights train; ``adapter``: a LoRA adapter does.
    """

    methods: str
    full: float
    full_source: str
    adapter: float
    adapter_source: str


_TEN_TIMES = "ten times the rate for all weights: Schulman et al. 2025, LoRA Without Regret"
_ADAPTERS = (
    "Xu et al. 2024, arXiv 2401.08417 (1e-4 in the published code of cpo); Biderman et "
    "al. 2024, arXiv 2405.09673"
)

LEARNING_RATES: dict[str, LearningRates] = {
    "imitation": LearningRates(
        "sft, dft, rejection",
        1e-5, "Lambert et al. 2024, arXiv 2411.15124 (5e-6); Tunstall et al. 2023, arXiv "
              "2310.16944 (2e-5)",
        2e-4, "Dettmers et al. 2023, arXiv 2305.14314 (2e-4); Biderman et al. 2024, arXiv "
              "2405.09673",
    ),
    "preference": LearningRates(
        "methods for judgements and pairs, also online",
        1e-6, "Rafailov et al. 2023, arXiv 2305.18290 (1e-6); Meng et al. 2024, arXiv 2405.14734 "
              "(3e-7 to 1e-6); "
        "Tunstall et al. 2023, arXiv 2310.16944 (5e-7)",
        1e-4, _ADAPTERS,
    ),
    "distillation": LearningRates(
        "hindsight, distill",
        2e-6, "Kleine Buening et al. 2026, arXiv 2603.12273 (2e-6)",
        2e-5, _TEN_TIMES,
    ),
    "orpo": LearningRates(
        "orpo, whose loss has a likelihood term of weight 1",
        8e-6, "Hong et al. 2024, arXiv 2403.07691 (8e-6)",
        1e-4, _ADAPTERS,
    ),
    "policy_gradient": LearningRates(
        "grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, ppo",
        1e-6, "Shao et al. 2024, arXiv 2402.03300 (1e-6); Yu et al. 2025, arXiv 2503.14476 (1e-6)",
        1e-5, _TEN_TIMES,
    ),
    "reward_model": LearningRates(
        "bradley_terry, pointwise, ordinal",
        1e-5, "Touvron et al. 2023, arXiv 2307.09288 (1e-5; 5e-6 at 70B); Ouyang et al. 2022, "
              "arXiv 2203.02155 (9e-6)",
        1e-4, _TEN_TIMES,
    ),
}  # fmt: skip
"""By the kind of method. ``Method.learning_rates`` says which kind a method is."""
