"""The client of reward servers, against local servers with all kinds of errors."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Sequence
from email.utils import formatdate
from itertools import count
from typing import Any

import pytest

from tests.errors import raises_error
from tests.rewards.kit import (
    Reply,
    answer,
    answers,
    calls_of,
    entry,
    error,
    has_words,
    reward,
    scores,
    server,
    values,
)
from tests.rewards.reward_servers import Numbers, hash_score, served
from valence import network
from valence.network import backoff
from valence.rewards import http as module
from valence.rewards import reward_of
from valence.rewards.calls import FIRST_PAUSE, RewardError
from valence.rewards.http import parse_scores
from valence.types import Completion, Score

# Each test has a server that fails. Only one tests the warning of it.
pytestmark = pytest.mark.filterwarnings("ignore:http.*:UserWarning")


class Pauses(list[float]):
    """In place of sleeping."""

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)


def client(*urls: str, pauses: Any = None, **options: Any) -> Any:
    combined = reward(",".join(urls), **options)
    calls_of(combined).sleep = Pauses() if pauses is None else pauses
    return combined


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def test_what_is_sent_and_what_comes_back() -> None:
    chat = ({"role": "user", "content": "hi"},)
    inputs = [
        answer("yes", label="y"),
        answer("no", chat, rendered="<user>hi<assistant>", label=3),
        answer("", "q? "),
    ]
    with server(Reply([1, -0.5, 2e3])) as stub:
        assert values(reward(stub.url), inputs) == [1.0, -0.5, 2000.0]
    assert stub.requests == [
        {
            "query": ["q yes", "<user>hi<assistant>no", "q? "],
            "prompts": ["q ", "<user>hi<assistant>", "q? "],
            "labels": ["y", 3, ""],
        }
    ]
    assert "Authorization" not in stub.heads[0]


def test_scores_is_another_name() -> None:
    assert [score.value for score in parse_scores(b'{"scores": [1, 2], "extra_logs": {}}', 2)] == [
        1.0,
        2.0,
    ]
    assert [score.value for score in parse_scores(b'{"rewards": [3], "scores": [1]}', 1)] == [3.0]


def test_the_column_of_labels_can_be_named() -> None:
    with server(Reply([1.0])) as stub:
        result = scores(
            reward(stub.url, settings={"label": "solution"}),
            [answer("a", solution="4"), answer("b", label="4")],
        )
    assert stub.requests[0]["labels"] == ["4"]
    assert result[0].value == 1.0
    assert "'solution'" in result[1].error


def test_what_cannot_be_sent_makes_no_request() -> None:
    chat = ({"role": "user", "content": "hi"},)
    with server() as stub:
        assert values(reward(stub.url), []) == []
        assert "rendered" in error(reward(stub.url), [answer("a", chat)])
        assert has_words(
            error(reward(stub.url), [answer("a", label=float("nan"))]), "label", "float"
        )
        assert has_words(error(reward(stub.url), [answer("a", label=object())]), "label", "object")
    assert stub.requests == []


def test_batches_are_in_order_never_empty_and_only_so_many_at_a_time() -> None:
    four, replied = threading.Barrier(4, timeout=30), [threading.Event() for _ in range(16)]

    def backwards(request: dict[str, Any], number: int) -> Reply:
        """Of four requests under way the one that came last has its reply first."""
        four.wait()
        if number % 4 < 3:
            replied[number + 1].wait(30)
        replied[number].set()
        return Reply([float(q.rpartition("a")[2]) for q in request["query"]])

    with server(backwards) as stub:
        combined = reward(stub.url, batch_size=3, concurrency=4)
        assert values(combined, answers(47)) == [float(i) for i in range(47)]
    assert sorted(len(request["query"]) for request in stub.requests) == [2] + [3] * 15
    assert stub.max_concurrent == 4


def test_a_token_is_sent_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_TEST", "s3cret")
    with server() as stub:
        combined = reward(stub.url, token_env="TOKEN_OF_TEST")
        assert values(combined, answers(1)) == [0.0]
    assert stub.heads[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(calls_of(combined).backend)
    monkeypatch.delenv("TOKEN_OF_TEST")
    with raises_error("environment-variable-missing", where="reward.0.token_env") as raised:
        reward(stub.url, token_env="TOKEN_OF_TEST")
    assert "TOKEN_OF_TEST" in raised.error.message


# Failures


@pytest.mark.parametrize(("body", "words"), [
    (b"", ["JSON"]), (b"<html>busy</html>", ["JSON", "<html>busy</html>"]),
    (b'{"rewards": [1.0', ["JSON"]),
    (b"[" * 10000, ["JSON"]), (b"\xff\xfe\x00", ["JSON"]),
    (b"[1.0, 2.0]", ["rewards", "list"]), (b"null", ["rewards", "NoneType"]),
    (b'{"reward": [1.0, 2.0]}', ["rewards", "reward"]),
    (b'{"rewards": {"0": 1.0, "1": 2.0}}', ["rewards", "dict"]),
    (b'{"rewards": "12"}', ["rewards", "str"]),
    (b'{"rewards": null, "scores": [1, 2]}', ["rewards", "NoneType"]),
    (b'{"rewards": []}', [0, 2]), (b'{"rewards": [1.0]}', [1, 2]),
    (b'{"rewards": [1.0, 2.0, 3.0]}', [3, 2]),
])  # fmt: skip
def test_a_reply_that_is_none_fails_the_whole_call(body: bytes, words: list[object]) -> None:
    with server(Reply(raw=body)) as stub:
        message = error(client(stub.url, retries=2), answers(2))
    _, _, reason = message.partition(f"{stub.url}: ")
    assert has_words(reason, *words)
    assert len(stub.requests) == 1  # it would be the same again


@pytest.mark.parametrize(("value", "words"), [
    ("null", ["null"]), ('"0.5"', ['"0.5"']), ("true", ["true"]), ("[0.5]", ["[0.5]"]),
    ("{}", ["{}"]),
    ("NaN", ["nan"]), ("Infinity", ["inf"]), ("-Infinity", ["-inf"]), ("1e999", ["inf"]),
    ("1" + "0" * 400, ["large"]),
])  # fmt: skip
def test_a_number_that_is_none_fails_its_answer_alone(value: str, words: list[str]) -> None:
    with server(Reply(raw=f'{{"rewards": [0.25, {value}]}}'.encode())) as stub:
        result = scores(client(stub.url), answers(2))
    assert [score.value for score in result] == [0.25, None]
    assert has_words(result[1].error, *words)


def test_a_server_may_say_why_it_has_no_number() -> None:
    with server(Reply(raw=b'{"rewards": [null, 1], "errors": ["it is too long", null]}')) as stub:
        result = scores(client(stub.url), answers(2))
    assert result[0].error.endswith(": it is too long")
    assert result[1].value == 1.0


@pytest.mark.parametrize(
    ("reply", "words", "again"),
    [
        (Reply([0.0, 0.0], status=500), [500], True),
        (Reply([0.0, 0.0], status=503), [503], True),
        (Reply([0.0, 0.0], status=429), [429], True),
        (Reply(raw=b"who are you", status=401), [401, "who are you"], False),
        (Reply([0.0, 0.0], status=422), [422], False),
        (Reply([0.0, 0.0], status=201), [201], False),
        (
            Reply(raw=b"", status=307, headers={"Location": "http://127.0.0.1:1/x"}),
            [307, "http://127.0.0.1:1/x"],
            False,
        ),
        (Reply([0.0, 0.0], cut=20), ["RemoteProtocolError"], True),
        (Reply(drop=True), ["RemoteProtocolError"], True),
    ],
)
def test_only_failures_that_may_pass_are_tried_again(
    reply: Reply,
    words: list[object],
    again: bool,
) -> None:
    pauses = Pauses()
    with server(reply) as stub:
        result = error(client(stub.url, retries=2, pauses=pauses), answers(2))
    assert has_words(result, stub.url, *words)
    assert len(stub.requests) == (3 if again else 1)
    assert len(pauses) == (2 if again else 0)
    assert has_words(result, "3 tries") is again


def test_a_failure_that_passes_leaves_no_trace() -> None:
    with server(lambda request, n: Reply([0.0], status=500) if n < 2 else Reply([7.0])) as stub:
        assert values(client(stub.url, retries=2), [answer("x")]) == [7.0]


def test_a_server_in_trouble_is_warned_of_once() -> None:
    with server(lambda request, n: Reply([0.0], status=500) if n < 2 else Reply([7.0])) as stub:
        with pytest.warns(UserWarning, match=f"{stub.url}: .*500") as warned:
            assert values(client(stub.url, retries=2), [answer("x")]) == [7.0]
        # Others may be of what earlier tests left behind.
        assert sum(stub.url in str(item.message) for item in warned) == 1


@pytest.mark.parametrize("reply", [Reply([1.0], hangs=True), Reply([1.0], drip=0.1)])
def test_a_server_that_hangs_or_trickles_has_a_deadline(reply: Reply) -> None:
    with server(reply) as stub:
        assert has_words(
            error(client(stub.url, timeout=0.2, retries=1), answers(1)), stub.url, "0.2 s"
        )
    assert len(stub.requests) <= 2


def test_a_server_that_hangs_is_given_two_time_outs_however_many_retries() -> None:
    with server(Reply([1.0], hangs=True)) as stub:
        result, clock = client(stub.url, timeout=0.3, retries=9), count()
        calls_of(result).clock = lambda: 0.3 * next(clock)
        assert has_words(error(result, answers(1)), "0.3 s", "2 tries")
    assert len(stub.requests) == 2


@pytest.mark.parametrize(
    ("statuses", "seconds", "tries"),
    [
        ([504] * 4, 60.0, 2),
        ([408] * 4, 60.0, 2),
        ([504] * 4, 10.0, 4),
        ([503] * 4, 60.0, 4),
        ([503, 504, 503, 504], 40.0, 4),
        ([503, 503, 503, 504, 503], 59.0, 4),
        ([504, 503, 504, 503], 60.0, 3),
    ],
)
def test_only_time_outs_use_up_the_time(statuses: list[int], seconds: float, tries: int) -> None:
    now = [0.0]

    def slow(_: Any, number: int) -> Reply:
        now[0] += seconds
        return Reply(status=statuses[number])

    with server(slow) as stub:
        http_client = client(stub.url, timeout=60.0, retries=len(statuses) - 1)
        calls_of(http_client).clock = lambda: now[0]
        assert has_words(error(http_client, answers(1)), f"{tries} tries")
    assert len(stub.requests) == tries


def test_a_reply_without_end_is_cut() -> None:
    with server(Reply(raw=b'{"rewards": [' + b" " * 5000 + b"1.0]}")) as stub:
        http_client = client(stub.url)
        calls_of(http_client).backend.http.max_bytes = 1000
        assert has_words(error(http_client, answers(1)), 1000)


def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{free_port()}/get_reward"
    assert has_words(error(client(url), answers(3)), url, "ConnectError")


def test_pauses_grow_are_drawn_and_end_growing() -> None:
    assert [backoff(n, 0.5, 30.0, lambda: 0.0) for n in range(3)] == [0.25, 0.5, 1.0]
    assert backoff(3, 0.5, 30.0, lambda: 0.5) == pytest.approx(0.5 * 8 * 0.75)
    assert backoff(1000, 0.5, 30.0, lambda: 1.0) == 30.0
    assert [backoff(n, 1.0, 30.0) for n in (0, 1, 2, 9)] == [1.0, 2.0, 4.0, 30.0]
    with server(Reply(status=500)) as stub:
        before, pauses = random.getstate(), [Pauses(), Pauses()]
        for pause in pauses:
            error(client(stub.url, retries=5, pauses=pause), answers(1))
    assert random.getstate() == before
    assert pauses[0] != pauses[1]
    assert all(
        FIRST_PAUSE * 2**n / 2 <= seconds <= FIRST_PAUSE * 2**n
        for item in pauses
        for n, seconds in enumerate(item)
    )


def test_retry_after_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.time, "time", lambda: 2e9)
    replies = [
        Reply(status=503, headers={"Retry-After": "7"}),
        Reply(status=429, headers={"Retry-After": formatdate(2e9 + 60, usegmt=True)}),
        Reply(status=429, headers={"Retry-After": "soon"}),
        Reply([1.0]),
    ]
    pauses = Pauses()
    with server(lambda _, n: replies[n]) as stub:
        assert values(client(stub.url, retries=3, pauses=pauses), [answer("x")]) == [1.0]
    assert 7 < pauses[0] <= 7 + FIRST_PAUSE
    assert 60 < pauses[1] <= 60 + 2 * FIRST_PAUSE
    assert pauses[2] <= 4 * FIRST_PAUSE
    with server(Reply(status=503, headers={"Retry-After": "3600"})) as stub:
        assert has_words(error(client(stub.url, retries=3), answers(1)), 503)
    assert len(stub.requests) == 1  # an hour is not waited for


# Scores of some answers


def in_part(failed: Any, scored: Any, status: int = 500) -> Reply:
    return Reply(
        raw=json.dumps({"error": "some", "failed": failed, "scored": scored}).encode(),
        status=status,
    )


ONE_FAILED, TWO_SCORED = (
    [{"index": 1, "error": "too long"}],
    [{"index": 2, "reward": 2.5}, {"index": 0, "reward": -1}],
)


def test_scores_of_some_answers_are_taken_by_their_index() -> None:
    pauses = Pauses()
    inputs = [answer("x", ({"role": "user", "content": "not rendered"},)), *answers(3)]
    with server(in_part(ONE_FAILED, TWO_SCORED)) as stub, server(Reply([9.0] * 3)) as other:
        http_client = client(stub.url, other.url, retries=3, pauses=pauses)
        results = [scores(http_client, inputs) for _ in range(2)]
    for item in results:
        assert [score.value for score in item] == [None, -1.0, None, 2.5]
        assert "rendered" in item[0].error
        assert item[2].error.endswith(": too long")
    assert (len(stub.requests), len(other.requests), pauses) == (2, 0, [])  # it did not rest


@pytest.mark.parametrize("reply", [
    in_part(ONE_FAILED, TWO_SCORED, status=503),
    in_part(ONE_FAILED, TWO_SCORED[:1]),
    in_part([], TWO_SCORED),
    in_part(ONE_FAILED * 2, TWO_SCORED),
    in_part(ONE_FAILED, [*TWO_SCORED, {"index": 1, "reward": 1.0}]),
    in_part(ONE_FAILED, [*TWO_SCORED, {"index": 3, "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"index": -3, "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"index": False, "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"index": 0.0, "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"index": "0", "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"index": None, "reward": 1.0}]),
    in_part(ONE_FAILED, [TWO_SCORED[0], {"reward": 1.0}]),
    *(in_part(ONE_FAILED, [TWO_SCORED[0], {"index": 0, "reward": value}])
      for value in (None, "1.0", True, [1.0], float("nan"), float("inf"), -float("inf"), 10**400)),
    in_part(ONE_FAILED, {"0": 1.0, "2": 1.0}),
    in_part(ONE_FAILED, [0.5, 0.5]),
    in_part([{"index": 1}], TWO_SCORED),
    in_part([{"index": 1, "error": None}], TWO_SCORED),
    in_part([{"index": i, "error": "no"} for i in range(3)], None),
    in_part([{"index": i, "error": "no"} for i in range(3)], ""),
    in_part([], [{"index": i, "reward": 1.0} for i in range(2)]),
])  # fmt: skip
def test_a_reply_that_does_not_have_each_answer_once_has_no_scores(reply: Reply) -> None:
    with server(reply) as stub:
        assert has_words(error(client(stub.url, retries=1), answers(3)), reply.status)
    assert len(stub.requests) == 2


def test_that_all_have_failed_is_an_answer_too() -> None:
    with server(in_part([{"index": i, "error": f"no {i}" * 999} for i in (1, 0)], [])) as stub:
        result = scores(client(stub.url, retries=3), answers(2))
    assert [score.value for score in result] == [None, None]
    assert "no 0" in result[0].error
    assert "no 1" in result[1].error
    assert len(result[0].error) < 600
    assert len(stub.requests) == 1


def test_our_own_server_and_client_agree_on_what_failed() -> None:
    def judge(completion: Completion) -> Score:
        return (
            Score(None, error="it says so")
            if completion.text in ("a1", "a4")
            else Score(hash_score(completion.text))
        )

    with served(Numbers(judge)) as actual:
        result = scores(client(f"{actual.url}/get_reward", batch_size=3, retries=3), answers(6))
        assert actual.statuses == {500: 2}
    assert [score.value for score in result] == [
        None if i in (1, 4) else hash_score(f"a{i}") for i in range(6)
    ]
    assert [score.error.endswith(": it says so") for score in result] == [
        i in (1, 4) for i in range(6)
    ]


def test_our_own_server_and_client_agree_on_what_was_said() -> None:
    """Also where another completion has no score; a server without texts sends none."""

    def judge(completion: Completion) -> Score:
        error = "broken" if completion.text == "a4" else ""
        text = "" if completion.text == "a1" else f"says {completion.text} \N{SNOWMAN}"
        return Score(None if error else 1.0, error=error, feedback=text)

    with served(Numbers(judge)) as actual:
        result = scores(client(f"{actual.url}/get_reward", batch_size=3, retries=0), answers(6))
        assert "feedback" not in actual.post(query=["a1"]).json()
    assert [score.value for score in result] == [1.0, 1.0, 1.0, 1.0, None, 1.0]
    texts = [f"says a{i} \N{SNOWMAN}" if i not in (1, 4) else "" for i in range(6)]
    assert [score.feedback for score in result] == texts
    others = parse_scores(b'{"rewards": [1, 2], "feedback": [null, "so"]}', 2)
    assert [score.feedback for score in others] == ["", "so"]
    unknown = parse_scores(b'{"rewards": [1, 2], "feedback": "so"}', 2)
    assert [score.feedback for score in unknown] == ["", ""]


# Several servers


def test_the_others_take_over_and_one_that_recovers_is_asked_again() -> None:
    clock = [1000.0]
    broken = True

    def first(request: dict[str, Any], number: int) -> Reply:
        return Reply(status=500) if broken else Reply([1.0] * len(request["query"]))

    pauses = Pauses()
    with server(first) as one, server(Reply([2.0])) as two:
        http_client = client(one.url, two.url, pauses=pauses)
        calls_of(http_client).backend.clock = lambda: clock[0]
        assert [values(http_client, [answer("x")]) for _ in range(4)] == [[2.0]] * 4
        assert (len(one.requests), len(two.requests), pauses) == (1, 4, [])  # it rests meanwhile
        clock[0] += module.FIRST_REST + 0.1
        assert values(http_client, [answer("x")]) == [2.0]
        assert (len(one.requests), len(two.requests)) == (2, 5)
        broken = False
        clock[0] += module.FIRST_REST + 0.1
        assert values(http_client, [answer("x")]) == [2.0]  # a second failure makes the rest longer
        clock[0] += module.FIRST_REST + 0.1
        assert [values(http_client, [answer("x")]) for _ in range(3)] == [[1.0]] * 3


def test_servers_share_the_calls() -> None:
    four = threading.Barrier(4, timeout=30)

    def slow(request: dict[str, Any], number: int) -> Reply:
        four.wait()
        return Reply([1.0])

    with server(slow) as one, server(slow) as two:
        assert (
            values(client(one.url, two.url, batch_size=1, concurrency=4), answers(12)) == [1.0] * 12
        )
    assert min(len(one.requests), len(two.requests)) >= 4
    assert all(len(request["query"]) == 1 for stub in (one, two) for request in stub.requests)


def test_a_server_that_hangs_costs_one_deadline() -> None:
    with server(Reply([1.0], hangs=True)) as one, server(Reply([2.0])) as two:
        http_client = client(one.url, two.url, timeout=1.0)
        calls_of(http_client).backend.clock = lambda: 0.0  # it rests as long as this takes
        assert [values(http_client, [answer("x")]) for _ in range(5)] == [[2.0]] * 5
    assert (len(one.requests), len(two.requests)) == (1, 5)


def test_all_servers_are_named_when_none_answers() -> None:
    with server(Reply(status=500)) as one, server(Reply(raw=b"{}")) as two:
        message = error(client(one.url, two.url), answers(1))
    assert has_words(message, f"{one.url}:", 500, f"{two.url}:", "rewards")


def test_a_server_is_killed_and_started_again_while_answers_are_scored() -> None:
    """No score is lost or wrong, and none is a stand-in."""
    port = free_port()

    def run(pauses: Any) -> Sequence[float | None]:
        return values(
            client(f"http://127.0.0.1:{port}/get_reward", batch_size=4, retries=4, pauses=pauses),
            answers(40),
        )

    class Revive(Pauses):
        async def __call__(self, seconds: float) -> None:
            await super().__call__(seconds)
            if not revived:
                context = server(port=port)
                revived.append(context)
                context.__enter__()

    revived: list[Any] = []
    try:
        assert run(Revive()) == [float(i) for i in range(40)]
        assert revived
    finally:
        for context in revived:
            context.__exit__(None, None, None)


@pytest.mark.parametrize(("target", "code", "words"), [
    ("http://", "reward-address-invalid", "http://"),
    ("http://host:99999/x", "reward-address-invalid", "http://host:99999/x"),
    ("http://a/x,ftp://b", "reward-address-invalid", "ftp://b"),
    ("http://a/x,http://a/x", "reward-address-duplicate", ""),
    ("http://a/x,", "reward-address-invalid", "''"),
])  # fmt: skip
def test_addresses_that_are_none_are_mistakes(target: str, code: str, words: str) -> None:
    with raises_error(code, where="reward.0.reward") as raised:
        reward(target)
    assert words in raised.error.message


@pytest.mark.parametrize("setting", ["reward", "judge"])
def test_addresses_with_credentials_are_refused(setting: str) -> None:
    url = "http://user:hunter2@host/x"
    options: dict[str, Any] = {"judge": url, "settings": {"model": "m"}}
    spec = entry(url, **(options if setting == "judge" else {}))
    with raises_error(
        "address-credentials", where=f"reward.0.{setting}", fix="token_env"
    ) as raised:
        reward_of([spec])
    assert "hunter2" not in str(raised.error)


def test_settings_of_a_client() -> None:
    with raises_error("reward-setting-unknown", where="reward.0.settings.lable", fix="label"):
        reward("http://host/x", settings={"lable": "x"})
    with raises_error("reward-setting-value", where="reward.0.settings.label"):
        reward("http://host/x", settings={"label": 3})
    with raises_error("reward-setting-unused", where="reward.0.token_env"):
        reward("length", token_env="X")
    names = [part.reward.name for part in reward_of([entry("http://host:80/get_reward")]).parts]
    assert names == ["host-80"]


def test_the_error_of_json_with_other_names_is_short() -> None:
    with pytest.raises(RewardError) as caught:
        parse_scores(json.dumps({f"name{i}": i for i in range(1000)}).encode(), 1)
    assert len(str(caught.value)) < 200
