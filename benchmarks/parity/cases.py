"""The cases: the same step with equivalent settings in Valence and in the other library."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from valence.types import Kind

ROWS = 8

Settings = Mapping[str, Any]
Peer = Literal["TRL", "HALOs", "paper"]
SOURCES: dict[str, Kind] = {
    "kto": "judgement",
    "dpo": "preference",
    "cpo": "preference",
    "orpo": "preference",
    "sft": "demonstration",
    "sdpo": "feedback",
    "grpo": "ranking",
    "rloo": "ranking",
    "paper": "feedback",
    "halos kto": "judgement",
    "halos pairs": "preference",
    "halos scored": "ranking",
    "halos sft": "demonstration",
}
"""Kind of rows of each trainer. Valence trains on the same rows, converted to its method's kind."""


@dataclass(frozen=True)
class Case:
    """One step on ROWS rows.

    trainer: key of SOURCES. figures: the compared metrics. ours, theirs: settings of Valence's
    loss, and of the other library's trainer. batch: rows per micro-batch of the other library,
    which accumulates gradients over the step. swapped: exchange policy and reference. short:
    shorten prompts to their last token. steps: number of steps without updates; the last one is
    compared. names: Valence's name of a figure, if it differs. real: also run with the real model.
    double: compute in float64 on both sides. partial: every other row has no feedback. stale: the
    policy has changed since it sampled the completions, see ``change``.
    """

    name: str
    method: str
    trainer: str
    figures: tuple[str, ...]
    ours: Settings = field(default_factory=dict[str, Any])
    theirs: Settings = field(default_factory=dict[str, Any])
    batch: int = ROWS
    swapped: bool = False
    short: bool = False
    steps: int = 1
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    real: bool = False
    double: bool = False
    partial: bool = False
    stale: bool = False

    @property
    def is_sampled(self) -> bool:
        """Whether the completions are a round of the policy, with their scores as rewards."""
        return self.trainer in ("grpo", "rloo")

    @property
    def source(self) -> Kind:
        return SOURCES[self.trainer]

    @property
    def peer(self) -> Peer:
        if self.trainer == "paper":
            return "paper"
        return "HALOs" if self.trainer.startswith("halos") else "TRL"


def change(ids: Sequence[int]) -> list[float]:
    """How much the log-probability of each token of a completion has changed since it was sampled
    (nats): at random, so that ratios are on both sides of the limits of a clipped loss.
    """
    rng = random.Random(str(list(ids)))
    return [rng.uniform(-0.4, 0.4) for _ in ids]


def z0_of_trl(batch: int) -> dict[str, Any]:
    """Settings for TRL's estimate of z0: one per batch, where each prompt gets the completion of
    the previous row.
    """
    return {"z0_scope": {"group": batch, "pairing": "previous"}}


def z0_of_halos(batch: int) -> dict[str, Any]:
    """Settings for HALOs' estimate of z0: one per batch, where each prompt gets the completion of
    the next row.
    """
    return {"z0_scope": {"group": batch, "pairing": "next"}}


STEP = ("loss", "grad_norm")
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
KTO = (*STEP, *REWARDS, "kl")
PAIRS = (*STEP, *REWARDS, "rewards/accuracies")
SIGNS = (*STEP, "rewards/accuracies")
"""Figures of a loss whose rewards grow with those of the other library, and are not the same."""
UNSCALED = {"rewards/chosen": "logratio/chosen", "rewards/rejected": "logratio/rejected"}
"""HALOs reports log-ratios as the rewards of kto. Valence's rewards are scaled by beta."""


def trl(
    name: str,
    method: str,
    loss_type: Any = None,
    trainer: str = "dpo",
    figures: tuple[str, ...] = PAIRS,
    **more: Any,
) -> Case:
    """A case of one of TRL's trainers, by default DPOTrainer with a ``loss_type``."""
    theirs = {**more.pop("theirs", {}), **({} if loss_type is None else {"loss_type": loss_type})}
    return Case(name, method, trainer, figures, theirs=theirs, **more)


def both(**settings: Any) -> dict[str, Any]:
    """Settings with the same name and meaning in both libraries."""
    return {"ours": settings, "theirs": settings}


WEIGHTS = {"desirable_weight": 1.5, "undesirable_weight": 0.75}
UNPAIRED = (
    trl("kto", "kto", None, "kto", KTO, ours=z0_of_trl(ROWS), real=True),
    trl(
        "kto, models swapped, class weights",
        "kto",
        None,
        "kto",
        KTO,
        ours=z0_of_trl(ROWS) | WEIGHTS,
        theirs=WEIGHTS,
        swapped=True,
    ),
    trl(
        "kto, two batches accumulated",
        "kto",
        None,
        "kto",
        (*STEP, "kl"),
        ours=z0_of_trl(ROWS // 2),
        batch=ROWS // 2,
    ),
    trl("apo_zero_unpaired", "apo_zero_unpaired", "apo_zero_unpaired", "kto", (*STEP, *REWARDS)),
)

PAIRED = (
    trl("dpo", "dpo", "sigmoid", real=True),
    # TRL's sigmoid loss ignores label_smoothing. Its aot loss does not, and equals the sigmoid loss
    # for batches of one pair.
    trl("dpo, label smoothing", "dpo", "aot", **both(label_smoothing=0.1), batch=1),
    trl("dpo_norm", "dpo_norm", "sigmoid_norm", figures=STEP, **both(beta=5.0)),
    trl("robust_dpo", "robust_dpo", "robust", **both(label_smoothing=0.1)),
    trl("hinge", "hinge", "hinge", **both(beta=0.3)),
    trl("ipo", "ipo", "ipo", figures=STEP, ours={"tau": 0.2}, theirs={"beta": 0.2}, real=True),
    trl("exo", "exo", "exo_pair", **both(label_smoothing=1e-3)),
    trl("nca", "nca", "nca_pair"),
    trl("bco_pair, first step", "bco_pair", "bco_pair"),
    trl("sppo", "sppo", "sppo_hard"),
    trl("apo_zero", "apo_zero", "apo_zero"),
    trl("apo_down", "apo_down", "apo_down"),
    trl("discopop", "discopop", "discopop", ours={"tau": 0.1}, theirs={"discopop_tau": 0.1}),
    trl("aot", "aot", "aot", real=True),
    trl("aot, label smoothing", "aot", "aot", **both(label_smoothing=0.1)),
    trl("aot_unpaired", "aot_unpaired", "aot_unpaired", figures=(*STEP, *REWARDS)),
    trl("sft of the chosen side", "sft", "sft", figures=STEP),
)


def divergence(
    method: str, loss_type: str, ours: str, theirs: str, settings: Settings, **more: Any
) -> Case:
    """A case with another f-divergence. ours, theirs: its names."""
    mine, other = settings.get("ours", {}), settings.get("theirs", {})
    more.setdefault("figures", SIGNS)
    return trl(
        f"{method}, {ours}", method, loss_type, ours={**mine, "f_divergence": ours},
        theirs={**other, "f_divergence_type": theirs}, **more,
    )  # fmt: skip


def alpha(value: float) -> dict[str, Settings]:
    """The exponent of the alpha divergence. TRL's coefficient is 1 - alpha."""
    return {"ours": {"f_alpha": value}, "theirs": {"f_alpha_divergence_coef": 1 - value}}


MODIFIED = (
    divergence("dpo", "sigmoid", "forward_kl", "forward_kl", {}),
    divergence("dpo", "sigmoid", "js", "js_divergence", {}),
    divergence("dpo", "sigmoid", "alpha", "alpha_divergence", alpha(0.3)),
    divergence("dpo_norm", "sigmoid_norm", "js", "js_divergence", both(beta=5.0), figures=STEP),
    divergence("robust_dpo", "robust", "alpha", "alpha_divergence", alpha(0.5)),
    divergence("hinge", "hinge", "js", "js_divergence", {}),
    divergence("ipo", "ipo", "forward_kl", "forward_kl", {}, figures=STEP),
    divergence("exo", "exo_pair", "js", "js_divergence", both(label_smoothing=1e-3)),
    divergence("discopop", "discopop", "js", "js_divergence", {}),
    trl("dpo, ld_alpha", "dpo", "sigmoid", **both(ld_alpha=0.5)),
    trl("nca, ld_alpha 0", "nca", "nca_pair", figures=STEP, **both(ld_alpha=0.0)),
    trl(
        "dpo, wpo", "dpo", "sigmoid", ours={"wpo": True}, theirs={"use_weighting": True}, real=True
    ),
    trl(
        "ipo, wpo",
        "ipo",
        "ipo",
        figures=STEP,
        ours={"wpo": True},
        theirs={"use_weighting": True},
    ),
    trl(
        "dpo + nll",
        "dpo",
        ["sigmoid", "sft"],
        ours={"nll_weight": 0.2},
        theirs={"loss_weights": [1.0, 0.2]},
        real=True,
    ),
    trl(
        "sppo + nll",
        "sppo",
        ["sppo_hard", "sft"],
        ours={"nll_weight": 3.0},
        theirs={"loss_weights": [1.0, 3.0]},
    ),
    trl(
        "dpo + nll by answer",
        "dpo",
        ["sigmoid", "sft"],
        ours={"nll_weight": 1.0, "nll_average": "sequence"},
        batch=1,
    ),
)

NO_NLL = {"cpo_alpha": 0.0}
SIMPO = {"simpo_gamma": 1.0, "beta": 2.0}
REFERENCE_FREE = (
    trl("cpo", "cpo", "sigmoid", "cpo"),
    trl("cpo, without nll", "cpo", "sigmoid", "cpo", ours={"nll_weight": 0.0}, theirs=NO_NLL),
    trl("simpo", "simpo", "simpo", "cpo", theirs=SIMPO | NO_NLL, real=True),
    trl(
        "simpo, label smoothing",
        "simpo",
        "simpo",
        "cpo",
        ours={"label_smoothing": 0.1},
        theirs=SIMPO | NO_NLL | {"label_smoothing": 0.1},
    ),
    trl(
        "simpo + nll",
        "simpo",
        "simpo",
        "cpo",
        ours={"nll_weight": 0.5},
        theirs=SIMPO | {"cpo_alpha": 0.5},
    ),
    trl(
        "slic, without nll",
        "slic",
        "hinge",
        "cpo",
        ours={"nll_weight": 0.0},
        theirs=NO_NLL | {"beta": 1.0},
    ),
    # TRL's likelihood includes the prompt, and is a mean over the tokens of a batch. With prompts
    # of one token and batches of one pair it equals the likelihood of the answer.
    trl("orpo, prompts of one token", "orpo", None, "orpo", batch=1, short=True, swapped=True),
    trl("sft", "sft", None, "sft", STEP, real=True),
    trl("dft", "dft", "dft", "sft", STEP),
)


def halos(
    name: str,
    method: str,
    formula: str,
    figures: tuple[str, ...] = PAIRS,
    kind: str = "pairs",
    **more: Any,
) -> Case:
    """A case of a formula in halos_formulas.py. kind: the rows, a part of a key of SOURCES."""
    return Case(
        name,
        method,
        f"halos {kind}",
        figures,
        theirs={**more.pop("theirs", {}), "formula": formula},
        **more,
    )


HUMANLINE = {"humanline": (-1.0, 1.5)}
CLAMP_BOUNDS = {"log_epsilon_P": -1.0, "log_epsilon_R": 1.5}
HUMANLINE_SETTINGS: dict[str, Any] = {"ours": HUMANLINE, "theirs": CLAMP_BOUNDS}
HALOS_KTO = (*STEP, "rewards/chosen", "rewards/rejected", "kl")

OF_HALOS = (
    halos("kto", "kto", "kto", HALOS_KTO, "kto", ours=z0_of_halos(ROWS), names=UNSCALED),
    halos(
        "kto, class weights",
        "kto",
        "kto",
        HALOS_KTO,
        "kto",
        ours=z0_of_halos(ROWS) | WEIGHTS,
        theirs=WEIGHTS,
        names=UNSCALED,
    ),
    halos(
        "kto, four micro-batches",
        "kto",
        "kto",
        (*STEP, "kl"),
        "kto",
        ours=z0_of_halos(ROWS // 4),
        batch=ROWS // 4,
    ),
    halos(
        "kto, humanline",
        "kto",
        "kto",
        (*STEP, "kl"),
        "kto",
        ours=z0_of_halos(ROWS) | HUMANLINE,
        theirs=CLAMP_BOUNDS,
        real=True,
    ),
    halos("dpo", "dpo", "dpo"),
    halos("dpo, humanline", "dpo", "dpo", **HUMANLINE_SETTINGS),
    halos("cdpo", "dpo", "cdpo", ours={"label_smoothing": 0.1}, theirs={"epsilon": 0.1}),
    halos("ipo", "ipo", "ipo", STEP, **both(tau=0.1)),
    halos(
        "ipo, humanline",
        "ipo",
        "ipo",
        STEP,
        ours={"tau": 0.1} | HUMANLINE,
        theirs={"tau": 0.1} | CLAMP_BOUNDS,
    ),
    halos("simpo", "simpo", "simpo", STEP, **both(beta=2.0, gamma_beta_ratio=0.5)),
    halos(
        "slic",
        "slic",
        "slic",
        ours={"margin": 1.0, "nll_weight": 0.1},
        theirs={"beta": 1.0, "lambda_coef": 0.1},
    ),
    halos("grpo, stored answers", "grpo", "grpo", STEP, "scored", real=True),
    halos("grpo, stored answers, humanline", "grpo", "grpo", STEP, "scored", **HUMANLINE_SETTINGS),
    halos("ppo, stored answers", "ppo", "ppo", STEP, "scored"),
    halos("ppo, stored answers, humanline", "ppo", "ppo", STEP, "scored", **HUMANLINE_SETTINGS),
    halos("sft", "sft", "sft", STEP, "sft"),
)


def hindsight(name: str, trainer: str, **more: Any) -> Case:
    """A case of hindsight without a limit of the signal, by default."""
    ours = {"clip": None, **more.pop("ours", {})}
    return Case(f"hindsight{name}", "hindsight", trainer, STEP, ours=ours, **more)


OF_HINDSIGHT = (
    hindsight("", "sdpo", real=True),
    # In a batch of one row nothing is padded, which would shift positions: TRL passes none, and
    # their embeddings are computed in float32.
    hindsight(", float64", "sdpo", double=True, batch=1),
    hindsight("", "paper", real=True),
    hindsight(", float64", "paper", double=True),
)


def sampled(name: str, method: str, trainer: str = "grpo", **more: Any) -> Case:
    """A case of a loss for sampled completions, by default stale ones. In the first step of a round
    the loss is a sum of advantages, which is 0, so only gradients are compared.
    """
    stale = more.pop("stale", True)
    return Case(name, method, trainer, STEP if stale else STEP[1:], stale=stale, **more)


def grpo(name: str, method: str, loss_type: str, **more: Any) -> Case:
    """A case of GRPOTrainer, with its clip and without a KL penalty, by default."""
    theirs = {"loss_type": loss_type, "beta": 0.0, **more.pop("theirs", {})}
    return sampled(name, method, theirs=theirs, **more)


UNCLIPPED = {"epsilon": 1e6}
OF_SAMPLED = (
    grpo("grpo, first step of a round", "grpo", "grpo", stale=False, batch=2, real=True),
    grpo("grpo", "grpo", "grpo"),
    grpo(
        "grpo, KL penalty", "grpo", "grpo",
        ours={"kl_weight": 0.04}, theirs={"beta": 0.04, "use_bias_correction_kl": False},
    ),
    grpo(
        "grpo, first step, KL of TRL", "grpo", "grpo",
        ours={"kl_weight": 0.04, "kl_estimator": "k2"}, theirs={"beta": 0.04},
        stale=False, batch=2, real=True,
    ),
    grpo("grpo, dual_clip", "grpo", "grpo", ours={"dual_clip": 1.25}, theirs={"delta": 1.25}),
    grpo("dapo, four batches", "dapo", "dapo", theirs={"epsilon_high": 0.28}, batch=2),
    grpo(
        "dr_grpo", "dr_grpo", "dr_grpo",
        ours={"max_tokens": 160},
        theirs={"scale_rewards": "none", "max_completion_length": 160},
    ),
    grpo(
        "gspo", "gspo", "grpo",
        ours={"eps_low": 0.02, "eps_high": 0.03},
        theirs={"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03},
    ),
    grpo("cispo", "cispo", "cispo", ours={"eps_high": 1.2}, theirs={"epsilon_high": 1.2}),
    sampled(
        "rloo, first step of a round", "rloo", "rloo",
        ours={"kl_beta": 0.05}, theirs={"beta": 0.05}, stale=False, batch=2, real=True,
    ),
    sampled("rloo", "rloo", "rloo", ours={"kl_beta": 0.0}, theirs={"beta": 0.0} | UNCLIPPED),
)  # fmt: skip

CASES = (
    *UNPAIRED,
    *PAIRED,
    *MODIFIED,
    *REFERENCE_FREE,
    *OF_HALOS,
    *OF_HINDSIGHT,
    *OF_SAMPLED,
)
