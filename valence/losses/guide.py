"""What experience says of the rows of the table of losses: when to use each, and what its curves
look like.

A row without an entry is complete: what can be derived of it (formula, settings, direction) is told
elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GUIDE", "Guide"]


@dataclass(frozen=True, slots=True)
class Guide:
    """``when``: what speaks for the loss and against it.

    ``curves``: where its numbers start and how they move. Figures are those of the default
    settings.
    """

    when: str
    curves: str


GUIDE: dict[str, Guide] = {
    "kto": Guide(
        "Thumbs up and down, of any proportion, that need not come in pairs: the first choice "
        "for them. Wrong verdicts do "
        "little harm, since an answer that is far on the wrong side has next to no gradient "
        "left. With far "
        "more of the one than of the other, set `class_weights: auto`. Each step also measures "
        "as many mismatched "
        "answers, without a gradient.",
        "The loss starts at half the mean class weight (0.5). `rewards/margins` and "
        "`rewards/auc` rise. `kl` is often 0 "
        "early on, as `kl/raw` is below 0. When both `rewards/chosen` and `rewards/rejected` "
        "fall, the policy moves away "
        "from all answers of the data: lower the learning rate, or raise `desirable_weight`.",
    ),
    "apo_zero_unpaired": Guide(
        "Thumbs up and down where the ones up are better than what the model says by itself. "
        "Cheaper than kto, as there "
        "are no mismatched answers to measure, and the anchor stays where the reference is.",
        "The loss starts at 0.5. `logratio/chosen` rises from 0 and `logratio/rejected` falls, "
        "each by itself; progress "
        "slows once they are some 1/beta nats away.",
    ),
    "bco": Guide(
        "Thumbs up and down whose verdicts can be trusted: the logistic loss pulls hardest on "
        "answers that are furthest "
        "on the wrong side, so wrong verdicts cost more than in kto. Thumbs up and down should "
        "be on the same kind of "
        "prompts: the paper's density ratio, which corrects for a difference, is not implemented.",
        "The loss starts at log 2 = 0.693 and has no upper bound. The threshold delta follows "
        "the mean reward of both "
        "classes, so what counts is `rewards/margins`, not the sign of a reward.",
    ),
    "aot_unpaired": Guide(
        "Thumbs up and down, where the whole distribution of rewards of the one shall lie above "
        "that of the other. Wants "
        "large steps with both classes in each (`data.stratify`): what the larger class has too "
        "many of is not learnt "
        "from in that step, and a step of one class alone learns nothing.",
        "The loss starts at log 2 = 0.693. A step that is cut into several micro-batches runs "
        "the policy forward twice.",
    ),
    "dpo": Guide(
        "Pairs, and no particular worry: the best understood of the paired losses, so begin here.",
        "The loss starts at log 2 = 0.693 and `rewards/accuracies` at 0.5. Both `logps/chosen` "
        "and `logps/rejected` "
        "usually fall, the rejected ones faster, as only their gap is trained. Accuracy near 1 "
        "in training with none "
        "gained on held-out pairs is overfitting: fewer epochs, a larger beta, or "
        "`label_smoothing`.",
    ),
    "dpo_norm": Guide(
        "Pairs whose answers differ much in length, when dpo makes answers longer and longer.",
        "The loss starts at log 2 = 0.693. Rewards are per token, so neither they nor beta "
        "compare with those of dpo.",
    ),
    "robust_dpo": Guide(
        "Pairs of which a known share is labelled the wrong way round: set `label_smoothing` to "
        "it. With 0 it is dpo.",
        "The loss starts at log 2 = 0.693 whatever the share, and has no lower bound: with "
        "`label_smoothing` above 0 it "
        "goes below 0 and keeps falling, so judge by `rewards/accuracies` on held-out pairs.",
    ),
    "ipo": Guide(
        "Few pairs, or verdicts that always agree, with which dpo would push the gap without "
        "end: the target is finite.",
        "The loss starts at 1/(2*tau)^2 = 25. The target is a gap of 5 nats per token, which is "
        "rarely reached, so the "
        "loss stays near 25 while `rewards/accuracies` climbs. Gradients are large, and clipping "
        "acts on most steps.",
    ),
    "hinge": Guide(
        "Pairs, when what is learnt already should be left alone: a pair that is ahead by 1/beta "
        "nats has no gradient.",
        "The loss starts at 1 and can reach 0, after which `grad_norm` is 0 and more epochs "
        "change nothing.",
    ),
    "slic": Guide(
        "Pairs, and no room for a reference; best on a model that was fine-tuned on answers of "
        "this sort.",
        "The likelihood is a sum over the answer, so long answers make the loss large; once a "
        "pair is ahead by `margin`, "
        "only the likelihood term is left and `logps/chosen` rises. `rewards/accuracies` starts "
        "at the model's own "
        "preference, not at 0.5.",
    ),
    "simpo": Guide(
        "Pairs, no room for a reference, and answers that shall not grow longer. Nothing holds "
        "the policy where it "
        "started, so small learning rates matter more than elsewhere.",
        "`rewards/accuracies` starts at the model's own preference, not at 0.5. `logps/chosen` "
        "tends to fall along with "
        "`logps/rejected`; if it falls fast, add `nll_weight` or lower the learning rate.",
    ),
    "cpo": Guide(
        "Pairs of good and nearly good answers, as in translation, with no room for a reference.",
        "With `nll_weight: 1` the likelihood is a good part of the loss, so `logps/chosen` "
        "rises. `rewards/accuracies` "
        "starts at the model's own preference, and favours short answers.",
    ),
    "orpo": Guide(
        "Pairs and a model that was not fine-tuned yet: imitation and preference in one run, "
        "without a reference.",
        "Most of the loss is the mean negative log-likelihood of the chosen answers, so it looks "
        "like a curve of sft: "
        "`logps/chosen` rises, and the odds move slowly.",
    ),
    "apo_zero": Guide(
        "Pairs whose chosen answers are better than what the model says by itself, when dpo "
        "makes them less likely.",
        "The loss starts at 1. `logratio/chosen` rises from 0 while `logratio/rejected` falls.",
    ),
    "apo_down": Guide(
        "Pairs whose chosen answers are worse than what the model says by itself, as pairs of an "
        "older or smaller model are.",
        "The loss starts at 1. `logratio/chosen` stands still at first and then falls, by "
        "intention; `rewards/margins` rises.",
    ),
    "exo": Guide(
        "Pairs, when the policy shall commit to what the verdicts favour rather than cover all "
        "of it. `label_smoothing` "
        "is part of the method and above 0.",
        "The loss starts at 2.76, and is least where the gap d is log((1-e)/e)/beta = 69 nats; "
        "beyond it pairs are pulled back.",
    ),
    "nca": Guide(
        "Pairs, when the chosen answers shall stay likely, as in mathematics or code, where dpo "
        "makes them less so.",
        "The loss starts at 2 log 2 = 1.386. `logratio/chosen` rises to about log(2)/beta = 7 "
        "nats and stays there; "
        "`logratio/rejected` keeps falling.",
    ),
    "bco_pair": Guide(
        "Pairs, when the reward shall also tell good answers from bad ones across prompts, and "
        "not within a pair alone.",
        "The loss starts at 2 log 2 = 1.386. The threshold delta follows the mean reward of both "
        "sides; read `rewards/margins`.",
    ),
    "sppo": Guide(
        "Pairs that the model itself has sampled in the round before, one round after the other.",
        "The loss starts at 2/(2*beta)^2 = 50, and falls as `logratio/chosen` nears +5 nats and "
        "`logratio/rejected` -5. "
        "Gradients are some 200 times those of dpo, so clipping acts on every step.",
    ),
    "dpop": Guide(
        "Pairs whose answers differ in a few tokens only, where dpo lowers both: here the chosen "
        "ones may not fall below "
        "the reference.",
        "The loss starts at log 2 = 0.693 and jumps when chosen answers lose likelihood (5 for "
        "each nat); "
        "`logratio/chosen` stays at 0 or above.",
    ),
    "discopop": Guide(
        "Pairs, as an experiment: it was found by search, not derived, and is not convex.",
        "The loss starts at 0.847. The first steps can lower `rewards/accuracies` below 0.5, "
        "since the slope at d = 0 has "
        "the other sign; further from 0 it is that of dpo.",
    ),
    "aot": Guide(
        "Pairs, where gaps shall grow over the whole distribution rather than pair by pair. "
        "Wants large steps: the ranks "
        "are those within one step.",
        "The loss starts at log 2 = 0.693. A step that is cut into several micro-batches runs "
        "the policy forward twice.",
    ),
    "sft": Guide(
        "Answers to imitate. The usual first step for a model that does not answer in the right "
        "form yet.",
        "The loss is minus `logps/token`, the mean over trained tokens. Held-out loss that rises "
        "while the training loss "
        "falls is overfitting, which comes after two or three epochs on small data.",
    ),
    "dft": Guide(
        "Answers to imitate, when sft makes the model forget: tokens that it finds unlikely "
        "hardly move it. For the same "
        "reason it teaches little that is new.",
        "The loss is the mean of -p log p, at most 0.37, and can rise while the model learns, as "
        "p passes 0.37 from "
        "below. Watch `logps/token`.",
    ),
    "grpo": Guide(
        "Several scored answers to each prompt, of which the better ones in each group shall "
        "become likelier. Stored "
        "answers are not the policy's own, so expect less than of training on fresh ones. A "
        "group whose scores are all "
        "equal teaches nothing, and one whose scores hardly differ as much as any other.",
        "The loss starts near 0, as advantages cancel within a group, and its value says little. "
        "`logratio/token` shows "
        "how far the policy has moved; when `clipped` grows beyond a few percent, the answers "
        "are used up.",
    ),
    "dr_grpo": Guide(
        "As grpo, where wrong answers grow longer and longer, or where scores say by how much an "
        "answer is better: neither "
        "the length of an answer nor the spread of its group changes what a token counts.",
        "Advantages are in units of the score, so the gradient is as small as the differences of "
        "scores are, and falls as the "
        "policy gets better. With `max_tokens: null` on stored answers it is as large as answers "
        "are long: set it, or "
        "expect clipping on every step.",
    ),
    "dapo": Guide(
        "As grpo, for long answers and many steps: every token counts the same, so long answers "
        "are not let off, and unlikely "
        "tokens have more room to become likelier, which keeps the policy from narrowing down. "
        "On the policy's own answers, "
        "prompts whose answers all have the same reward are replaced by others.",
        "As grpo; `clipped` is lower, by the wider interval above 1.",
    ),
    "gspo": Guide(
        "As grpo, for rewards of whole answers and for mixtures of experts, where ratios of "
        "single tokens are noise: an answer "
        "is clipped as a whole, or not at all.",
        "`clipped` is a share of answers and far higher than with grpo, 10 to 20 percent and "
        "more, since the interval is "
        "narrow; that is as it should be.",
    ),
    "cispo": Guide(
        "As grpo, where rare tokens matter, such as those that begin a correction: no token "
        "loses its gradient, however far "
        "its ratio has moved. Nothing but the cap holds the policy back, so keep to few steps on "
        "the same answers.",
        "The value of the loss says nothing: its gradient alone is meant. `clipped` is the share "
        "of tokens at the cap, and near "
        "0 with the default.",
    ),
    "rloo": Guide(
        "Several answers of the policy's own to each prompt, and rewards that shall count as "
        "they are: the plain gradient of "
        "the expected reward, with the divergence from the reference as a part of it. One step "
        "for each round.",
        "The loss starts near 0 and its value says little. Nothing is clipped: on stored or old "
        "answers the ratio of whole "
        "answers is soon extreme, and `logratio/token` away from 0 is a warning.",
    ),
    "reinforce_pp": Guide(
        "Rewards that compare across prompts, one answer to each prompt or several, and no value "
        "model: as ppo, with the mean of "
        "the round in place of values.",
        "As grpo. Prompts that are easy have positive advantages throughout, hard ones negative: "
        "`advantages/positive` says "
        "how the round is made up, not how well it went.",
    ),
    "ppo": Guide(
        "Scores that mean the same for every prompt. On the policy's own answers a value head "
        "says what was to be expected at "
        "every token, which costs another model or head to train. On stored answers there is "
        "none: scores are compared over the "
        "whole step.",
        "The loss starts near 0 and its value says little; `logratio/token` and `clipped` are "
        "read as for grpo. "
        "`value/explained` should rise from 0; below 0 the value head does harm, and its "
        "learning rate is the first to look at.",
    ),
    "bradley_terry": Guide(
        "Pairs, and the aim is a model that scores answers. Only differences within a prompt are "
        "learnt, so scores of "
        "different prompts need not compare; `center_coef: 0.01` keeps them around 0.",
        "The loss is near log 2 = 0.693 and `rewards/accuracies` near 0.5 at first. People agree "
        "with each other on no more "
        "than three pairs in four or so, and a held-out accuracy far above that deserves "
        "suspicion.",
    ),
    "pointwise": Guide(
        "Thumbs or numbers without pairs, one attribute or several, and the aim is a model that "
        "scores answers. For targets "
        "outside 0 to 1 set `error` to squared, or to huber where some are far off.",
        "With thumbs the loss is near log 2 = 0.693 at first. `rewards/auc` says how well it "
        "ranks, "
        "`rewards/calibration_error` how far its probabilities can be believed; overfitting "
        "spoils the latter first. With "
        "numbers, read `rewards/spearman`.",
    ),
    "ordinal": Guide(
        "Stars, or other levels with an order whose steps need not be alike, and the aim is a "
        "model that scores answers.",
        "The loss is near log(levels) = 1.61 at first, as all levels are equally likely. "
        "`rewards/spearman` rises, and "
        "`rewards/error`, in levels, falls.",
    ),
}
"""By the name of a row."""
