"""When to use each loss, and how its training curves look.

A loss without an entry is complete: its formula, settings and direction are derived from its
function.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GUIDE", "Guide"]


@dataclass(frozen=True, slots=True)
class Guide:
    """Advice for one row of the table of losses.

    when: reasons for and against the loss. curves: where its metrics start and how they move, with
    default settings. summary: replaces the first sentence of the loss function, for methods that
    share one function.
    """

    when: str
    curves: str
    summary: str = ""


GUIDE: dict[str, Guide] = {
    "kto": Guide(
        "The default for thumbs, in any proportion. Tolerates wrong labels: a completion that "
        "strongly contradicts its label has almost no gradient. If one class is much larger, "
        "set `class_weights: auto`.",
        "The loss starts at half the mean class weight (0.5). `rewards/margins` and `rewards/auc` "
        "rise. `kl` is often 0 at first, because `kl/raw` is below 0. If `rewards/chosen` and "
        "`rewards/rejected` both fall, lower the learning rate or raise `desirable_weight`.",
    ),
    "apo_zero_unpaired": Guide(
        "Thumbs, if the good completions are better than the model's. Faster than kto: it "
        "needs no mismatched completions.",
        "The loss starts at 0.5. `logratio/chosen` rises from 0 and `logratio/rejected` falls; "
        "progress slows about 1/beta nats away from 0.",
    ),
    "bco": Guide(
        "Thumbs with reliable labels, on prompts of the same kind. Wrong labels do more harm "
        "than with kto: they have the largest gradient.",
        "The loss starts at log 2 = 0.693 and has no upper bound. The threshold delta follows the "
        "mean reward of both classes, so look at `rewards/margins` and not at the sign of a "
        "reward.",
    ),
    "aot_unpaired": Guide(
        "Thumbs, to move the whole distribution of rewards of one class above that of the "
        "other. Use large steps with both classes (`data.stratify`): a step ignores surplus "
        "completions of the larger class, and does nothing with one class.",
        "The loss starts at log 2 = 0.693. If a step has several micro-batches, the policy's "
        "forward pass runs twice.",
    ),
    "dpo": Guide(
        "The default for pairs: the best-understood of these losses.",
        "The loss starts at log 2 = 0.693 and `rewards/accuracies` at 0.5. Usually `logps/chosen` "
        "and `logps/rejected` both fall, because only their difference is trained. If the training "
        "accuracy is near 1 and the held-out accuracy does not rise, train fewer epochs, raise "
        "beta, or set `label_smoothing`.",
    ),
    "dpo_norm": Guide(
        "Pairs of completions with very different lengths, if dpo makes completions longer and "
        "longer.",
        "The loss starts at log 2 = 0.693. Rewards are per token, so neither rewards nor beta are "
        "comparable with those of dpo.",
    ),
    "robust_dpo": Guide(
        "Pairs with a known share of flipped labels: set `label_smoothing` to that share. With 0, "
        "robust_dpo equals dpo.",
        "The loss starts at log 2 = 0.693. With `label_smoothing` above 0 it has no lower bound "
        "and keeps falling, so look at `rewards/accuracies` on held-out pairs.",
    ),
    "ipo": Guide(
        "Few pairs, or labels without noise, for which dpo increases the difference of the "
        "log-ratios without limit.",
        "The loss starts at 1/(2*tau)^2 = 25 and stays near it while `rewards/accuracies` rises, "
        "because the target, a difference of 5 nats per token, is rarely reached. Gradients are "
        "large, and are clipped in most steps.",
    ),
    "hinge": Guide(
        "To stop training on pairs that are already learned.",
        "The loss starts at 1 and can reach 0. At 0, `grad_norm` is 0 and more epochs have no "
        "effect.",
    ),
    "slic": Guide(
        "Too little memory for a reference, and a model that was fine-tuned on similar "
        "completions.",
        "Long completions make the loss large. Once the difference of a pair reaches "
        "`loss.margin`, only the likelihood term is left and `logps/chosen` rises. "
        "`rewards/accuracies` starts at the accuracy of the initial model, not at 0.5.",
    ),
    "simpo": Guide(
        "Too little memory for a reference, and completions that must not become longer. "
        "Nothing keeps the policy near the initial model: use a small learning rate.",
        "`rewards/accuracies` starts at the accuracy of the initial model, not at 0.5. If "
        "`logps/chosen` falls fast, set `nll_weight` or lower the learning rate.",
    ),
    "cpo": Guide(
        "Too little memory for a reference, and pairs of good and nearly good completions, "
        "such as translations.",
        "With `nll_weight: 1`, the likelihood is a large part of the loss, and `logps/chosen` "
        "rises. `rewards/accuracies` starts at the accuracy of the initial model. Shorter "
        "completions tend to have larger rewards.",
    ),
    "orpo": Guide(
        "A model that was not fine-tuned: supervised fine-tuning and preference optimization "
        "in one run.",
        "The curve of the loss looks like that of sft: `logps/chosen` rises and the odds change "
        "slowly.",
    ),
    "apo_zero": Guide(
        "Chosen completions that are better than the model's own, if dpo makes them less likely.",
        "The loss starts at 1. `logratio/chosen` rises from 0 and `logratio/rejected` falls.",
    ),
    "apo_down": Guide(
        "Chosen completions that are worse than the model's own, such as those of an older or "
        "smaller model.",
        "The loss starts at 1. `logratio/chosen` first stays near 0 and then falls, as intended; "
        "`rewards/margins` rises.",
    ),
    "exo": Guide(
        "A policy that should concentrate on some of the favoured completions instead of "
        "covering all. Keep `label_smoothing` above 0: it is part of the method; 0 is clamped "
        "to 1e-6.",
        "The loss starts at 2.76. Its minimum is at a difference d = log((1-e)/e)/beta = 69 nats.",
    ),
    "nca": Guide(
        "Chosen completions that must stay likely, for example in mathematics or code.",
        "The loss starts at 2 log 2 = 1.386. `logratio/chosen` rises to about log(2)/beta = 7 nats "
        "and stays there; `logratio/rejected` keeps falling.",
    ),
    "bco_pair": Guide(
        "A reward that should also separate good from bad completions of different prompts.",
        "The loss starts at 2 log 2 = 1.386. The threshold delta follows the mean reward of both "
        "sides, so look at `rewards/margins`.",
    ),
    "sppo": Guide(
        "Training in several rounds, with pairs that the policy sampled in the previous round.",
        "The loss starts at 2/(2*beta)^2 = 50, and falls as `logratio/chosen` approaches +5 nats "
        "and `logratio/rejected` -5. Gradients are about 200 times those of dpo, and are clipped "
        "in every step.",
    ),
    "dpop": Guide(
        "Pairs that differ in a few tokens, both of which dpo would make less likely.",
        "The loss starts at log 2 = 0.693. It rises by 5 for each nat that a chosen completion "
        "loses against the reference, so `logratio/chosen` stays at 0 or above.",
    ),
    "discopop": Guide(
        "Experiments: the loss has no derivation.",
        "The loss starts at 0.847. The first steps can lower `rewards/accuracies` below 0.5, "
        "because the slope at d = 0 has the opposite sign.",
    ),
    "aot": Guide(
        "To increase the differences over the whole distribution rather than pair by pair. "
        "Use a large `train.batch_size`: ranks are computed within a step.",
        "The loss starts at log 2 = 0.693. If a step has several micro-batches, the policy's "
        "forward pass runs twice.",
    ),
    "sft": Guide(
        "The default for demonstrations, and the usual first training of a model that does "
        "not answer in the right form.",
        "The loss is the negative of `logps/token`. If the held-out loss rises while the training "
        "loss falls, the model overfits, on small data after two or three epochs.",
    ),
    "dft": Guide(
        "Demonstrations, if sft makes the model forget what it could do. It forgets less, but "
        "also learns fewer new things.",
        "The loss is the mean of -p log p, at most 0.37, and can rise while the model learns. Look "
        "at `logps/token` instead.",
    ),
    "hindsight": Guide(
        "Comments, corrections or the user's next message, without labels; or a reward that "
        "says in words what is wrong. Works only if the model answers differently when it has "
        "read the feedback: the test before training says whether it does; small models "
        "often do not.",
        "The loss says little. `signal/mean` is the mean difference between the log-probabilities "
        "of teacher and policy (nats per token): below 0 where feedback complains. It moves "
        "towards 0 with `teacher.weights: initial`. `signal/clipped` should be near 0. A falling "
        "`logps/token` of held-out rows, or answers that become short or repeat, are signs of "
        "collapse: lower the learning rate.",
    ),
    "distill": Guide(
        "A larger teacher with the same tokenizer. On stored completions, it shows more than "
        "sft: how likely each token of the vocabulary is. As online_distill, the model learns "
        "where the teacher would continue its completions differently, which corrects its "
        "own mistakes and needs no reward.",
        "The loss is the divergence from the teacher (nats per token). It falls and never reaches "
        "0 where the model is too small. `entropy` falls with `beta: 1`. As online_distill, also "
        "look at `rollout/length` and `rollout/distinct_4grams`.",
        "Distillation from another model: move the policy towards the teacher at each token "
        "of a completion.",
    ),
    "grpo": Guide(
        "The default for rewards. Expect less from stored completions than from online "
        "training. A group (the completions of one prompt) with equal scores changes nothing; "
        "one with small differences counts as much as any other.",
        "The loss starts near 0, because advantages cancel within a group, and its value says "
        "little. `logratio/token` shows how far the policy has moved. If `clipped` exceeds a few "
        "percent, take fewer steps on the same completions.",
        "Group relative policy optimization: the clipped surrogate of PPO, with advantages "
        "normalized within the completions of a prompt.",
    ),
    "dr_grpo": Guide(
        "Instead of grpo, if wrong completions become longer and longer, or the size of score "
        "differences matters.",
        "The gradient is as small as the differences of scores, and shrinks as the policy "
        "improves. On stored completions, set `max_tokens`: with null, the gradient grows with the "
        "length of completions, and is clipped in every step.",
        "GRPO without normalization by length and standard deviation, which favours long "
        "wrong completions, and very easy and very hard prompts.",
    ),
    "dapo": Guide(
        "Instead of grpo, for long completions and many steps: long bad completions are "
        "penalized in full, and unlikely tokens can become likelier, which preserves "
        "diversity. Online, prompts whose completions have equal rewards are replaced "
        "(`rollout.replace_tied`).",
        "Same as for grpo; `clipped` is lower because of the wider interval above 1.",
        "GRPO with a wider upper clipping bound and an average over all tokens of the step.",
    ),
    "gspo": Guide(
        "Instead of grpo, for rewards of whole completions and for mixtures of experts, where "
        "ratios of single tokens are noisy. Clips whole completions or none.",
        "`clipped` is a share of completions, often 10 to 20 percent or more, because the interval "
        "is narrow. This is normal.",
    ),
    "cispo": Guide(
        "Instead of grpo, if rare tokens matter, such as those that start a self-correction. "
        "Only the cap limits the policy: take few steps on the same completions.",
        "Ignore the value of the loss. `clipped` is the share of tokens at the cap, near 0 by "
        "default.",
    ),
    "rloo": Guide(
        "Several rollouts per prompt, and rewards whose scale matters. Take one step per round.",
        "The loss starts near 0 and its value says little. Nothing is clipped: a `logratio/token` "
        "far from 0 is a warning sign, because the ratio of whole completions soon becomes "
        "extreme.",
    ),
    "reinforce_pp": Guide(
        "Rewards that are comparable across prompts. Like ppo, but without a value model. "
        "Online, one completion per prompt is enough.",
        "Same as for grpo, but `advantages/positive` depends on the prompts of the round and does "
        "not measure progress.",
        "REINFORCE++: the clipped surrogate of PPO with advantages normalized over all "
        "completions.",
    ),
    "ppo": Guide(
        "Rewards that are comparable across prompts. Online, a value head, which is also "
        "trained, estimates the expected return at every token. Stored completions use none: "
        "scores are normalized over the step.",
        "Same as for grpo. `value/explained` should rise from 0. If it is negative, the value head "
        "does harm: change its learning rate first.",
        "Proximal policy optimization: maximize the advantage, weighted by the probability ratio, "
        "until the ratio leaves the clipping interval.",
    ),
    "bradley_terry": Guide(
        "Pairs. Scores of different prompts may not be comparable; `center_coef: 0.01` keeps "
        "all scores around 0.",
        "The loss starts near log 2 = 0.693 and `rewards/accuracies` near 0.5. People agree on "
        "about three of four pairs: distrust a much higher held-out accuracy.",
    ),
    "pointwise": Guide(
        "Thumbs, or scores of one or several attributes. For targets outside 0 to 1, set "
        "`error` to squared, or to huber if some are outliers.",
        "With thumbs, the loss starts near log 2 = 0.693. `rewards/auc` measures the ranking and "
        "`rewards/calibration_error` the probabilities, which overfitting harms first. With "
        "scores, look at `rewards/spearman`.",
    ),
    "ordinal": Guide(
        "Stars or other ordered levels.",
        "The loss starts near log(levels), which is 1.61 for 5 levels. `rewards/spearman` rises, "
        "and `rewards/error`, measured in levels, falls.",
    ),
}
"""By the name of a loss."""
