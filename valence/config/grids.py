"""Recommended values to try for the settings of each method, with their source."""

from __future__ import annotations

from dataclasses import dataclass

from valence.methods.learning_rates import LearningRates

LEARNING_RATE_FACTORS = (0.3, 1.0, 3.0)
"""The learning rates of every recommended grid, as factors of the method's default."""


@dataclass(frozen=True, slots=True)
class RecommendedGrid:
    """Values of settings to try for some methods. The learning rate is always one of them.

    settings: values by name. source: of these values.
    """

    methods: tuple[str, ...]
    settings: dict[str, tuple[float, ...]]
    source: str


_SIMPO = "Meng et al. 2024, arXiv 2405.14734, search ranges in the appendix"

RECOMMENDED_GRIDS: tuple[RecommendedGrid, ...] = (
    RecommendedGrid(
        (
            "kto", "apo_zero_unpaired", "bco", "aot_unpaired", "dpo", "robust_dpo", "hinge",
            "apo_zero", "apo_down", "exo", "nca", "bco_pair", "sppo", "dpop", "discopop", "aot",
            "cpo",
        ),
        {"loss.beta": (0.03, 0.1, 0.3)},
        f"half an order of magnitude on either side of the default ({_SIMPO}: 0.01 to 0.1)",
    ),
    RecommendedGrid(("ipo",), {"loss.tau": (0.01, 0.1, 0.5)}, _SIMPO),
    RecommendedGrid(
        ("dpo_norm",), {"loss.beta": (2.0, 5.0, 10.0)}, "around the default of its authors"
    ),
    RecommendedGrid(
        ("simpo",), {"loss.beta": (2.0, 2.5), "loss.gamma_beta_ratio": (0.3, 0.5, 0.8)}, _SIMPO
    ),
    RecommendedGrid(("orpo",), {"loss.beta": (0.1, 0.5, 1.0)}, _SIMPO),
    RecommendedGrid(("slic",), {"loss.margin": (0.5, 1.0, 2.0)}, _SIMPO),
    RecommendedGrid(
        ("sft", "dft"), {"train.epochs": (1.0, 2.0, 3.0)},
        "Lambert et al. 2024, arXiv 2411.15124 (2 epochs)",
    ),
    RecommendedGrid(
        ("bradley_terry", "pointwise", "ordinal"), {"train.epochs": (1.0, 2.0)},
        "Ouyang et al. 2022, arXiv 2203.02155 (1 epoch; more epochs overfit)",
    ),
    RecommendedGrid(
        ("rloo", "reinforce_pp", "ppo"), {"loss.kl_beta": (0.01, 0.05, 0.1)},
        "around the defaults of the methods",
    ),
)  # fmt: skip
"""Methods that are not listed get the learning rates alone. Online methods use the grid of their
loss."""


def recommended_grid(
    method: str, is_online: bool, rates: LearningRates, trains_adapter: bool
) -> dict[str, tuple[float, ...]]:
    """The recommended values by setting, those of the learning rate last.

    rates: default learning rates of the method.
    """
    settings: dict[str, tuple[float, ...]] = {}
    for grid in RECOMMENDED_GRIDS:
        if method.removeprefix("online_") in grid.methods:
            settings |= grid.settings
    if not is_online:  # stored completions with advantages have no KL penalty in the reward
        settings.pop("loss.kl_beta", None)
    rate = rates.adapter if trains_adapter else rates.full
    settings["train.learning_rate"] = tuple(
        float(f"{factor * rate:.2g}") for factor in LEARNING_RATE_FACTORS
    )
    return settings


__all__ = ["LEARNING_RATE_FACTORS", "RECOMMENDED_GRIDS", "RecommendedGrid", "recommended_grid"]
