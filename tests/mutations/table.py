"""Wrong versions of the package, each with the tests that should see it."""
# ruff: noqa: E501 (the table is read across)

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROCESSES = "tests/dist/test_step.py::test_a_step_of_several_processes_is_that_of_one"
SPLIT = "tests/dist/test_fsdp.py::test_two_steps_of_several_processes_are_those_of_one"
WHOLE = "tests/golden/test_whole_step.py"
CREDITS = "tests/golden/test_credit.py"
CONTRACT = "tests/contract/test_contract.py"
PITFALLS = "tests/training/test_pitfalls.py"
PREFERENCE, UNPAIRED, COUPLED = (f"valence/losses/{name}.py" for name in ("preference", "unpaired", "coupled"))
IMITATION, POLICY, ADVANTAGE = (f"valence/losses/{name}.py" for name in ("imitation", "policy", "advantage"))
TABLE, STATS, AVERAGE = (f"valence/losses/{name}.py" for name in ("__init__", "stats", "average"))
MODIFIERS, VIEWS, METRICS = (f"valence/losses/{name}.py" for name in ("modifiers", "views", "metrics"))
REWARD, SCORES, ENGINE = "valence/losses/reward.py", "valence/engine/scores.py", "valence/engine/logprobs.py"
STEP, EVALUATE = "valence/training/step.py", "valence/training/evaluate.py"
PASSES, FSDP, GROUP = "valence/training/passes.py", "valence/dist/fsdp2.py", "valence/dist/processes.py"
PACK, MISMATCH, FOREST = (f"valence/data/{name}.py" for name in ("pack", "mismatch", "forest"))


@dataclass(frozen=True)
class Mutation:
    """What is wrong; (file, exact old text, new text) of each edit; the tests to run, in this order until one fails."""

    wrong: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]


def whole(*cases: str) -> tuple[str, ...]:
    """The loss and the slope of a whole step."""
    return tuple(f"{WHOLE}::test_a_whole_step_from_logits_to_the_number[{case}]" for case in cases)


def known(*cases: str) -> tuple[str, ...]:
    """The same of answers with what was known of their tokens when they were sampled."""
    return tuple(f"{WHOLE}::test_a_whole_step_of_sampled_answers[{case}]" for case in cases)


def one(wrong: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(wrong, ((file, old, new),), tests)


EVERYTHING = "dpo (-0.6, 1.5) 0.25 0.1 js True 1.0"
DELTA = tuple(f"{WHOLE}::test_delta_is_the_mean_of_the_steps_before[{name}-{{}}]" for name in ("bco", "bco_pair"))

LOSSES = [
    one("dpo: the rejected side's sign is flipped", PREFERENCE, "return (logp_w - ref_w) - (logp_l - ref_l)",
        "return (logp_w - ref_w) + (logp_l - ref_l)", *whole("dpo")),
    one("the margin is ignored", PREFERENCE, "logsigmoid(x - margin) - wrong", "logsigmoid(x) - wrong", *whole("dpo")),
    one("the margin is in the other direction too", PREFERENCE, "wrong * logsigmoid(-x)\n\n", "wrong * logsigmoid(margin - x)\n\n",
        *whole("dpo 0.2")),
    one("robust_dpo: the noise's term has the sign of cDPO", PREFERENCE, "+ wrong * logsigmoid(-x)) / (1 - 2 * wrong)",
        "- wrong * logsigmoid(-x)) / (1 - 2 * wrong)", *whole("robust_dpo")),
    one("simpo: both sides are divided by the chosen one's length", PREFERENCE, "logp_l / n_l - gamma_beta_ratio",
        "logp_l / n_w - gamma_beta_ratio", *whole("simpo")),
    one("dpop: the penalty is on what the chosen one has gained", PREFERENCE, "torch.relu(ref_w - logp_w)",
        "torch.relu(logp_w - ref_w)", *whole("dpop")),
    one("ipo: the target is 1/tau", PREFERENCE, "(gap - 1 / (2 * tau))", "(gap - 1 / tau)", *whole("ipo")),
    one("bco_pair: delta is added on the rejected side", PREFERENCE, "logsigmoid(delta - beta", "logsigmoid(-delta - beta",
        DELTA[1]),
    one("kto: the class weights are swapped", UNPAIRED, "desirable_weight * torch.sigmoid(-margin), undesirable_weight",
        "undesirable_weight * torch.sigmoid(-margin), desirable_weight", *whole("kto 0.4 1.3 0.6")),
    one("kto: thumbs down has the sign of thumbs up", UNPAIRED, "undesirable_weight * torch.sigmoid(margin)",
        "undesirable_weight * torch.sigmoid(-margin)", *whole("kto")),
    one("bco: delta has the wrong sign", UNPAIRED, "x = beta * (logp - ref) - delta", "x = beta * (logp - ref) + delta", DELTA[0]),
    one("aot: the reference is not sorted", COUPLED, "(ref_w - ref_l).sort().values[rank]", "(ref_w - ref_l)[rank]", *whole("aot")),
    one("aot_unpaired: the larger class is cut, not thinned out", COUPLED,
        "((2 * rank + 1) * rows // (2 * k).clamp(min=1))", "rank", *whole("aot_unpaired")),
    one("ipo: rewards are of sums where the loss is of means", METRICS, 'ratio / sums["n"] if settings["normalize"] else ratio', "ratio",
        "tests/contract/test_rewards.py::test_a_loss_depends_on_a_completion_only_through_its_reward[ipo]"),
    one("dpop: rewards are without the penalty", METRICS, '(ratio - penalty * sums["chosen"].to(ratio))', "ratio",
        "tests/contract/test_rewards.py::test_a_loss_depends_on_a_completion_only_through_its_reward[dpop]"),
    one("rewards are of what was measured, not of what the loss reads", TABLE, "self.metrics(plain, self.rewards(view, settings), settings)",
        "self.metrics(plain, self.rewards(plain, settings), settings)",
        "tests/contract/test_rewards.py::test_token_modifiers_are_in_the_reward"),
    one("dft: the weight has a gradient", IMITATION, "-logp_t.detach().exp()", "-logp_t.exp()", *whole("dft")),
    one("ppo_clip: the clip is optimistic", POLICY, "torch.minimum(rho * adv_t", "torch.maximum(rho * adv_t", *whole("grpo")),
    one("ppo_clip: the dual clip is on gains too", POLICY, "torch.where(adv_t < 0, torch.maximum(gain", "torch.where(adv_t < 9, torch.maximum(gain",
        *whole("grpo 1.5 0.28")),
    one("gspo: the ratio is that of the sum", POLICY, "ppo_clip(logp / n, old / n, adv,", "ppo_clip(logp, old, adv,", *whole("gspo 0.1 0.2 1.5")),
    one("cispo: the weight has a gradient", POLICY, "-_exp(logp_t - old_t).detach().clamp(max=eps_high)", "-_exp(logp_t - old_t).clamp(max=eps_high)",
        *whole("cispo")),
    one("cispo: the cap is one above eps_high", POLICY, ".clamp(max=eps_high) * adv_t", ".clamp(max=1 + eps_high) * adv_t", *whole("cispo 1.1")),
    one("rloo: reinforce, however far the policy has gone", POLICY, "-_exp(logp - old) * adv", "-logp * adv", *whole("rloo")),
    one("grpo: population standard deviation", ADVANTAGE, "squares / (count - 1).clamp(min=1)", "squares / count", *whole("grpo")),
    one("rloo: the mean has the answer itself in it", ADVANTAGE, "centred * count / (count - 1).clamp(min=1)", "centred", *whole("rloo")),
    one("ppo: scores are whitened inside each micro-batch", TABLE, 'batch.unit, shared["moments"])',
        "batch.unit, stats.moments(stats.powers(batch.target[:, 0].double())))", *whole("ppo")),
]  # fmt: skip

CREDIT = [
    one("equal scores are rounded", ADVANTAGE, 'score, "amin")[place]', 'score, "amin")[place] * 0', f"{CREDITS}::test_equal_rewards_have_exactly_no_advantage"),
    one("the divergence of the whole answer, not of what is to come", ADVANTAGE, "apart.flip(1).cumsum(1).flip(1)[owner, place]",
        "apart.sum(1)[owner]", f"{CREDITS}::test_reward_to_go"),
    one("the last value stands for what follows the last token", ADVANTAGE, "    delta = rewards + gamma * next_value - value",
        "    next_value[torch.arange(count), last] = value[torch.arange(count), last]\n    delta = rewards + gamma * next_value - value",
        f"{CREDITS}::test_returns_have_the_reward_as_fixed_point"),
    one("the reward is at every token", ADVANTAGE, "rewards[torch.arange(count, device=owner.device), last] += reward", "rewards += reward[:, None]",
        f"{CREDITS}::test_generalised_advantages"),
    one("lambda does not count what is later for less", ADVANTAGE, "gamma * gae_lambda * next_advantage", "gamma * next_advantage", f"{CREDITS}::test_generalised_advantages"),
    one("returns are whitened", ADVANTAGE, '"return": adv + value_t', '"return": whitened(adv) + value_t', f"{CREDITS}::test_generalised_advantages"),
    one("the divergence raises the reward", ADVANTAGE, "_laid_out(-kl_beta * k1(old_t, ref_t)", "_laid_out(kl_beta * k1(old_t, ref_t)",
        "tests/golden/test_bandit.py::test_with_the_divergence_in_the_reward_the_policy_is_the_tilted_reference[ppo-1-1]"),
    one("the error of the divergence is not clipped", ADVANTAGE, "min(max(kl / target - 1, -_MOST), _MOST)", "(kl / target - 1)",
        f"{CREDITS}::test_the_cost_of_divergence_is_steered_to_a_target"),
    one("a record of the policy that answered is not read", VIEWS, 'if "old_t" not in columns and "adv_t" in columns:', 'if "adv_t" in columns:',
        *known("grpo adv old return sampler value")),
    one("a given advantage is not read", TABLE, 'if self.credit is not None and "adv_t" not in columns:', "if self.credit is not None:",
        *known("grpo adv old return sampler value")),
    one("the correction is upside down", MODIFIERS, '(view[f"old{end}"] - view[f"sampler{end}"]).clamp', '(view[f"sampler{end}"] - view[f"old{end}"]).clamp',
        *known("grpo adv old return sampler value")),
    one("the correction has no upper bound", MODIFIERS, ".clamp(max=math.log(correction))", "", *known("rloo 1.2 adv old return sampler value")),
    one("the value's error is the smaller one", MODIFIERS, "torch.maximum(error, (near", "torch.minimum(error, (near",
        *known("ppo True adv old return sampler value")),
    one("constant is a mean over tokens", AVERAGE, "    del view\n    return loss / (max_tokens or 1)", '    return loss / view["n_t"]', *whole("dr_grpo 40")),
]  # fmt: skip

STATISTICS = [
    one("z0: log-ratios are clamped before they are added", STATS, "(logp - ref).detach(), torch.ones_like",
        "(logp - ref).clamp(min=0).detach(), torch.ones_like", *whole("kto")),
    one("z0 may be negative", STATS, "return raw.clamp(min=0), raw", "return raw, raw", *whole("kto (-1.0, 0.3)")),
    one("z0 is a mean of means over micro-batches", STEP, "torch.stack(own).sum(0)",
        "torch.stack([found / found[1] for found in own]).sum(0)", *whole("kto")),
    one("z0 is of the last micro-batch", STEP, "torch.stack(own).sum(0)", "own[-1]", *whole("kto")),
    one("z0 is estimated for every three rows", STEP, "max_length=self.max_length), [0] * len(units)",
        "max_length=self.max_length), [i // 3 for i in range(len(units))]", *whole("kto")),
    one("every row has the first group's z0", PACK, "[groups[number] if groups else 0 for", "[0 for",
        *whole("kto {'group': 4, 'pairing': 'next'}")),
    one("z0: humanline does not clamp it", STEP, "_, sums = self.method.loss.read(", "sums, _ = self.method.loss.read(",
        *whole("kto (-0.6, 1.5)")),
    Mutation("z0 has a gradient", (
        (STATS, "(logp - ref).detach(), torch.ones_like", "logp - ref, torch.ones_like"),
        (STEP, "    @torch.no_grad()\n    def mismatched_sums", "    def mismatched_sums"),
        (ENGINE, "with torch.set_grad_enabled(trains and torch.is_grad_enabled()):\n                    before",
         "with torch.set_grad_enabled(torch.is_grad_enabled()):\n                    before"),
    ), whole("kto")),
    one("mismatched rows train", PASSES, "                batch = batch.part(trains=True)\n", "", *whole("kto")),
    one("mismatched rows are counted", STEP, "[batch.part(trains=True) for batch in batches]", "batches", *whole("kto")),
    one("a row may be paired with its own prompt or completion", MISMATCH, "o.prompt_ids != unit.prompt_ids and o.answers",
        "o.prompt_ids != unit.prompt_ids or o.answers", "tests/data/test_mismatch.py"),
    one("groups pair a row with itself", MISMATCH, "(i + 1) % size", "i", *whole("kto {'group': 4, 'pairing': 'next'}")),
    one("delta is updated before it is used", PASSES, "            part = loss.total(plain, view, settings, self.count)\n",
        "            if loss.shifts:\n"
        '                after = self.of.shift.after(stats.class_sums(plain), settings["beta"])\n'
        '                view["delta"] = torch.tensor(after.delta)\n'
        "            part = loss.total(plain, view, settings, self.count)\n", *DELTA),
    one("delta is updated in evaluation", EVALUATE, "    finally:\n        policy.train()\n    meter",
        "    finally:\n        policy.train()\n    objective.learn(outcome)\n    meter",
        f"{WHOLE}::test_delta_is_frozen_in_evaluation"),
    one("delta is the mean over all answers, not over both classes", STATS, "float((sums[:, 0] / sums[:, 1]).mean())",
        "float(sums[:, 0].sum() / sums[:, 1].sum())", DELTA[0]),
    one("delta is an exponential average", STATS, "(middle - self.delta) / (self.steps + 1)", "(middle - self.delta) / 2", DELTA[0]),
]  # fmt: skip

AVERAGES = [
    one("weights are ignored", AVERAGE, '(share * view["weight_t" if average in PER_TOKEN else "weight"]).sum()', "share.sum()", *whole("dpo")),
    one("the sum is divided by the sum of weights", AVERAGE, '(share * view["weight_t" if average in PER_TOKEN else "weight"]).sum()',
        '(share * view["weight"]).sum() / view["weight"].mean().clamp(min=0.01)', *whole("dpo")),
    one("the mean of micro-batch means", PASSES, "            part = loss.total(plain, view, settings, self.count)\n",
        "            from valence.losses.average import counts, divisors\n"
        "            own = divisors([*self.count], counts([*self.count], [batch]))\n"
        "            part = loss.total(plain, view, settings, own) / self.outcome.micro_batches\n", *whole("sft")),
    one("means of micro-batches are added: no division by the accumulation", PASSES,
        "            part = loss.total(plain, view, settings, self.count)\n",
        "            from valence.losses.average import counts, divisors\n"
        "            own = divisors([*self.count], counts([*self.count], [batch]))\n"
        "            part = loss.total(plain, view, settings, own)\n", *whole("dpo")),
    one("a mean inside each sequence is left out", AVERAGE, 'return loss / view["n_t"]', "return loss", *whole("grpo")),
    one("the chosen answers' NLL is divided by all tokens", AVERAGE, "(batch.side[batch.seq[batch.scored]] == 0).sum()",
        "batch.mask.sum()", *whole("dpo 0.7")),
    one("the NLL is averaged in each micro-batch", TABLE, "values, plain, settings) / count[average]", 'values, plain, settings) / plain["n_w"].sum()',
        *whole("dpo 0.7")),
    one("aot_unpaired is divided by the larger class", AVERAGE, "counted[:width].min()", "counted[:width].max()",
        *whole("aot_unpaired")),
    one("the NLL is of what other modifiers left", TABLE, "modifier(plain, settings=settings)", "modifier(view, settings=settings)",
        *whole(EVERYTHING)),
    one("the NLL has the weights of wpo", TABLE, "weighted_sum(average, values, plain, settings)", "weighted_sum(average, values, view, settings)",
        *whole(EVERYTHING)),
    one("an absent class is shown as 0", METRICS, "masked_fill(~rows, 0).sum(), rows.sum())",
        "masked_fill(~rows, 0).sum(), rows.sum().clamp(min=1))",
        f"{CONTRACT}::test_an_absent_class_is_left_out_and_never_zero"),
    one("rewards are not scaled", METRICS, 'return settings["beta"] * (sums["logp"] - sums["ref"])', 'return sums["logp"] - sums["ref"]',
        f"{WHOLE}::test_the_numbers_that_a_step_reports[kto]"),
]  # fmt: skip

MODIFIED = [
    Mutation("humanline clamps the sum of a whole answer", (
        (MODIFIERS, "    del batch\n    assert humanline is not None\n", "    assert humanline is not None\n    own = batch.seq[batch.scored]\n"),
        (MODIFIERS, '"logp_t": tokens["ref_t"] + (tokens["logp_t"] - tokens["ref_t"]).clamp(*humanline)}',
         '"logp_t": tokens["ref_t"] + (tokens["ref_t"].new_zeros(batch.sequences).index_add('
         '0, own, tokens["logp_t"] - tokens["ref_t"]).clamp(*humanline) / lengths(batch, tokens["ref_t"]))[own]}'),
    ), whole("dpo (-0.6, 1.5)")),
    one("humanline passes the gradient through", MODIFIERS, '(tokens["logp_t"] - tokens["ref_t"]).clamp(*humanline)}',
        '(tokens["logp_t"] - tokens["ref_t"]).detach().clamp(*humanline)'
        ' + tokens["logp_t"] - tokens["logp_t"].detach()}', *whole("dpo (-0.6, 1.5)")),
    one("ld_alpha is applied to the policy only", MODIFIERS, 'for name in ("logp_t", "ref_t") if name in tokens}}',
        'for name in ("logp_t",)}}', *whole("dpo 0.25")),
    one("ld_alpha begins one token late", MODIFIERS, "places(batch) >= limit", "places(batch) > limit", *whole("dpo 0.25")),
    one("label smoothing ignores soft labels", MODIFIERS, "(1 - soft).masked_fill(soft.isnan(), label_smoothing)",
        "torch.full_like(soft, label_smoothing)", *whole("dpo 0.2")),
    one("a soft label is taken for the probability of an error", MODIFIERS, "(1 - soft).masked_fill(", "soft.masked_fill(",
        *whole("dpo")),
    one("f_divergence js lacks its log 2", MODIFIERS, "math.log(2) + logsigmoid(r)", "logsigmoid(r)", *whole("ipo js")),
    one("f_divergence alpha has the exponent of 1 - alpha", MODIFIERS, "else f_alpha", "else 1 - f_alpha", *whole("dpo alpha 0.8")),
    one("wpo weights by the chosen completion alone", MODIFIERS, 'view["confidence_w"] + view["confidence_l"]',
        'view["confidence_w"]', *whole("dpo True")),
    one("the weights of wpo have no upper bound", MODIFIERS, "confidence.clamp(max=0).exp()", "confidence.exp()",
        "tests/golden/test_modifiers.py::test_weights_of_wpo_are_at_most_one"),
    one("the weights of wpo have a gradient", VIEWS, '(logp - columns["sum_sq_t"].log()).detach()',
        '(logp - columns["sum_sq_t"].log())', *whole("dpo True")),
    one("the weights of wpo are sums over tokens", VIEWS, '.detach(), batch) / named["n"]', ".detach(), batch)", *whole("dpo True")),
    one("the NLL of a sequence is not divided by its tokens", MODIFIERS, 'loss / view["n_w"]', "loss", *whole("dpo 0.7 sequence")),
]  # fmt: skip

VIEWED = [
    one("the sides of a pair are swapped", VIEWS, "chosen, rejected = order.chunk(2)", "rejected, chosen = order.chunk(2)",
        *whole("dpo")),
    one("the mask is inferred from values that are not 0", VIEWS, "like.new_ones(len(batch.scored))", "(like != 0).to(like.dtype)",
        f"{PITFALLS}::test_lengths_are_counted_from_the_mask_and_not_from_values"),
    one("the policy stands in for the one that answered", VIEWS, 'named["old_t"] = named["ref_t"]',
        'named["old_t"] = named["logp_t"].detach()', *whole("grpo")),
    one("prompt tokens are in the sums", PACK, "unit.prompt_mask + a.mask)",
        "unit.prompt_mask[:1] + (True,) * len(unit.prompt_mask[1:]) + a.mask)", *whole("apo_zero")),
    one("tokens of an answer that are not to be read are", PACK, "unit.prompt_mask + a.mask)",
        "unit.prompt_mask + (True,) * len(a.ids))", *whole("dpo")),
    one("weights of rows are lost in the batch", PACK, "weight=column([unit.weight for", "weight=column([1.0 for", *whole("dpo")),
    one("a row over the budget is dropped", PACK, "return [[i] for i in alone] + [", "return [", "tests/data/test_pack.py"),
    one("packed sequences see those before them", FOREST, "[-1 if source[b] < 0 else int(holds[source[b]]) for b in edges[:-1]]",
        "[k - 1 for k in range(len(edges) - 1)]", *whole("dpo")),
    one("a token is predicted by itself", ENGINE, "before = hidden[batch.source[ours]]", "before = hidden[ours]", *whole("dpo")),
]  # fmt: skip

STEPS = [
    one("the reference is the policy itself", PASSES,
        "ref = self.of.compared(batch)\n        with torch.set_grad",
        "ref = self.of.policy(batch).logp.detach() if self.of.reference else None\n        with torch.set_grad", *whole("dpo")),
    one("the gradient is clipped before the accumulation ends", PASSES,
        "            self._slope(self._with_router_term(self.weight * part, batch, out))\n        self._note",
        "            self._slope(self._with_router_term(self.weight * part, batch, out))\n"
        "            torch.nn.utils.clip_grad_norm_(self.of.policy.parameters(), 0.1)\n        self._note",
        f"{WHOLE}::test_the_gradient_is_clipped_once_and_then_applied", *whole("dpo")),
    one("only the last micro-batch's gradient is applied", PASSES,
        "            self._slope(self._with_router_term(self.weight * part, batch, out))\n        self._note",
        "            self.of.policy.zero_grad()\n            self._slope(self._with_router_term(self.weight * part, batch, out))\n        self._note",
        *whole("dpo")),
    one("aot is sorted inside each micro-batch", STEP,
        "if self.method.loss.couples and (hand.rounds > 1 or self.group.size > 1) else", "if False else", *whole("aot")),
    one("gradients of other processes are forgotten", STEP, "        objective.group.reduce_gradients(trained)\n", "",
        f"{PROCESSES}[2-7-40]"),
    one("gradients of split weights are never added up", PASSES, "self.ends and self.left == 0)", "False)", f"{SPLIT}[2 split]"),
    one("gradients of split weights are means", FSDP, "set_gradient_divide_factor(1.0)", "set_gradient_divide_factor(2.0)",
        f"{SPLIT}[2 split]"),
    one("the norm of split gradients is of one process's part", GROUP, "                    dist.all_reduce(square, group=group)\n",
        "                    pass\n", f"{SPLIT}[2 split]"),
    one("a process without rows adds the gradient of another's", PASSES, "(0 if slope is None", "(1 if slope is None",
        f"{SPLIT}[4 split]"),
    one("rows that a process only takes part with are kept in its cache", STEP, "if ghost and isinstance(self.reference, Cached):", "if False:",
        "tests/dist/test_fsdp.py::test_processes_agree_whether_a_reference_is_computed"),
    one("every process counts the loss of a coupled step", PASSES, "part.detach() / group.size", "part.detach()",
        f"{PROCESSES}[2-7-40]"),
    one("aot's second pass follows the wrong slopes", PASSES, "0 if slope is None else slope)", "0 if slope is None else slope.sign())", *whole("aot")),
    one("a step that is not finite is applied", STEP, "applied = math.isfinite(size) and math.isfinite(loss)", "applied = True",
        f"{WHOLE}::test_a_step_that_is_not_finite_changes_neither_weights_nor_delta"),
    one("the gradient is never clipped", STEP, "            clip(trained, clip_norm, norm)\n", "            pass\n",
        f"{WHOLE}::test_the_gradient_is_clipped_once_and_then_applied"),
]  # fmt: skip

REWARDS = [
    one("bradley_terry ignores the margin", REWARD, "logsigmoid(score_w - score_l - margin)", "logsigmoid(score_w - score_l)", *whole("bradley_terry")),
    one("bradley_terry centres the difference", REWARD, "(score_w + score_l).square()", "(score_w - score_l).square()", *whole("bradley_terry 0.25")),
    one("attributes that are not given count", REWARD, "given.sum(1).clamp(min=1)", "given.shape[1]", *whole("pointwise", "ordinal")),
    one("levels are counted from 0", REWARD, ".long() - 1\n", ".long() - 2\n", *whole("ordinal")),
    one("a score is read at the first token that an answer has to itself", SCORES, "batch.segments[leaf][1] - 1 for", "batch.segments[leaf][0] for",
        *whole("bradley_terry")),
    one("thresholds are not summed up", SCORES, "softplus(self.cuts[1:]).cumsum(0)", "softplus(self.cuts[1:])", *whole("ordinal")),
    one("a shared token counts once in the load-balancing loss", "valence/engine/router.py", "            counts[segment] += 1\n",
        "            counts[segment] = 1\n", "tests/engine/test_router.py::test_a_shared_token_counts_once_for_every_sequence_that_trains"),
    one("tokens of sequences without gradient count in the load-balancing loss", "valence/engine/router.py",
        "batch.path(leaf) if trains else ()", "batch.path(leaf)",
        "tests/engine/test_router.py::test_sequences_without_gradient_do_not_count[0-True]"),
    one("micro-batches count alike in the load-balancing loss", PASSES, "share = num_tokens / self.router_tokens", "share = 1 / self.left",
        "tests/engine/test_router.py::test_micro_batches_are_averaged_by_their_tokens"),
    one("a step run again for its gradient lacks the load-balancing loss", PASSES, "() if slope is None else self._router_wants", "()",
        "tests/engine/test_router.py::test_a_loss_over_all_micro_batches_together_has_the_term_too"),
    one("the load-balancing loss is multiplied by the weight of a mixed method", PASSES,
        "return part + self.of.router_aux_loss * share * loss", "return part + self.weight * self.of.router_aux_loss * share * loss",
        "tests/engine/test_router.py::test_mixed_methods_share_one_average"),
    one("another method in the step is not weighed", STEP, "weight=share.weight, ends=last", "ends=last",
        "tests/training/test_mix.py::test_each_method_is_averaged_over_its_own_rows"),
]  # fmt: skip

MAKERS = "valence/training/online/makers.py"
EXCLUDED = "tests/training/online/test_exclusions.py"
ONLINE = [
    one("rejection imitates tied groups", MAKERS, "        if is_tied:\n", "        if False:\n",
        f"{EXCLUDED}::test_every_excluded_completion_has_one_reason"),
    one("rejection imitates truncated completions", MAKERS,
        'elif mask_truncated and completion.stop == "length":', "elif False:",
        f"{EXCLUDED}::test_truncated_completions_are_not_imitated_and_still_compared_with"),
    one("masked completions are trained on", MAKERS, "(not masked,) * len(a.tokens)",
        "(True,) * len(a.tokens)",
        "tests/training/online/test_defaults.py"
        "::test_masked_completions_have_no_loss_mask_and_keep_their_place_in_the_statistics"),
    one("masked completions divide by their length of 0", "valence/losses/views.py",
        'lengths(batch, columns["logp_t"]).clamp(min=1)', 'lengths(batch, columns["logp_t"])',
        "tests/contract/test_contract.py"
        "::test_masked_answers_do_not_depend_on_micro_batches_or_order[gspo]"),
]  # fmt: skip

MUTATIONS = [*LOSSES, *CREDIT, *STATISTICS, *AVERAGES, *MODIFIED, *VIEWED, *STEPS, *REWARDS, *ONLINE]


def misplaced(mutation: Mutation, root: Path = ROOT) -> list[str]:
    """Its edits whose old text is not found exactly once."""
    found = [(file, old, (root / file).read_text(encoding="utf-8").count(old)) for file, old, _ in mutation.edits]
    return [f"{file}: {count} times {old!r}" for file, old, count in found if count != 1]
