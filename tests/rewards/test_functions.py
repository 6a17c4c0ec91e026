"""Functions as rewards: signatures, return values, and all errors of third-party code."""

from __future__ import annotations

import asyncio
import os
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.errors import raises_error
from tests.rewards.kit import (
    answer,
    answers,
    calls_of,
    error,
    has_words,
    reward,
    scores,
    skip_if_threads_share_a_folder,
    values,
    wait_for,
)
from valence.rewards.calls import Calls
from valence.rewards.functions import MAX_ABANDONED, Function, parse_scores, trl_columns
from valence.types import Completion, Episode, Score

NUMBER = iter(range(10**6))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a module into the current folder under a unique name, and return that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write_module(source: str) -> str:
        name = f"reward_under_test_{next(NUMBER)}"
        Path(f"{name}.py").write_text(textwrap.dedent(source).lstrip("\n"))
        return name

    return write_module


# Signatures


def test_a_function_gets_completions_and_settings(write: Any) -> None:
    module = write("""
        def concise(completions, *, scale=1.0, **context):
            assert context == {"other": "x"}
            return [scale * len(c.tokens) + len(c.prompt) + len(c.info["who"]) for c in completions]
    """)
    combined = reward(f"{module}:concise", settings={"scale": 2.0, "other": "x"})
    assert values(combined, [answer("one two", who="ab"), answer("one", "question", who="")]) == [
        2 * 2 + 2 + 2,
        2 + 8,
    ]
    assert combined.name == "concise"


def test_a_function_of_trl_gets_columns(write: Any) -> None:
    module = write("""
        def f(prompts, completions, completion_ids, answer, **columns):
            f.seen = dict(locals())
            return [float(len(ids)) for ids in completion_ids]

        def g(completions, ground_truth, **kwargs):
            return [float(c == g) for c, g in zip(completions, ground_truth)]
    """)
    chat = ({"role": "user", "content": "hi"},)
    inputs = [answer("a b", answer="x", level=1), answer("c", chat, answer="y")]
    assert values(reward(f"{module}:f"), inputs) == [2.0, 1.0]
    observed = sys.modules[module].f.seen
    assert observed["prompts"] == ["q ", [{"role": "user", "content": "hi"}]]
    assert observed["completions"] == ["a b", [{"role": "assistant", "content": "c"}]]
    assert (observed["completion_ids"], observed["answer"], observed["columns"]) == (
        [[0, 1], [0]],
        ["x", "y"],
        {"level": [1, None]},
    )
    assert values(
        reward(f"{module}:g"), [answer("4", ground_truth="4"), answer("5", ground_truth="4")]
    ) == [1.0, 0.0]
    assert has_words(
        error(reward(f"{module}:g"), [answer("4", other=1)]),
        "'ground_truth'",
        f"{module}.py:5",
        "other",
    )


def test_columns_do_not_hand_out_the_messages_themselves() -> None:
    chat = ({"role": "user", "content": "hi"},)
    trl_columns([answer("x", chat)])["prompts"][0][0]["content"] = "changed"
    assert chat == ({"role": "user", "content": "hi"},)


CHANGES = """
    def change(info, messages, settings):
        info["answers"].append("changed")
        info["new"] = 1
        messages[0]["content"] = "changed"
        settings.append(9)

    def plain(completions, weights=None):
        found = [float(len(each.info["answers"])) for each in completions]
        for each in completions:
            change(each.info, each.prompt, weights)
            each.tools[0]["name"] = "changed"
        return found

    async def in_a_loop(completions, weights=None):
        return plain(completions, weights)

    def of_trl(prompts, completions, answers, weights=None):
        found = [float(len(each)) for each in answers]
        for prompt, own in zip(prompts, answers):
            change({"answers": own}, prompt, weights)
        return found
"""


@pytest.mark.parametrize("name", ["plain", "in_a_loop", "of_trl"])
def test_what_a_function_changes_reaches_neither_the_rows_nor_other_completions(
    name: str, write: Any
) -> None:
    """Two completions of one row, which share its columns, scored twice."""
    row: dict[str, Any] = {"answers": ["4"], "nested": {"deep": [1]}}
    turns: Any = ({"role": "user", "content": "2 + 2?"},)
    tools, weights = ({"name": "clock"},), [1]
    both = [
        Completion("p", (1,), (0.0,), "4", "eos", index=i, prompt=turns, info=row, tools=tools)
        for i in range(2)
    ]
    function = reward(f"{write(CHANGES)}:{name}", settings={"weights": weights})
    for _ in range(2):
        assert values(function, both) == [1.0, 1.0]
    assert row == {"answers": ["4"], "nested": {"deep": [1]}}
    assert turns == ({"role": "user", "content": "2 + 2?"},)
    assert tools == ({"name": "clock"},)
    assert weights == [1]


def test_columns_that_cannot_be_copied_are_named(write: Any) -> None:
    lock = Completion("p", (1,), (0.0,), "4", "eos", info={"lock": threading.Lock()})
    inputs = reward(f"{write('def give(completions): return [1.0] * len(completions)')}:give")
    assert has_words(error(inputs, [lock]), "TypeError")


def test_asynchronous_functions_run_together_in_a_loop_that_stays(write: Any) -> None:
    module = write("""
        import asyncio
        loops, running, most, three = set(), 0, 0, asyncio.Barrier(3)

        async def f(completions, **context):
            global running, most
            loops.add(asyncio.get_running_loop())
            running += 1
            most = max(most, running)
            await three.wait()
            running -= 1
            return [float(c.text[1:]) for c in completions]
    """)
    combined = reward(f"{module}:f", batch_size=2, concurrency=3)
    for _ in range(2):
        assert values(combined, answers(11)) == [float(i) for i in range(11)]
    assert len(sys.modules[module].loops) == 1
    assert sys.modules[module].most == 3


def test_a_blocking_function_is_called_once_at_a_time(write: Any) -> None:
    module = write("""
        import threading
        lock = threading.Lock()

        def f(completions):
            assert lock.acquire(blocking=False)
            lock.release()
            return [float(c.text[1:]) for c in completions]
    """)
    combined = reward(f"{module}:f", batch_size=2, concurrency=8)
    assert calls_of(combined).concurrency == 1
    assert values(combined, answers(9)) == [float(i) for i in range(9)]


def test_objects_partials_and_wrapped_functions_are_functions() -> None:
    async def late(completions: list[Completion]) -> list[float]:
        return [1.0] * len(completions)

    class Object:
        def __call__(self, completions: list[Completion]) -> list[float]:
            return [2.0] * len(completions)

    for fn, value in (
        (lambda c: late(c), 1.0),
        (Object(), 2.0),
        (partial(late), 1.0),
        (partial(Object()), 2.0),
    ):
        function = Function(fn, "f")
        assert values(Calls("f", function, False), answers(2)) == [value] * 2


# What they give


@pytest.mark.parametrize(("value", "words"), [
    ("[1.0]", [1, 2]), ("[1.0, 2.0, 3.0]", [3, 2]), ("None", ["None", "return"]),
    ("1.0", ["float"]), ("'12'", ["str"]),
    ("{0: 1.0, 1: 2.0}", ["dict"]), ("(x for x in [1.0, 2.0])", ["generator"]),
    ("[None, None]", ["None"]),
    ("['1.0', '1.0']", ["'1.0'", "str"]), ("[[[1.0]], [[1.0]]]", ["[[1.0]]", "list"]),
    ("[[], []]", ["[]", "list"]), ("[[1.0, 'a']] * 2", ["'a'", "str"]),
    ("[1j, 1j]", ["1j", "complex"]),
    ("[10**400] * 2", ["float"]), ("__import__('torch').ones(2, 1, 1)", ["[[1.0]]", "list"]),
    ("__import__('torch').tensor(1.0)", ["float"]),
    ("__import__('numpy').array(['1', '1'])", ["'1'", "str"]),
])  # fmt: skip
def test_what_is_no_score_is_an_error(value: str, words: list[object], write: Any) -> None:
    module = write(f"def f(completions):\n    return {value}\n")
    message = error(reward(f"{module}:f"), answers(2))
    assert message.startswith("f: ")
    assert has_words(message, f"{module}.py:1", *words)


@pytest.mark.parametrize(
    ("value", "shown"), [("float('nan')", "nan"), ("float('inf')", "inf"), ("-1e400", "-inf")]
)
def test_a_score_that_is_not_finite_is_an_error(value: str, shown: str, write: Any) -> None:
    module = write(f"def f(completions):\n    return [{value}] * 2\n")
    message = error(reward(f"{module}:f"), answers(2))
    assert message.startswith("f: ")
    assert has_words(message, shown)


def test_one_answer_without_a_score_leaves_the_others_theirs(write: Any) -> None:
    module = write("def f(completions):\n    return [0.5, float('nan'), None, 'x', 3, True]\n")
    assert values(reward(f"{module}:f"), answers(6)) == [0.5, None, None, None, 3.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [
        numpy.array([0.5, 2.0], numpy.float32),
        torch.tensor([0.5, 2.0]),
        [numpy.float32(0.5), torch.tensor(2.0)],
        (0.5, 2),
        [Score(0.5), Score(numpy.float32(2.0))],
    ],
)
def test_arrays_and_tensors_are_lists(value: Any) -> None:
    assert [score.value for score in parse_scores(value, 2, "f.py:1")] == [0.5, 2.0]


def test_parts_of_a_score_are_kept_and_a_bad_part_fails_it(write: Any) -> None:
    module = write("""
        from valence.types import Score

        def f(completions):
            good, bad = Score(1.0, {"grammar": 0.25}), Score(1.0, {"grammar": float("nan")})
            return [good, bad, Score(None, error="no judge"), Score(None)]
    """)
    result = scores(reward(f"{module}:f"), answers(4))
    assert (result[0].value, result[0].parts) == (1.0, {"f/grammar": 0.25, "f": 1.0})
    assert [score.value for score in result[1:]] == [None] * 3
    assert has_words(result[1].error, "grammar", "nan")
    assert result[2].error == "f: no judge"
    assert result[3].error.startswith("f: ")


def test_a_list_rewards_each_turn(write: Any) -> None:
    turns = [{"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]
    completion = replace(answer("a"), episode=Episode(tuple(turns)))
    module = write("""
        from valence.types import Score

        def f(completions):
            score = Score(2.0, turn_rewards=[0.5, 0.5])
            return [[0.25, 1], score, [1.0], [1.0, float("nan")], [2, None]]
    """)
    result = scores(reward(f"{module}:f"), [completion] * 5)
    assert [score.value for score in result] == [1.25, 2.0, None, None, None]
    assert [tuple(score.turn_rewards) for score in result[:2]] == [(0.25, 1.0), (0.5, 0.5)]
    assert has_words(result[2].error, 1, 2, "turns")


def test_a_text_with_the_number_is_feedback(write: Any) -> None:
    """Text without characters that no tokenizer accepts; anything else fails its completion."""
    module = write("""
        from valence.types import Score

        def f(completions):
            texts = Score(0.5, feedback="so"), Score(1.0, feedback=3), (2, "a\\udcffb\\n")
            return [*texts, (None, "no number"), (1.0, 2.0)]
    """)
    result = scores(reward(f"{module}:f"), answers(5))
    assert [score.value for score in result] == [0.5, None, 2.0, None, None]
    assert [score.feedback for score in result] == ["so", "", "a?b", "", ""]
    assert has_words(result[1].error, "feedback", 3)
    assert has_words(result[4].error, "tuple")


# What goes wrong


@pytest.mark.parametrize(
    ("kind", "await_"), [("def", ""), ("async def", "await __import__('asyncio').sleep(0);")]
)
@pytest.mark.parametrize(
    "raised",
    ["ValueError('no')", "SystemExit(3)", "KeyboardInterrupt", "GeneratorExit", "StopIteration"],
)
def test_whatever_is_raised_is_an_error_with_its_line(
    raised: str, kind: str, await_: str, write: Any
) -> None:
    module = write(f"""
        {kind} f(completions):
            print("printed")
            {await_}
            helper()

        def helper():
            raise {raised}
    """)
    combined = reward(f"{module}:f")
    message = error(combined, answers(3))
    name = raised.partition("(")[0]
    if name == "StopIteration":  # which asyncio cannot pass on
        assert has_words(message, "StopIteration") or has_words(message, "RuntimeError")
    else:
        assert has_words(message, name, f"{module}.py:7")
    assert error(combined, answers(3)) == message  # and it is called again


BROKEN = """
        class Broken:
            def __repr__(self):
                raise RuntimeError("no repr")
            __str__ = __len__ = __float__ = tolist = item = __repr__

        class BrokenError(Exception):
            def __str__(self):
                raise SystemExit(3)
            __repr__ = __str__

        class BrokenList(list):
            def __len__(self):
                raise RuntimeError("no length")
"""


@pytest.mark.parametrize(("statement", "words"), [
    ("raise BrokenError", ["BrokenError"]), ("raise AttributeError(Broken())", ["AttributeError"]),
    ("return [Broken()]", []), ("return Broken()", ["no repr"]),
    ("return BrokenList([1.0])", ["no length"]), ("return [Score(Broken())]", []),
    ("return [Score(1.0, {'x': Broken()})]", ["x", "Broken"]),
    ("return [Score(1.0, {'x': 10**400})]", ["x", 10**400]),
    ("return [Score(1.0, {'x': BrokenError()})]", ["x", "BrokenError"]),
])  # fmt: skip
def test_objects_that_cannot_be_shown_are_errors(
    statement: str,
    words: list[object],
    write: Any,
) -> None:
    module = write(f"""
        from valence.types import Score
{BROKEN}
        def f(completions):
            {statement}
    """)
    assert has_words(error(reward(f"{module}:f"), answers(1)), *words)


def test_an_import_whose_error_cannot_be_shown_is_a_mistake(write: Any) -> None:
    module = write(f"""{BROKEN}
        raise BrokenError
    """)
    with raises_error("reward-import-failed", where="reward.0.reward") as raised:
        reward(f"{module}:f")
    assert has_words(raised.error.message, "BrokenError")


@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_changes_the_working_directory_does_not_move_the_program(
    kind: str, is_private: bool, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_private:  # as where the system gives threads no working directory of their own
        monkeypatch.setattr("ctypes.CDLL", None)
    module = write(f"""
        import os
        os.chdir("/")

        {kind} f(completions):
            os.chdir("/usr")
            return [1.0] * len(completions)
    """)
    combined = reward(f"{module}:f")
    assert os.getcwd() == str(tmp_path)
    assert values(combined, answers(2)) == [1.0, 1.0]
    assert os.getcwd() == str(tmp_path)


def test_a_call_that_is_under_way_or_given_up_does_not_move_the_program(
    write: Any, tmp_path: Path
) -> None:
    """A run writes its checkpoints meanwhile, and afterwards."""
    skip_if_threads_share_a_folder()
    module = write("""
        import os, threading
        moved, go_on = threading.Event(), threading.Event()

        def f(completions):
            os.chdir("/usr")
            moved.set()
            go_on.wait()
            os.chdir("/")
            moved.set()
            return [1.0]
    """)
    combined = reward(f"{module}:f", timeout=0.3)
    assert values(combined, answers(1)) == [None]
    loaded = sys.modules[module]
    assert loaded.moved.is_set()
    assert os.getcwd() == str(tmp_path)
    loaded.moved.clear()
    loaded.go_on.set()
    assert loaded.moved.wait(30)
    assert os.getcwd() == str(tmp_path)


def test_the_program_may_change_its_working_directory(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = write("""
        import os
        seen = []

        def f(completions):
            seen.append(os.getcwd())
            return [1.0]
    """)
    combined = reward(f"{module}:f")
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        monkeypatch.chdir(folder)
        assert values(combined, answers(1)) == [1.0]
    assert sys.modules[module].seen == [str(tmp_path), str(tmp_path / "below")]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_background_thread_that_scores_does_not_undo_a_change_of_folder(
    kind: str, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_if_threads_share_a_folder()
    module = write(f"""
        import os, threading
        started, go_on = threading.Event(), threading.Event()

        {kind} f(completions):
            started.set()
            go_on.wait()
            os.chdir("/usr")
            return [1.0]
    """)
    combined = reward(f"{module}:f")
    below = tmp_path / "below"
    below.mkdir()
    with ThreadPoolExecutor(1) as thread:
        scores = thread.submit(values, combined, answers(1))
        loaded = sys.modules[module]
        assert loaded.started.wait(30)
        monkeypatch.chdir(below)
        loaded.go_on.set()
        assert scores.result() == [1.0]
    assert os.getcwd() == str(below)


def test_an_asynchronous_function_that_cancels_itself_is_an_error(write: Any) -> None:
    module = write("""
        import asyncio

        async def f(completions):
            raise asyncio.CancelledError
    """)
    assert has_words(error(reward(f"{module}:f"), answers(1)), "CancelledError")


@pytest.mark.parametrize(("kind", "wait", "blocks"), [
    ("def", "over.wait()", False), ("async def", "await asyncio.Event().wait()", False),
    ("async def", "over.wait()", True),
])  # fmt: skip
def test_a_call_that_hangs_is_given_up_and_the_next_one_made(
    kind: str,
    wait: str,
    blocks: bool,
    write: Any,
) -> None:
    module = write(f"""
        import asyncio, threading
        over = threading.Event()

        {kind} f(completions):
            if completions[0].text == "a0":
                {wait}
            return [1.0] * len(completions)
    """)
    combined = reward(f"{module}:f", timeout=0.5, batch_size=1)
    message = error(combined, answers(1))
    assert has_words(message, "0.5 s", f"{module}.py:4")
    assert has_words(message, "await") is blocks  # what to write instead
    calls_of(combined).backend.seconds = 30.0
    assert values(combined, answers(2)[1:]) == [1.0]
    sys.modules[module].over.set()


def test_a_function_that_never_returns_is_not_called_without_end(write: Any) -> None:
    module = write("""
        import threading
        over, called = threading.Event(), 0

        def f(completions):
            global called
            called += 1
            over.wait()
            return [1.0]
    """)
    before = threading.active_count()
    combined = reward(f"{module}:f", timeout=0.02, batch_size=1)
    result = scores(combined, answers(MAX_ABANDONED + 5))
    assert all(score.value is None for score in result)
    assert sys.modules[module].called == MAX_ABANDONED
    assert has_words(result[-1].error, MAX_ABANDONED, f"{module}.py:4")
    assert not has_words(result[-1].error, "0.02 s")
    sys.modules[module].over.set()
    wait_for(lambda: threading.active_count() <= before + 1)
    calls_of(combined).backend.seconds = 30.0
    assert values(combined, answers(1)) == [1.0]


def test_connections_of_a_function_are_tried_again_and_its_mistakes_are_not(write: Any) -> None:
    module = write("""
        called = []

        def f(completions, kind):
            called.append(kind)
            if len(called) < 3:
                raise {"line": ConnectionError, "value": ValueError}[kind]("no")
            return [1.0]
    """)
    for kind, value, number in (("line", 1.0, 3), ("value", None, 1)):
        combined = reward(f"{module}:f", settings={"kind": kind}, retries=3)
        pauses: list[float] = []

        async def sleep(seconds: float, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)

        calls_of(combined).sleep = sleep
        assert values(combined, answers(1)) == [value]
        assert len(sys.modules[module].called) == number
        assert len(pauses) == number - 1
        sys.modules[module].called.clear()


def test_time_outs_of_a_function_are_tried_again_while_there_is_time(write: Any) -> None:
    module = write("""
        import asyncio

        called = []

        async def hangs(completions):
            called.append(1)
            await asyncio.Event().wait()

        def raises(completions):
            called.append(1)
            raise TimeoutError("its own")
    """)
    for name, tries in (("hangs", 2), ("raises", 4)):
        timeout, clock = (0.1 if name == "hangs" else 60.0), count()
        combined = reward(f"{module}:{name}", timeout=timeout, retries=3)
        calls_of(combined).clock = lambda clock=clock: 0.1 * next(clock)
        calls_of(combined).sleep = lambda _: asyncio.sleep(0)
        assert has_words(error(combined, answers(1)), f"{tries} tries")
        assert len(sys.modules[module].called) == tries
        sys.modules[module].called.clear()


def test_who_takes_completions_for_texts_is_told(write: Any) -> None:
    module = write(
        "def f(completions, **kwargs):\n    return [float(c.strip() == 'x') for c in completions]\n"
    )
    assert has_words(error(reward(f"{module}:f"), answers(1)), "AttributeError", "prompts")


# Finding them


@pytest.mark.parametrize(("target", "source", "code", "words", "fix"), [
    ("@:nothing", "def f(completions): ...", "reward-not-found", ["@.py", "'nothing'"], ""),
    ("@:concize", "def concise(completions): ...", "reward-not-found", ["@.py"], "concise"),
    ("@:Judge", "class Judge: ...", "reward-not-callable", ["class"], ""),
    ("@:limit", "limit = 3", "reward-not-callable", ["int"], ""),
    ("@:f", "x = 1\nimport no_such_library\n", "reward-import-failed",
     ["@.py:2", "ModuleNotFoundError", "'no_such_library'"], "install"),
    ("@:f", "x = 1\ndef f(:\n", "reward-import-failed", ["@.py:2", "SyntaxError"], ""),
    ("@:f", "def g():\n    raise "
            "ValueError('no')\n\ng()\n", "reward-import-failed", ["@.py:2", "ValueError: no"], ""),
    ("@:f", "raise SystemExit(2)", "reward-import-failed", ["@.py:1", "SystemExit"], ""),
    ("no_such_package.rewards:f", "", "reward-module-not-found", ["'no_such_package'"], ""),
    ("@.rewards:f", "", "reward-module-not-found", ["'@.rewards'"], ""),
    ("@:f", "def f(): ...", "reward-signature", ["@.py:1", "completions"], ""),
    ("@:f", "def f(texts, other): ...", "reward-signature", ["@.py:1", "other"], ""),
    ("judge", "", "reward-not-found", ["server"], "judge: http"),
    ("@.py:f", "", "reward-not-found", [], "@:function"),
    ("@.f", "def f(completions): ...", "reward-not-found", [], "@:f "),
])  # fmt: skip
def test_what_cannot_be_called_is_a_mistake(
    target: str,
    source: str,
    code: str,
    words: list[str],
    fix: str,
    write: Any,
) -> None:
    module = write(source)
    with raises_error(code, where="reward.0.reward", fix=fix.replace("@", module)) as raised:
        reward(target.replace("@", module))
    assert has_words(raised.error.message, *(word.replace("@", module) for word in words))


def test_settings_that_a_function_does_not_take_are_refused(write: Any) -> None:
    module = write("def f(completions, scale=1): ...")
    with raises_error(
        "reward-setting-unknown", where="reward.0.settings.sale", fix="did you mean scale?"
    ) as raised:
        reward(f"{module}:f", settings={"sale": 1})
    assert has_words(raised.error.message, "'sale'")


TYPED = """
from __future__ import annotations
from typing import TYPE_CHECKING, Annotated, Literal, Optional
from annotated_types import Ge, Le
from pathlib import Path
if TYPE_CHECKING:
    from valence import Completion
    from somewhere import Unknown

class Tool: ...

def f(completions: list[Completion], *, per: Share = 1.0, size: int = 3, word: str = "",
      strict: bool = False, words: list[str] = None, ends: tuple[int, float] = (0, 1.0),
      mode: Literal["a", "b"] = "a", late: Unknown = None, tool: Tool = None, file: Path = Path(),
      free=2.0, table: Optional[dict[str, float]] = None, **others):
    return [1.0 for _ in completions]

Share = Annotated[float, Ge(0), Le(1)]

def trl(prompts, completions, *, scale: float = 1.0, solution: int = 3, **columns):
    return [1.0 for _ in completions]

class Scorer:
    def __call__(self, completions, *, per: Share = 1.0):
        return [1.0 for _ in completions]

scorer = Scorer()
"""


@pytest.mark.parametrize(("function", "settings", "place"), [
    ("f", {"per": "0.5"}, "per"),
    ("f", {"per": True}, "per"),
    ("f", {"per": 1.5}, "per"),
    ("f", {"per": -0.5}, "per"),
    ("f", {"per": None}, "per"),
    ("f", {"per": 0.5, "size": 2.5}, "size"),
    ("f", {"size": "2"}, "size"),
    ("f", {"word": 2}, "word"),
    ("f", {"strict": 1}, "strict"),
    ("f", {"strict": "yes"}, "strict"),
    ("f", {"words": "good"}, "words"),
    ("f", {"words": ["good", 3]}, "words.1"),
    ("f", {"ends": [1, 2, 3]}, "ends"),
    ("f", {"mode": "c"}, "mode"),
    ("f", {"table": {"a": "x"}}, "table.a"),
    ("trl", {"scale": "x"}, "scale"),
    ("scorer", {"per": 2}, "per"),
])  # fmt: skip
def test_settings_have_the_types_and_bounds_of_the_annotations(
    function: str, settings: dict[str, Any], place: str, write: Any
) -> None:
    module = write(TYPED)
    name = place.partition(".")[0]
    with raises_error("reward-setting-value", where=f"reward.0.settings.{place}", fix=name):
        reward(f"{module}:{function}", settings=settings)


def test_other_settings_are_passed_as_they_are(write: Any) -> None:
    module = write(TYPED)
    settings = {
        "per": 1, "size": 2, "word": "x", "strict": True, "words": None, "ends": [1, 2],
        "mode": "b", "late": "x", "tool": "x", "file": "x.json", "free": "x", "table": {"a": 1},
        "other": [1],
    }  # fmt: skip
    combined = reward(f"{module}:f", settings=settings)
    assert values(combined, answers(1)) == [1.0]
    function: Any = calls_of(combined).backend
    assert function.settings == settings
    assert values(reward(f"{module}:trl"), [answer("x", solution="y")]) == [1.0]


def test_the_current_folder_hides_nothing_afterwards(write: Any) -> None:
    module = write("def f(completions): return [1.0]")
    reward(f"{module}:f")
    assert sys.path[-1] == str(Path.cwd())
    assert sys.path[0] != str(Path.cwd())
    Path("package").mkdir()
    Path("package/__init__.py").write_text(
        "def f(completions): return [2.0]\nclass A:\n    g = staticmethod(f)\n"
    )
    assert values(reward("package:A.g"), answers(1)) == [2.0]
    del sys.modules["package"]
