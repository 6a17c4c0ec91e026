"""LLM judges: what they are shown, how replies are read, caches, limits and retries."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.errors import raises_error
from tests.evaluation.judge_server import JudgeServer, always_first, judge_server, longer
from valence.evaluation.judges import FIRST, LAST, AnswerPair, LanguageModelJudge, PairVerdict
from valence.jobs.reward_rows import list_rewards
from valence.rewards import calls
from valence.rewards.build import pair_calls, reward_of
from valence.rewards.calls import RewardError
from valence.rewards.judge import JudgeSettings, objects_in, parse_grades, parse_winners
from valence.rewards.run import score_all
from valence.types import Completion, Score

CRITERIA = {"helpful": "Does it help?", "short": "Is it short?"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_PAUSE", 0.001)


def completion(text: str, prompt: Any = "Why?") -> Completion:
    return Completion("p", (), (), text, "eos", prompt=prompt)


def pair(baseline: str, candidate: str, prompt: Any = "Why?") -> AnswerPair:
    sides = completion(baseline, prompt), completion(candidate, prompt)
    return AnswerPair(f"{baseline}/{candidate}", str(prompt), *sides, (), "here:1")


def judge_of(server: JudgeServer, folder: Path | None = None, **entry: Any) -> LanguageModelJudge:
    settings = {"model": "m", **entry.pop("settings", {})}
    spec = {"judge": server.url, "settings": settings, **entry}
    (parsed,) = list_rewards([json.dumps(spec)], None, ())
    return LanguageModelJudge(pair_calls(parsed, folder))


def judged(judge: LanguageModelJudge, *pairs: AnswerPair) -> list[PairVerdict]:
    try:
        return judge.judge(pairs, lambda num: None)
    finally:
        judge.close()


def grades(
    server: JudgeServer, *texts: str, folder: Path | None = None, **options: Any
) -> list[Score]:
    entry = {
        "judge": server.url,
        "settings": {"model": "m", **options.pop("settings", {})},
        **options,
    }
    reward = reward_of(list_rewards([json.dumps(entry)], None, ()), cache=folder)
    return score_all(reward, [completion(text) for text in texts])


# Verdicts


def test_both_orders_agree_on_a_win_and_ties_are_half() -> None:
    with judge_server(longer) as server:
        verdicts = judged(judge_of(server), pair("a", "bb"), pair("aa", "b"), pair("a", "b"))
    assert [verdict.preference for verdict in verdicts] == [1.0, 0.0, 0.5]
    assert [verdict.margin for verdict in verdicts] == [1.0, -1.0, 0.0]
    assert len(server.requests) == 6
    shown = sorted((row["first"], row["second"]) for row in server.shown)
    assert shown == sorted(
        [("a", "bb"), ("bb", "a"), ("aa", "b"), ("b", "aa"), ("a", "b"), ("b", "a")]
    )


def test_a_judge_who_always_takes_the_first_gives_only_ties() -> None:
    with judge_server(always_first) as server:
        (verdict,) = judged(judge_of(server), pair("a", "bb"))
    assert (verdict.preference, verdict.parts[FIRST], verdict.parts[LAST]) == (0.5, 1.0, 0.0)


def test_the_judge_sees_no_names_and_the_whole_conversation() -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    with judge_server(longer) as server:
        settings = {"rubric": "Short is {good}.", "criteria": {"quality": "Is it?"}}
        judged(judge_of(server, settings=settings), pair("a", "bb", tuple(turns)))
        first = server.requests[0]
    assert server.shown[0].keys() == {"conversation", "first", "second"}
    assert server.shown[0]["conversation"] == turns
    assert "Short is {good}." in first["messages"][0]["content"]
    assert (first["model"], first["temperature"], first["max_tokens"]) == ("m", 0.0, 512)


def test_criteria_keep_their_parts_and_weights() -> None:
    def opinion(shown: Mapping[str, Any]) -> str:
        if "answer" in shown:
            return json.dumps({"scores": {"helpful": 9, "short": 3}})
        is_first = shown["first"] == "good"
        names = ("first", "second") if is_first else ("second", "first")
        return json.dumps({"winners": dict(zip(CRITERIA, names, strict=True))})

    settings = {"criteria": CRITERIA, "weights": {"short": 3}}
    with judge_server(opinion) as server:
        (verdict,) = judged(judge_of(server, settings=settings), pair("bad", "good"))
        (score,) = grades(server, "good", settings=settings)
        entry = {"judge": server.url, "name": "j", "settings": {"model": "m", **settings}}
        reward = reward_of(list_rewards([json.dumps(entry)], None, ()))
        (named,) = score_all(reward, [completion("good")])
    assert verdict.preference == 0.0
    assert verdict.margin == pytest.approx((1 - 3) / 4)
    assert (verdict.parts["helpful"], verdict.parts["short"]) == (1.0, -1.0)
    assert score.value == pytest.approx((9 + 3 * 3) / 4)
    assert named.parts == {"j": score.value, "j/helpful": 9.0, "j/short": 3.0}


# Replies


@pytest.mark.parametrize(
    "text",
    [
        '{"winners": {"quality": "first"}}',
        'I think {so}.\n```json\n{"reason": "{}", "winners": {"quality": " First"}}\n```',
        '{"winners": {"other": "tie"}} {"winners": {"quality": "first", "x": "tie"}}',
        '<think>The form is {"winners": {"quality": "second"}}.</think>'
        '{"winners": {"quality": "first"}} {"reason": "so"}',
    ],
)
def test_a_verdict_is_read_from_a_reply(text: str) -> None:
    assert parse_winners(text, JudgeSettings(model="m")) == {"quality": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "first",
        "{}",
        '{"winners": {}}',
        '{"winners": {"quality": "A"}}',
        '{"winners": ["first"]}',
        '{"winners": {"quality": null}}',
        '{"winners": {"quality": 1}}',
        '{"winners": {"qual',
        "{" * 5000,
    ],
)
def test_another_reply_is_no_verdict(text: str) -> None:
    with pytest.raises(RewardError) as error:
        parse_winners(text, JudgeSettings(model="m"))
    assert error.value.passes


@pytest.mark.parametrize("grade", ["0", "11", "true", "null", '"7"', "[7]", "1e999", "NaN"])
def test_a_grade_off_the_scale_is_no_grade(grade: str) -> None:
    with pytest.raises(RewardError):
        parse_grades(f'{{"scores": {{"quality": {grade}}}}}', JudgeSettings(model="m"))


def test_a_grade_may_be_a_fraction() -> None:
    grades = parse_grades('{"scores": {"quality": 7.5}}', JudgeSettings(model="m"))
    assert grades == {"quality": 7.5}
    assert [*objects_in('a {"b": 1} {c} {"d": {"e": 2}}')] == [{"b": 1}, {"d": {"e": 2}}]


def test_a_failed_verdict_is_never_a_number_and_does_not_hide_the_others() -> None:
    def opinion(shown: Mapping[str, Any]) -> str:
        return "I cannot say." if shown["first"] == "bad" else longer(shown)

    with judge_server(opinion) as server:
        verdicts = judged(judge_of(server, retries=1), pair("bad", "b"), pair("a", "bb"))
    assert verdicts[0].preference is None
    assert "winners" in verdicts[0].error
    assert verdicts[1].preference == 1.0
    assert len(server.requests) == 2 + 2 + 1  # the failed one was repeated once


# The server


def test_a_busy_server_is_asked_again_and_one_that_refuses_is_not() -> None:
    def opinion(shown: Mapping[str, Any]) -> Any:
        statuses = {1: 429, 2: 500}
        return statuses.get(len(server.requests), longer(shown))

    with judge_server(opinion) as server:
        (verdict,) = judged(judge_of(server, concurrency=1), pair("a", "bb"))
        assert (verdict.preference, len(server.requests)) == (1.0, 4)
    with judge_server(lambda shown: 401) as server:
        (verdict,) = judged(judge_of(server, concurrency=1), pair("a", "bb"))
        assert (verdict.preference, len(server.requests)) == (None, 2)
        assert "401" in verdict.error


def test_a_server_that_hangs_is_a_failure() -> None:
    with judge_server(lambda shown: (5.0, longer(shown))) as server:
        (verdict,) = judged(judge_of(server, timeout=0.1, retries=0), pair("a", "bb"))
    assert verdict.preference is None
    assert "0.1 s" in verdict.error


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server(longer) as server:
        with raises_error("environment-variable-missing"):
            judge_of(server, token_env="JUDGE_TOKEN")
        monkeypatch.setenv("JUDGE_TOKEN", "secret")
        judged(judge_of(server, token_env="JUDGE_TOKEN"), pair("a", "bb"))
    assert set(server.tokens) == {"Bearer secret"}


# Cache and cost


def test_no_request_is_sent_twice(tmp_path: Path) -> None:
    with judge_server(longer) as server:
        first = judged(judge_of(server, tmp_path / "replies"), pair("a", "bb"), pair("a", "bb"))
        again = judged(judge_of(server, tmp_path / "replies"), pair("a", "bb"))
        assert first[0] == first[1] == again[0]
        other = {"rubric": "Be strict."}
        judged(judge_of(server, tmp_path / "replies", settings=other), pair("a", "bb"))
    assert len(server.requests) == 4


def test_a_damaged_reply_is_asked_for_again(tmp_path: Path) -> None:
    with judge_server(longer) as server:
        judged(judge_of(server, tmp_path), pair("a", "bb"))
        (path,) = tmp_path.glob("judge-*.jsonl")
        path.write_text(path.read_text().replace("first", "tie", 1))
        num_requests = len(server.requests)
        with pytest.warns(UserWarning, match="damaged"):
            judge = judge_of(server, tmp_path)
        assert judged(judge, pair("a", "bb"))[0].preference == 1.0
        assert len(server.requests) == num_requests + 1


PAID = {"prices": [1000, 2000], "max_cost": 0.5}
"""A request with 100 and 10 tokens costs 0.12 dollars: the fifth one is the last."""


def test_the_cost_limit_stops_and_a_larger_one_resumes(tmp_path: Path) -> None:
    pairs = [pair("a" * i, "b") for i in range(2, 8)]
    with judge_server(longer) as server:
        judge = judge_of(server, tmp_path, concurrency=1, settings=PAID)
        with raises_error("judge-cost-limit", fix="rerun"):
            judged(judge, *pairs)
        assert len(server.requests) == 5
        judge = judge_of(server, tmp_path, concurrency=1, settings=PAID)
        with raises_error("judge-cost-limit"):
            judged(judge, *pairs)
        assert len(server.requests) == 5
        larger = judge_of(server, tmp_path, concurrency=1, settings={**PAID, "max_cost": 5})
        assert all(verdict.preference == 0 for verdict in judged(larger, *pairs))
        assert len(server.requests) == 12


def test_requests_in_flight_at_the_cost_limit_are_completed(tmp_path: Path) -> None:
    pairs = [pair("a" * i, "b") for i in range(2, 14)]

    def opinion(shown: Mapping[str, Any]) -> Any:
        return (0.01 * len(shown["first"] + shown["second"]), longer(shown))

    with judge_server(opinion) as server:
        judge = judge_of(server, tmp_path, concurrency=8, settings=PAID)
        with raises_error("judge-cost-limit"):
            judged(judge, *pairs)
        larger = judge_of(server, tmp_path, concurrency=8, settings={**PAID, "max_cost": 5})
        judged(larger, *pairs)
    assert len(server.requests) == 24


def test_replies_that_cannot_be_read_cost_as_well(tmp_path: Path) -> None:
    with judge_server(lambda shown: "no idea") as server:
        judge = judge_of(server, tmp_path, concurrency=1, retries=9, settings=PAID)
        with raises_error("judge-cost-limit"):
            judged(judge, pair("a", "b"))
        assert len(server.requests) == 5


def test_a_server_without_usage_cannot_have_a_cost_limit() -> None:
    with judge_server(longer) as server:
        server.usage = None
        with raises_error("judge-usage-missing"):
            judged(judge_of(server, settings=PAID), pair("a", "b"))
        assert judged(judge_of(server), pair("a", "bb"))[0].preference == 1.0


# As a reward


def test_a_judge_as_a_reward_grades_each_completion(tmp_path: Path) -> None:
    def opinion(shown: Mapping[str, Any]) -> Any:
        if shown["answer"] == "none":
            return "no idea"
        reason = {"reason": "long enough"} if shown["answer"] == "sixsix" else {}
        return json.dumps({**reason, "scores": {"quality": len(shown["answer"])}})

    with judge_server(opinion) as server:
        scores = grades(server, "four", "none", "sixsix", folder=tmp_path, retries=0)
        assert [score.value for score in scores] == [4.0, None, 6.0]
        assert [score.feedback for score in scores] == ["", "", "long enough"]
        assert scores[1].error
        num_requests = len(server.requests)
        grades(server, "four", folder=tmp_path)
        assert len(server.requests) == num_requests


@pytest.mark.parametrize(
    ("settings", "code", "where"),
    [
        ({}, "reward-setting-missing", "model"),
        ({"model": "m", "colour": "red"}, "reward-setting-unknown", "colour"),
        ({"model": "m", "weights": {"x": 1}}, "reward-setting-value", "weights"),
        ({"model": "m", "scale": [5, 1]}, "reward-setting-value", "scale"),
        ({"model": "m", "max_cost": 1}, "reward-setting-value", "prices"),
        ({"model": "m", "criteria": {}}, "reward-setting-value", "criteria"),
        ({"model": "m", "temperature": -1}, "reward-setting-value", "temperature"),
    ],
)
def test_wrong_settings_are_mistakes(settings: dict[str, Any], code: str, where: str) -> None:
    entry = {"judge": "http://127.0.0.1:1/v1", "settings": settings}
    specs: Sequence[Any] = list_rewards([json.dumps(entry)], None, ())
    with raises_error(code, where=where):
        reward_of(specs)


def test_a_judge_is_named_in_place_of_a_reward() -> None:
    address = "http://127.0.0.1:1/v1"
    words = f"judge: '{address}', settings: {{model: m}}"
    (spec,) = list_rewards([f"{{{words}}}"], None, ())
    assert spec.reward == address
    with raises_error("setting-conflict", where="reward"):
        list_rewards([f"{{{words}, reward: exact_match}}"], None, ())
    assert list_rewards([f"{{{words}, reward: '{address}'}}"], None, ()) == [spec]
