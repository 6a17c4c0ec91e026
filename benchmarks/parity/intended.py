"""Intended differences between Valence and the other libraries, with their reasons.

The benchmark runs those that a step can show, and fails if the results agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.parity.cases import (
    REWARDS,
    ROWS,
    STEP,
    Case,
    Peer,
    both,
    divergence,
    grpo,
    halos,
    hindsight,
    sampled,
    trl,
    z0_of_halos,
    z0_of_trl,
)


@dataclass(frozen=True)
class Intended:
    """An intended difference. case: a step that shows it in all of its figures; None if one side
    rejects the setting.
    """

    peer: Peer
    title: str
    reason: str
    case: Case | None = None


def _with_case(case: Case, title: str, reason: str) -> Intended:
    return Intended(case.peer, title, reason, case)


_HALF = ROWS // 2

INTENDED = (
    _with_case(
        trl("kto, default z0, two batches", "kto", None, "kto", (*STEP, "kl"), batch=_HALF),
        "TRL: one z0 for each batch (over processes, the mean of theirs), of the row before. "
        "Valence: one for the step over all "
        "processes, of a row that differs",
        "z0 estimates one divergence of the policy: more rows estimate it better, and "
        "accumulation must not change a step",
    ),
    _with_case(
        trl(
            "kto, rewards of two batches",
            "kto",
            None,
            "kto",
            REWARDS,
            ours=z0_of_trl(_HALF),
            batch=_HALF,
        ),
        "TRL: mean of the batches' means, whatever each holds of a class. Valence: mean over all "
        "rows of the class",
        "a mean of a class is one over its rows",
    ),
    _with_case(
        trl(
            "dpo, label smoothing of sigmoid",
            "dpo",
            "sigmoid",
            figures=STEP,
            **both(label_smoothing=0.1),
        ),
        "TRL's sigmoid does not read label_smoothing. Valence's dpo does",
        "conservative DPO is this loss; a setting that is read by nothing misleads",
    ),
    _with_case(
        trl("dpo_norm, rewards", "dpo_norm", "sigmoid_norm", figures=REWARDS, **both(beta=5.0)),
        "TRL reports beta*r. Valence reports beta*r/n (and r as logratio/*)",
        "the reward of this loss is what it compares",
    ),
    _with_case(
        trl("ipo, rewards", "ipo", "ipo", figures=REWARDS, ours={"tau": 0.2}, theirs={"beta": 0.2}),
        "TRL reports beta*r. Valence reports tau*r/n",
        "the reward of this loss is what it compares",
    ),
    _with_case(
        replace(
            divergence("dpo", "sigmoid", "js", "js_divergence", {}),
            name="dpo, js, rewards",
            figures=REWARDS,
        ),
        "TRL reports beta*r for every divergence. Valence reports what the divergence makes of r",
        "the reward of this loss is what it compares",
    ),
    _with_case(
        trl(
            "dpo + nll, pair by pair",
            "dpo",
            ["sigmoid", "sft"],
            figures=STEP,
            ours={"nll_weight": 1.0},
            batch=1,
        ),
        "TRL: mean over tokens inside each batch, then over batches. Valence: over all chosen "
        "tokens of the step",
        "accumulation must not change a step",
    ),
    _with_case(
        trl("aot, pair by pair", "aot", "aot", figures=STEP, batch=1),
        "TRL sorts inside each batch. Valence sorts the whole step",
        "accumulation must not change a step; more pairs show the distributions better",
    ),
    _with_case(
        trl("bco_pair, second step", "bco_pair", "bco_pair", figures=STEP, steps=2),
        "TRL has no delta. Valence's is the running mean of the rewards, which is 0 in the first "
        "step",
        "arXiv 2404.04656 has the shift",
    ),
    _with_case(
        trl("orpo", "orpo", None, "orpo", STEP),
        "TRL's likelihood spans the prompt, too, and is one mean over the tokens of a batch. "
        "Valence's is of the answer alone, "
        "a mean inside each answer",
        "Eq. 6 of arXiv 2403.07691 is the likelihood of the answer; a prompt is not trained on",
    ),
    _with_case(
        trl(
            "slic against cpo's hinge + nll",
            "slic",
            "hinge",
            "cpo",
            STEP,
            theirs={"beta": 1.0, "cpo_alpha": 0.1},
        ),
        "TRL adds the mean over tokens of the negative log-likelihood. Valence adds its sum",
        "arXiv 2305.10425 regularises with the log-likelihood of a sequence",
    ),
    _with_case(
        grpo(
            "grpo, KL of TRL",
            "grpo",
            "grpo",
            ours={"kl_weight": 0.04, "kl_estimator": "k2"},
            theirs={"beta": 0.04},
        ),
        "TRL multiplies the k3 of a token by its ratio (use_bias_correction_kl). Valence has k3 "
        "and k2 without it",
        "the gradient of k2 is that of TRL's penalty in the first step of a round, where all "
        "ratios are 1",
    ),
    _with_case(
        sampled("rloo, clip", "rloo", "rloo", ours={"kl_beta": 0.0}, theirs={"beta": 0.0}),
        "TRL clips the ratio of a completion, by default to 0.8 to 1.2. Valence's rloo does not",
        "arXiv 2402.14740 has no clip; in its one step per round, no ratio differs from 1",
    ),
    _with_case(
        halos(
            "kto, default z0, four micro-batches",
            "kto",
            "kto",
            (*STEP, "kl"),
            "kto",
            batch=ROWS // 4,
        ),
        "HALOs: one z0 for each micro-batch. Valence: one for the step",
        "accumulation must not change a step",
    ),
    _with_case(
        halos(
            "kto, rewards",
            "kto",
            "kto",
            ("rewards/chosen", "rewards/rejected"),
            "kto",
            ours=z0_of_halos(ROWS),
        ),
        "HALOs reports r. Valence reports beta*r, and r as logratio/*",
        "the same name means the same for every loss",
    ),
    _with_case(
        halos(
            "grpo, spread of the population",
            "grpo",
            "grpo",
            STEP,
            "scored",
            theirs={"spread": "population"},
        ),
        "HALOs divides by the population's standard deviation and adds nothing to it. Valence by "
        "the sample's, plus 1e-4",
        "as TRL's GRPO does; equal scores must not divide by 0",
    ),
    _with_case(
        halos(
            "grpo, divergence in the loss", "grpo", "grpo", STEP, "scored", theirs={"beta": 0.04}
        ),
        "HALOs can add the divergence from the reference (k3). Valence does not for stored answers",
        "the reference is also the policy that answered, near which the clipping keeps the policy",
    ),
    _with_case(
        halos(
            "ppo, advantages by token",
            "ppo",
            "ppo",
            STEP,
            "scored",
            theirs={"standardised": "tokens"},
        ),
        "HALOs standardises advantages over tokens, where a long answer counts more. Valence "
        "over scores",
        "without a value function all tokens of an answer share its score; how long it is says "
        "nothing of how good it is",
    ),
    _with_case(
        hindsight(", clip of 0.5 nats", "sdpo", ours={"clip": 0.5}),
        "TRL has no limit of the signal. Valence's is 5 nats by default, and 0.5 in this case",
        "answers of other models can have tokens that the teacher or the policy finds almost "
        "impossible, and each would outweigh all others",
    ),
    _with_case(
        hindsight(", half without feedback", "sdpo", partial=True),
        "TRL counts completions without feedback in the mean of the step. Valence leaves them out",
        "rows without a loss must not make the step of the others smaller",
    ),
    _with_case(
        hindsight(", from the third token", "paper", theirs={"first": 2}),
        "The authors leave out the first two tokens of each answer. Valence trains all of them",
        "the first words can be what the feedback is about, as the language of an answer",
    ),
    Intended(
        "TRL",
        "exo_pair requires label_smoothing, whose default is 0. Valence's exo defaults to 1e-3",
        "the divergence from a certain verdict is infinite; arXiv 2402.00856 recommends 1e-3",
    ),
    Intended(
        "TRL",
        "ipo divides what ld_alpha left by all tokens. Valence refuses ld_alpha where ipo "
        "is normalised",
        "a mean over tokens is no longer one, and length is what both are about",
    ),
    Intended(
        "TRL",
        "use_weighting fails together with the sft loss. Valence's wpo weighs the preference "
        "loss, and not the added likelihood",
        "the weights of arXiv 2406.11827 stand for sampling the pairs of its objective, which "
        "has no likelihood term",
    ),
    Intended(
        "TRL",
        "f_alpha_divergence_coef runs from forward KL (0) to reverse KL (1). Valence's "
        "f_alpha from reverse KL (0)",
        "arXiv 2309.16240, Tab. 1: f'(u) = (1 - u^-alpha)/alpha; the coefficient of TRL is 1 - "
        "alpha",
    ),
    Intended(
        "TRL",
        "Exponents of the divergences forward_kl (never) and alpha (at 80 nats) are cut. "
        "Valence cuts both at 40",
        "the square of e to more of them is infinite in float32, and so is the gradient",
    ),
    Intended(
        "TRL",
        "loss_type can sum several preference losses on the same pairs. Valence adds the "
        "likelihood alone",
        "pairs can be given to several methods, each with its own average",
    ),
    Intended(
        "TRL",
        "CPOTrainer has ipo, alphapo, and label smoothing of sigmoid. Valence has none of "
        "them without a reference",
        "IPO is defined against a reference (arXiv 2310.12036), CPO without noise (arXiv "
        "2401.08417)",
    ),
    Intended(
        "TRL",
        "A last batch of one row is its own mismatched pair. Valence takes a partner from "
        "the rows that follow",
        "a row behind its own prompt says nothing about mismatched answers",
    ),
    Intended(
        "TRL",
        "Rows have no weights. In Valence they have: 1 for all rows here",
        "feedback is of uneven worth",
    ),
    Intended(
        "HALOs",
        "PPO trains a value head together with the policy. Valence's surrogate for "
        "stored answers has none",
        "each answer has one score, and nothing is sampled that a value could be bootstrapped for",
    ),
)
