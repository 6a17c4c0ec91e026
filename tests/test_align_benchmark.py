"""The statistics and the measurements of the benchmark of rewards against KL divergence."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.align.amounts import Case, as_thumbs, choose, choose_pairs, thumbs_of
from benchmarks.align.frontier import TASKS, Frontier, Task
from benchmarks.align.frontier import Case as Run
from benchmarks.align.measures import (
    HeldOut,
    Point,
    WordScore,
    answer_logps,
    bare_number,
    right_sum,
    vader,
)
from benchmarks.align.page import (
    amounts_table,
    comparison,
    files,
    noise_table,
    pairs_table,
    penalties_table,
    sums_table,
)
from benchmarks.align.summary import area, disagreement, frontier, summarize, within
from valence.losses import LOSSES

START = Point(0, 0.0, 0.2, 0.5, 0.0, 30.0, "")


def point(kl: float, reward: float, **changes: Any) -> Point:
    return replace(START, kl=kl, reward=reward, **changes)


def test_a_frontier_has_the_best_reward_so_far() -> None:
    records = frontier([point(4, 0.6), point(2, 0.4), point(3, 0.3), point(12, 0.8)], START)
    assert records == [(0.0, 0.2), (2, 0.4), (4, 0.6), (12, 0.8)]
    assert within(records, 1.0) == pytest.approx(0.3)
    assert within(records, 8.0) == pytest.approx(0.7)
    assert within(records, 20.0) == 0.8
    assert within(frontier([point(3, 0.1)], START), 5.0) == 0.2


def test_the_area_is_the_mean_reward_over_ten_nats() -> None:
    assert area([(0.0, 0.2)]) == pytest.approx(0.2)
    # rises to 0.6 within 5 nats, and stays there
    assert area([(0.0, 0.2), (5.0, 0.6)]) == pytest.approx((0.4 + 0.6) / 2, abs=1e-4)


def result(library: str, seed: int, reward: float, losses: list[float], seconds: float) -> Any:
    points = [vars(point(5.0, reward, seconds=seconds, step=1))]
    return {
        "library": library, "method": "dpo", "penalty": 0.1, "seed": seed, "samples": False,
        "points": points, "losses": losses, "seconds": seconds,
    }  # fmt: skip


@pytest.mark.parametrize(("loss", "is_compared"), [(0.5, True), (0.51, False)])
def test_what_disagrees_is_not_compared(loss: float, is_compared: bool) -> None:
    results = {
        f"{library}{seed}": result(library, seed, 0.6 + seed / 10, [0.7, value], seconds)
        for library, value, seconds in (("valence", 0.5, 10.0), ("trl", loss, 25.0))
        for seed in range(2)
    }
    results["valence0"]["tokens"] = 15
    summaries = summarize(results, START)
    assert [(s.library, s.num_runs) for s in summaries] == [("valence", 2), ("trl", 2)]
    assert summaries[0].disagreement is None
    assert summaries[1].disagreement == pytest.approx((loss - 0.5) / 0.6)
    assert summaries[0].at_5.mean == pytest.approx(0.65)
    assert summaries[0].tokens == 15  # one of the runs did not count them
    assert summaries[0].in_time.mean == pytest.approx(0.65)
    share = 10 / 25  # of the run of TRL, in the time of Valence
    assert summaries[1].in_time.mean == pytest.approx(START.reward * (1 - share) + 0.65 * share)
    low, high = summaries[0].at_5.interval
    assert low < 0.6 < 0.7 < high  # two seeds say little
    results["alone"] = result("valence", 2, 0.9, [0.7, 0.5], 99.0)
    [fact] = comparison(results, START)  # of the runs that both have
    assert ("2.50 times" in fact) == is_compared


def test_a_penalty_counts_once_all_seeds_have_it() -> None:
    results = {f"{seed}": result("valence", seed, 0.6, [0.7], 10.0) for seed in range(2)}
    results["larger"] = result("valence", 0, 0.9, [0.7], 10.0) | {"penalty": 0.3}
    [summary] = summarize(results, START)
    assert (summary.num_runs, summary.at_5.mean) == (2, pytest.approx(0.6))
    results["also"] = result("valence", 1, 0.9, [0.7], 10.0) | {"penalty": 0.3}
    [summary] = summarize(results, START)
    assert (summary.num_runs, summary.at_5.mean) == (4, pytest.approx(0.9))
    assert summary.in_time.values == pytest.approx((0.75, 0.75))  # a value per seed, not per run


def test_the_table_of_penalties_has_the_ends_of_the_runs() -> None:
    results = {
        f"{library}-{penalty}-{seed}": result(library, seed, 0.6 + penalty + seed / 10, [], 1.0)
        | {"penalty": penalty}
        for library, penalties in (("valence", (0.3, 0.1)), ("trl", (0.1,)))
        for penalty in penalties
        for seed in range(2)
    }
    earlier = vars(point(1.0, 0.0))
    for run in results.values():
        run["points"].insert(0, earlier)
    results["alone"] = result("valence", 0, 0.6, [], 1.0) | {"method": "kto"}
    interval = "[0.115, 1.385]"  # 12.706 * 0.05 on each side of 0.75
    assert penalties_table(results).splitlines()[2:] == [
        f"| dpo | 0.1 | 0.750 {interval} | 5.0 [5.0, 5.0] | 0.750 {interval} | 5.0 [5.0, 5.0] |",
        "| dpo | 0.3 | 0.950 [0.315, 1.585] | 5.0 [5.0, 5.0] |  |  |",
    ]


def test_losses_of_other_steps_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="1 and 2 losses"):
        disagreement([1.0], [1.0, 2.0])


def two_models() -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, initializer_range=0.5,
    )  # fmt: skip
    models: list[Any] = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(LlamaForCausalLM(config).eval())
    return models[0], models[1]


def test_the_divergence_is_that_of_the_definition() -> None:
    policy, reference = two_models()
    prompts = [[3, 4, 5], [8], [3, 4]]
    held = HeldOut([], [], end=2, max_new_tokens=30, samples=1, seed=1)
    completions, kl = held.sample(policy, reference, prompts)
    assert len({len(completion) for completion in completions}) > 1  # some have ended early
    expected = 0.0
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = [*prompt, *completion]
        logps = [m(torch.tensor([ids])).logits[0].log_softmax(-1) for m in (policy, reference)]
        for t in range(len(prompt) - 1, len(ids) - 1):
            p, q = (column[t].tolist() for column in logps)
            expected += sum(
                torch.tensor(a).exp().item() * (a - b) for a, b in zip(p, q, strict=True)
            )
    assert kl == pytest.approx(expected / 3, rel=1e-4)
    assert held.sample(policy, policy, prompts) == (completions, 0.0)


def test_the_log_probability_of_an_answer_is_that_of_its_tokens() -> None:
    policy, _ = two_models()
    rows = [([3, 4, 5], [6, 7, 2]), ([8], [9])]
    expected: list[float] = []
    for prompt, answer in rows:
        logps = policy(torch.tensor([[*prompt, *answer]])).logits[0].log_softmax(-1)
        places = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
        expected.append(sum(logps[t, a].item() for t, a in zip(places, answer, strict=True)))
    prompts, answers = zip(*rows, strict=True)
    assert answer_logps(policy, prompts, answers) == pytest.approx(expected, rel=1e-4)


def test_samples_follow_the_distribution_and_depend_on_seed_and_place_alone() -> None:
    policy, _ = two_models()
    held = HeldOut([], [], end=2, max_new_tokens=6, samples=1, seed=0)
    together, _ = held.sample(policy, policy, [[3, 4, 5], [8], [9, 3]])
    alone, _ = held.sample(policy, policy, [[3, 4, 5]])
    assert together[0] == alone[0]  # whatever the others and their padding
    many, _ = held.sample(policy, policy, [[3, 4, 5]] * 4000)
    with torch.no_grad():
        expected = policy(torch.tensor([[3, 4, 5]])).logits[0, -1].softmax(-1)
    for completion in many:
        assert 2 not in completion[:-1]
        assert completion[-1] == 2 or len(completion) == 6
    counts = torch.bincount(torch.tensor([c[0] for c in many]), minlength=20) / 4000
    assert (counts - expected).abs().max() < 0.03


def test_scores_tell_praise_from_complaint() -> None:
    texts = [("a wonderful warm film", True), ("a dull cold film", False)] * 10
    words = WordScore.fit(texts)
    assert words.of("wonderful") > 0.9 > 0.1 > words.of("dull")
    assert words.of("a film") == pytest.approx(0.5)
    # a word is in 10 of 10 good texts and in none of 10 bad ones
    assert words.log_odds("A WONDERFUL unseen film") == pytest.approx(math.log(11 / 12 * 12))
    assert vader("What a wonderful day!") > 0.5 > -0.5 > vader("What a horrible day!")


THUMBS = [{"prompt": k, "completion": str(k), "label": k % 3 == 0} for k in range(300)]


@pytest.mark.parametrize(("up", "flipped"), [(0.5, 0.0), (0.1, 0.0), (0.5, 0.4)])
def test_thumbs_are_chosen_in_the_ratio_and_flipped(up: float, flipped: float) -> None:
    case = Case(60, up, flipped, seed=1)
    rows = choose(THUMBS, case)
    assert len({row["prompt"] for row in rows}) == 60
    originals = [THUMBS[row["prompt"]]["label"] for row in rows]
    assert sum(originals) == 60 * up
    wrong = [label for row, label in zip(rows, originals, strict=True) if row["label"] != label]
    assert len(wrong) == 60 * flipped
    assert sum(wrong) == len(wrong) * up  # of each kind alike
    assert [row["label"] for row in rows] != sorted(row["label"] for row in rows)
    assert rows != choose(THUMBS, replace(case, seed=2))


def test_a_thumb_is_up_above_the_median() -> None:
    texts = [
        "a wonderful day",
        "a day",
        "a horrible day",
        "what a great, great day",
        "an awful day",
    ]
    answers = [{"prompt": [], "completion": text, "stop": "eos"} for text in texts]
    answers.append({"prompt": [], "completion": "a wonderful", "stop": "length"})
    assert [row["label"] for row in thumbs_of(answers)] == [True, False, False, True, False]


def test_the_table_of_amounts_counts_answers_that_are_better_and_worse() -> None:
    start = {"rewards": [0.0, 0.2, 0.4, 0.6], "kl": 0.0, "length": 20.0}
    run = {
        "rows": 1800, "up": 0.5, "flipped": 0.2, "reviewed": 50, "wrong": 270,
        "is_balanced": False, "kl": 2.0, "length": 30.0,
    }  # fmt: skip
    runs = {
        str(seed): {**run, "seed": seed, "rewards": [0.1, 0.3, 0.4 + seed, 0.5]}
        for seed in range(2)
    }
    last = amounts_table(runs, start).splitlines()[-1]
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[:4] == ["1,800", "1 : 1", "15% (20% before 50 decisions)", "2"]
    assert cells[4].startswith("0.450 [")
    assert cells[5] == "62, 25"


def test_pairs_have_a_good_and_a_bad_answer_and_are_swapped() -> None:
    answers = [
        {"prompt": k // 4, "completion": f"{k}", "label": k % 2 == 0, "stop": "eos"}
        for k in range(160)
    ]
    answers += [{"prompt": 99, "completion": "only good", "label": True}] * 4
    case = Case(60, flipped=0.2, is_paired=True, seed=1)
    pairs = choose_pairs(answers, case)
    assert len({pair["prompt"] for pair in pairs}) == 30 == len(pairs)
    assert 99 not in {pair["prompt"] for pair in pairs}
    for pair in pairs:
        chosen, rejected = int(pair["chosen"]), int(pair["rejected"])
        assert chosen // 4 == rejected // 4 == pair["prompt"]
        assert (chosen % 2, rejected % 2) == ((1, 0) if pair["info"]["wrong"] else (0, 1))
    assert sum(pair["info"]["wrong"] for pair in pairs) == 6
    places = [k for k, pair in enumerate(pairs) if pair["info"]["wrong"]]
    assert places != list(range(6))
    thumbs = as_thumbs(pairs)
    assert [row["completion"] for row in thumbs if row["label"]] == [p["chosen"] for p in pairs]
    assert len(thumbs) == 60
    assert choose_pairs(answers, replace(case, method="dpo")) == pairs  # other methods see the same
    assert choose_pairs(answers, replace(case, seed=2)) != pairs


def chat(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_a_sum_is_right_if_its_last_number_is() -> None:
    prompts = chat(*["What is 3 + 14? Answer with the number only."] * 5)
    answers = chat("17", "3 + 14 = 17.", "17 or 18", "117", "seventeen")
    assert right_sum(prompts, answers) == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert bare_number(completions=answers, prompts=prompts) == [1.0, 0.0, 0.0, 1.0, 0.0]


def test_held_out_sums_are_not_trained_on() -> None:
    train, held_out = map(set, TASKS["sums"].questions())
    assert (len(train), len(held_out)) == (304, 96)
    assert not train & held_out


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_run_has_no_penalty_but_that_of_its_case(task: Task) -> None:
    """Some methods have a KL penalty by default, which TRL's trainers do not."""
    side: Any = SimpleNamespace(task=task, model="model", folder=Path(), steps_of=lambda case: 1)
    runs = [Run("valence", method, 0.25, 0) for method in task.methods if method != "online_dpo"]
    online = [run for run in runs if not run.is_offline]
    assert online
    for run in online:
        advantage = LOSSES[run.trained].advantage
        names = signature(advantage).parameters if advantage else ()
        name = "kl_beta" if "kl_beta" in names else "kl_weight"
        recipe = Frontier.recipe(side, run)
        assert recipe["loss"].pop(name) == 0.25
        assert recipe["loss"] == ({"kl_estimator": "k2"} if run.method == "grpo" else {})


def test_the_table_of_sums_is_at_equal_numbers_of_completions() -> None:
    def run(library: str, seed: int, sampled: int) -> Any:
        points = [
            vars(point(k, 0.2 + k * sampled / 1000, sampled=k * sampled, seconds=k)) for k in (1, 2)
        ]
        return {"library": library, "method": "dapo", "seed": seed, "points": points}

    runs = {f"{seed}{name}": run(name, seed, 100 + 100 * (name == "valence"))
            for seed in range(2) for name in ("valence", "trl")}  # fmt: skip
    lines = sums_table(runs, START).splitlines()
    assert "after 100 completions | after 200" in lines[0]
    ours, theirs = ([c.strip() for c in line.strip("|").split("|")] for line in lines[-2:])
    assert ours[:2] == ["dapo", "Valence"]
    assert (ours[3][:5], ours[4][:5], ours[6]) == ("0.300", "0.400", "1.0")
    assert (theirs[3][:5], theirs[4][:5], theirs[6]) == ("0.300", "0.400", "2.0")


def test_the_table_of_pairs_joins_the_folds() -> None:
    rng = random.Random(0)

    def run(fold: int, informative: bool) -> Any:
        margins = [1.0 if informative else rng.gauss(0, 1) for _ in range(30)]
        margins[0] = -1.0
        return {
            "library": "valence", "method": "dpo" if informative else "ipo", "fold": fold,
            "margins": margins, "before": None, "groups": [f"{fold} {k}" for k in range(30)],
            "forms": [[rng.gauss(0, 50), 0.0] for _ in range(30)], "length": 10.0 + 10 * fold,
            "preferences": [1.0] * 24 + [0.0] * 6, "differences": [0] * 30,
        }  # fmt: skip

    runs = {f"{good}{fold}": run(fold, good) for good in (True, False) for fold in range(2)}
    good, noise = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in pairs_table(runs, {"pairs": 90}).splitlines()[-2:]
    )
    assert good[:4] == ["dpo", "Valence", "60 of 90", good[3]]
    assert good[3].startswith("97% [")
    assert (good[5][:3], good[6][:3], good[7]) == ("80%", "80%", "15")
    low, high = (float(value) for value in good[4].split("[")[1].strip("]").split(","))
    assert low > 0 < high
    low, high = (float(value) for value in noise[4].split("[")[1].strip("]").split(","))
    assert low < 0 < high


def test_the_table_of_wrong_pairs_has_a_column_for_each_share() -> None:
    start = {"rewards": [0.0, 0.2], "length": 20.0}
    runs = {
        f"{method}{share}{seed}": {
            "method": method, "flipped": share, "is_paired": True, "seed": seed,
            "rewards": [0.5 - share, 0.5 - share + 0.2 * seed],
        }
        for method, shares in (("dpo", (0.0, 0.4)), ("robust_dpo", (0.4,)))
        for share in shares
        for seed in range(2)
    }  # fmt: skip
    lines = noise_table(runs, start).splitlines()
    assert lines[0] == "| method | runs | 0% wrong | 40% wrong |"
    assert lines[2] == "| none | | 0.100 | 0.100 |"
    assert lines[3].startswith("| dpo | 2 | 0.550 [")
    assert lines[4].startswith("| robust_dpo | 2 | as dpo | 0.150 [")


def test_the_page_is_that_of_the_results() -> None:
    for path, text in files().items():
        assert path.read_text("utf-8") == text
