"""Cached scores: they depend on content alone, and survive any damage to the file."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.disk import full_disk
from tests.errors import raises_error
from tests.rewards.kit import Reply, answer, answers, entry, reward, scores, server, values
from valence.rewards import reward_of
from valence.rewards.cache import HEADER, MAX_SCORES, ScoreCache, cache_key, digest
from valence.types import Completion, Score

COUNTS = (
    "def f(completions, step=1.0):\n    f.calls = getattr(f, 'calls', []) + [len(completions)]\n"
)
COUNTS += "    return [step * sum(f.calls)] * len(completions)\n"


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes, into the current folder, a function that gives how many answers it has seen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write_function(name: str, source: str = COUNTS) -> str:
        sys.modules.pop(name, None)
        Path(f"{name}.py").write_text(source)
        return f"{name}:f"

    yield write_function
    for name in ("counts", "counts2"):
        sys.modules.pop(name, None)


def cached_reward(target: str, folder: Path | None = Path("scores"), **options: Any) -> Any:
    return reward_of([entry(target, deterministic=True, **options)], cache=folder)


def test_what_was_scored_is_not_scored_again(counting: Any) -> None:
    cached = cached_reward(counting("counts"))
    assert values(cached, answers(3)) == [3.0] * 3
    assert values(cached, answers(5)) == [3.0] * 3 + [5.0] * 2
    assert values(cached, [*answers(3)[::-1], answer("a0")]) == [3.0] * 4
    again = cached_reward("counts:f")
    assert values(again, answers(5)) == [3.0] * 3 + [5.0] * 2
    assert (again.parts[0].reward.hits, again.parts[0].reward.misses) == (5, 0)
    assert scores(again, answers(1))[0].parts == {"f": 3.0}


def test_the_text_of_a_score_is_stored(counting: Any) -> None:
    source = "def f(completions):\n    return [(1.0, f'says {c.text}') for c in completions]\n"
    cached = cached_reward(counting("counts", source))
    texts = [score.feedback for score in scores(cached, answers(2))]
    again = cached_reward("counts:f")
    assert (
        [score.feedback for score in scores(again, answers(2))] == texts == ["says a0", "says a1"]
    )
    assert (again.parts[0].reward.hits, again.parts[0].reward.misses) == (2, 0)


def test_the_rewards_of_turns_are_stored(counting: Any) -> None:
    cached = cached_reward(counting("counts", "def f(completions):\n    return [[0.5], [2]]\n"))
    turns = [score.turn_rewards for score in scores(cached, answers(2))]
    again = cached_reward("counts:f")
    assert [score.turn_rewards for score in scores(again, answers(2))] == turns == [(0.5,), (2.0,)]
    assert (again.parts[0].reward.hits, again.parts[0].reward.misses) == (2, 0)


def test_the_same_answer_twice_is_asked_once(counting: Any) -> None:
    cached = cached_reward(counting("counts"))
    assert values(cached, [answer("x"), answer("y"), answer("x")]) == [2.0] * 3


def test_only_what_is_declared_to_be_the_same_is_kept(counting: Any) -> None:
    combined = reward(counting("counts"))
    assert values(combined, answers(1)) + values(combined, answers(1)) == [1.0, 2.0]
    assert not Path("scores").exists()


BASE = answer("text", "prompt ", tokens=(1, 2), rendered="<prompt>", who="x")
OTHERS: dict[str, Completion] = {
    "text": replace(BASE, text="texts"),
    "prompt": replace(BASE, prompt="prompts "),
    "tokens": replace(BASE, tokens=(1, 3)),
    "rendered": replace(BASE, rendered="<other>"),
    "stop": replace(BASE, stop="length"),
    "info": replace(BASE, info={"who": "y"}),
    "chat": replace(BASE, prompt=({"role": "user", "content": "prompt "},)),
    "more info": replace(BASE, info={"who": "x", "n": 1}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_whatever_a_reward_may_read_tells_completions_apart(kind: str) -> None:
    assert cache_key(OTHERS[kind]) != cache_key(BASE)


def test_who_sampled_it_and_when_does_not() -> None:
    other = replace(BASE, version=7, index=3, logps=(-2.0, -3.0), prompt_id="z", info={"who": "x"})
    assert cache_key(other) == cache_key(BASE)


def test_info_that_is_no_json_is_not_kept(counting: Any) -> None:
    cached = cached_reward(counting("counts"))
    odd = [answer("x", blob=b"1"), answer("x", blob=b"2")]
    assert cache_key(odd[0]) is None
    assert values(cached, odd) == [2.0, 2.0]
    assert values(cached, odd) == [4.0, 4.0]


def test_another_source_or_setting_is_another_reward(counting: Any) -> None:
    assert values(cached_reward(counting("counts")), answers(1)) == [1.0]
    assert values(cached_reward("counts:f", settings={"step": 5.0}), answers(1)) == [10.0]
    counting("counts", COUNTS + "\n# changed\n")
    assert values(cached_reward("counts:f"), answers(1)) == [1.0]
    assert len(list(Path("scores").iterdir())) == 3
    cached = cached_reward(counting("counts2"))
    assert values(cached, answers(1)) == [1.0]
    assert len(list(Path("scores").iterdir())) == 4


def test_failures_are_not_kept(tmp_path: Path) -> None:
    with server(lambda _, n: Reply([None, 0.5]) if n == 0 else Reply([0.25])) as stub:
        cached = cached_reward(stub.url, tmp_path)
        assert values(cached, answers(2)) == [None, 0.5]
        assert values(cached, answers(2)) == [0.25, 0.5]
    assert [len(request["query"]) for request in stub.requests] == [2, 1]


# How much is held


def test_the_scores_that_were_used_last_are_held() -> None:
    cache = ScoreCache(None, {}, max_scores=3)
    cache.add(scores_of(3))
    assert cache.get("k0") == Score(0.0, {"p": 0.0})
    cache.add(scores_of(1, 3))
    assert [cache.get(f"k{i}") is not None for i in range(4)] == [True, False, True, True]
    cache.add(scores_of(100))
    assert [key for key in scores_of(100) if cache.get(key)] == ["k97", "k98", "k99"]
    assert len(cache) == 3


def test_a_batch_that_is_larger_than_what_is_held_has_all_its_scores(counting: Any) -> None:
    counted = entry(counting("counts"), deterministic=True)
    result = reward_of([counted], keep=2)
    assert values(result, answers(5)) == [5.0] * 5
    assert values(result, answers(5)) == [8.0] * 3 + [5.0] * 2
    assert len(result.parts[0].reward.cache) == 2
    none = reward_of([counted], cache=Path("scores"), keep=0)
    assert [values(none, [answer("x")]) for _ in range(2)] == [[9.0], [10.0]]
    assert not Path("scores").exists()


def peak_memory(work: Callable[[], object]) -> int:
    """Bytes: the least of three times, as other threads of the program count too."""
    peaks: list[int] = []
    for _ in range(3):
        tracemalloc.start()
        try:
            work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    return min(peaks)


def test_a_file_that_is_larger_than_what_is_held_costs_no_memory(tmp_path: Path) -> None:
    one, two = ScoreCache(tmp_path, {}, max_scores=10), ScoreCache(tmp_path, {}, max_scores=10)
    for start in range(0, 2000, 500):
        one.add(scores_of(500, start))
    assert one.path is not None
    # Not the file at once.
    assert (
        peak_memory(lambda: ScoreCache(tmp_path, {}, max_scores=10)) < one.path.stat().st_size / 4
    )
    two.refresh()
    for item in (one, two, ScoreCache(tmp_path, {}, max_scores=10)):
        assert len(item) == 10
        known = [item.get(f"k{i}") is not None for i in (0, 1989, 1990, 1999)]
        assert known == [False, False, True, True]
    one.add(scores_of(1))  # one that was forgotten is written again, and found
    two.refresh()
    assert two.get("k0") == Score(0.0, {"p": 0.0})


def test_a_score_that_is_held_costs_little_memory() -> None:
    cache = ScoreCache(None, {}, max_scores=2000)
    tracemalloc.start()
    try:
        for i in range(0, 6000, 100):
            cache.add({digest(f"{k}"): Score(k / 7, {"f": k / 7}) for k in range(i, i + 100)})
        held = tracemalloc.get_traced_memory()[0] / len(cache)
    finally:
        tracemalloc.stop()
    assert len(cache) == 2000
    assert held * MAX_SCORES < 50e6


# The file


def scores_of(number: int, start: int = 0) -> dict[str, Score]:
    return {f"k{i}": Score(float(i), {"p": i / 2}) for i in range(start, start + number)}


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_what_a_killed_process_left_of_a_line_is_ignored(cut: int, tmp_path: Path) -> None:
    first = ScoreCache(tmp_path, {"a": 1})
    first.add(scores_of(3))
    assert first.path is not None
    full = first.path.read_bytes()
    first.path.write_bytes(full[:-cut])
    second = ScoreCache(tmp_path, {"a": 1})
    # the last line counts with its line break
    assert len(second) == (3 if cut == 1 else 2) - (cut == 1)
    second.add(scores_of(3, 3))
    third = ScoreCache(tmp_path, {"a": 1})
    assert [third.get(f"k{i}") for i in (0, 1, 3, 4, 5)] == [
        Score(float(i), {"p": i / 2}) for i in (0, 1, 3, 4, 5)
    ]
    assert third.get("k2") in (None, Score(2.0, {"p": 1.0}))


@pytest.mark.filterwarnings("ignore:.*jsonl:UserWarning")
@pytest.mark.parametrize("line", [
    "{}", "[]", "1", '{"key": "x", "value": "1.0", "parts": '
                     '{}}', '{"key": "x", "value": null, "parts": {}}',
    '{"key": "x", "value": NaN, "parts": '
    '{}}', '{"key": "x", "value": true, "parts": {}}', '{"key": 1, "value": 1, "parts": {}}',
    '{"key": "x", "value": 1, "parts": {"a": '
    'Infinity}}', '{"key": "x", "value": 1, "parts": [1]}', "\ufffd{", "[" * 10000,
])  # fmt: skip
def test_a_line_that_is_no_score_is_none(line: str, tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, {})
    assert cache.path is not None
    with cache.path.open("a") as file:
        file.write(f"\n{line}\n")
    assert len(ScoreCache(tmp_path, {})) == 0


def test_no_bit_of_a_score_may_change(tmp_path: Path) -> None:
    """A score whose line has a flipped bit is computed again; it never has another value."""
    cache = ScoreCache(tmp_path, {"a": 1})
    cache.add(scores := scores_of(3))
    assert cache.path is not None
    full = cache.path.read_bytes()
    wrong: list[str] = []
    silent = 0
    for at in range(len(full)):
        for bit in (1, 4, 16):
            cache.path.write_bytes(full[:at] + bytes([full[at] ^ bit]) + full[at + 1 :])
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again = ScoreCache(tmp_path, {"a": 1})
            known = {key: score for key in scores if (score := again.get(key)) is not None}
            wrong += [f"{at}: {key}" for key in known if known[key] != scores[key]]
            silent += len(known) < len(scores) and not caught and full[at : at + 1] not in b"}\n"
    assert wrong == []
    assert silent == 0


def test_a_damaged_line_is_named_once_and_replaced(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, {"a": 1})
    cache.add(scores_of(3))
    assert cache.path is not None
    cache.path.write_text(
        cache.path.read_text()
        .replace('"value": 1.0', '"value": 9.0')
        .replace('"value": 2.0', '"value": 8.0')
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(str(cache.path))}:5: ") as caught:
        again = ScoreCache(tmp_path, {"a": 1})
    assert len(caught) == 1
    assert [again.get(f"k{i}") is None for i in range(3)] == [False, True, True]
    again.add(scores_of(3))
    with pytest.warns(UserWarning, match=":5: "):
        assert ScoreCache(tmp_path, {"a": 1}).get("k1") == Score(1.0, {"p": 0.5})


def test_two_that_are_open_at_once_see_each_other(tmp_path: Path) -> None:
    one, two = ScoreCache(tmp_path, {}), ScoreCache(tmp_path, {})
    one.add(scores_of(2))
    assert two.get("k0") is None
    two.refresh()
    assert two.get("k0") == Score(0.0, {"p": 0.0})
    two.add({"k0": Score(99.0), "k9": Score(9.0)})  # what is known stays
    one.refresh()
    assert (one.get("k0"), one.get("k9")) == (Score(0.0, {"p": 0.0}), Score(9.0))


WRITES = """
import sys
from pathlib import Path
from valence.rewards.cache import ScoreCache
from valence.types import Score
kept = ScoreCache(Path(sys.argv[1]), {})
for i in range(200):
    kept.add({f"{sys.argv[2]}-{i}-{j}": Score(i / 7, {"part" * 20: j / 3}) for j in range(3)})
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", WRITES, str(tmp_path), str(n)]) for n in range(3)
    ]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    cache = ScoreCache(tmp_path, {})
    assert len(cache) == 3 * 200 * 3
    assert cache.get("2-199-2") == Score(199 / 7, {"part" * 20: 2 / 3})


def test_a_disk_that_is_full_costs_the_file_and_no_score(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, {})
    error = os.strerror(errno.EFBIG)
    with full_disk():
        with pytest.warns(UserWarning, match=error):
            cache.add(scores_of(1))
        cache.add(scores_of(1, 5))
    assert cache.get("k0") is not None
    assert error in cache.trouble
    assert len(ScoreCache(tmp_path, {})) == 0


def test_a_folder_that_is_none_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises_error("reward-cache-not-writable", where=str(tmp_path / "file")):
        ScoreCache(tmp_path / "file", {})


def test_the_file_names_the_reward_whose_scores_they_are(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path, {"rule": "length"})
    assert cache.path is not None
    assert json.loads(cache.path.read_text())[HEADER] == {"rule": "length"}
