"""Functions as rewards: the signatures, what they may give, and everything that may go wrong with other people's code."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.reward.kit import answer, answers, calls_of, error, reward, scores, values
from valence.errors import UserError
from valence.reward import threads
from valence.reward.calls import Calls
from valence.reward.functions import MOST_ABANDONED, Function, columns_of, scores_of
from valence.types import Completion, Score

NUMBER = iter(range(10**6))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module into the current folder under a name of its own, and gives that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def made(source: str) -> str:
        name = f"reward_under_test_{next(NUMBER)}"
        Path(f"{name}.py").write_text(textwrap.dedent(source).lstrip("\n"))
        return name

    return made


# Signatures


def test_a_function_gets_completions_and_settings(write: Any) -> None:
    module = write("""
        def concise(completions, *, scale=1.0, **context):
            assert context == {"other": "x"}
            return [scale * len(c.tokens) + len(c.prompt) + len(c.info["who"]) for c in completions]
    """)
    made = reward(f"{module}:concise", settings={"scale": 2.0, "other": "x"})
    assert values(made, [answer("one two", who="ab"), answer("one", "question", who="")]) == [2 * 2 + 2 + 2, 2 + 8]
    assert made.name == "concise"


def test_a_function_of_trl_gets_columns(write: Any) -> None:
    module = write("""
        def f(prompts, completions, completion_ids, answer, **columns):
            f.seen = dict(locals())
            return [float(len(ids)) for ids in completion_ids]

        def g(completions, ground_truth, **kwargs):
            return [float(c == g) for c, g in zip(completions, ground_truth)]
    """)
    chat = ({"role": "user", "content": "hi"},)
    given = [answer("a b", answer="x", level=1), answer("c", chat, answer="y")]
    assert values(reward(f"{module}:f"), given) == [2.0, 1.0]
    seen = sys.modules[module].f.seen
    assert seen["prompts"] == ["q ", [{"role": "user", "content": "hi"}]]
    assert seen["completions"] == ["a b", [{"role": "assistant", "content": "c"}]]
    assert (seen["completion_ids"], seen["answer"], seen["columns"]) == ([[0, 1], [0]], ["x", "y"], {"level": [1, None]})
    assert values(reward(f"{module}:g"), [answer("4", ground_truth="4"), answer("5", ground_truth="4")]) == [1.0, 0.0]
    assert "reads the column 'ground_truth'" in error(reward(f"{module}:g"), [answer("4", other=1)])


def test_columns_do_not_hand_out_the_messages_themselves() -> None:
    chat = ({"role": "user", "content": "hi"},)
    columns_of([answer("x", chat)])["prompts"][0][0]["content"] = "changed"
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
def test_what_a_function_changes_reaches_neither_the_rows_nor_other_completions(name: str, write: Any) -> None:
    """Two completions of one row, which share its columns, scored twice."""
    row: dict[str, Any] = {"answers": ["4"], "nested": {"deep": [1]}}
    turns: Any = ({"role": "user", "content": "2 + 2?"},)
    tools, weights = ({"name": "clock"},), [1]
    both = [Completion("p", (1,), (0.0,), "4", "eos", index=i, prompt=turns, info=row, tools=tools) for i in range(2)]
    function = reward(f"{write(CHANGES)}:{name}", settings={"weights": weights})
    for _ in range(2):
        assert values(function, both) == [1.0, 1.0]
    assert row == {"answers": ["4"], "nested": {"deep": [1]}}
    assert turns == ({"role": "user", "content": "2 + 2?"},)
    assert tools == ({"name": "clock"},)
    assert weights == [1]


def test_columns_that_cannot_be_copied_are_named(write: Any) -> None:
    lock = Completion("p", (1,), (0.0,), "4", "eos", info={"lock": threading.Lock()})
    given = reward(f"{write('def give(completions): return [1.0] * len(completions)')}:give")
    assert "cannot be copied" in error(given, [lock])


def test_asynchronous_functions_run_together_in_a_loop_that_stays(write: Any) -> None:
    module = write("""
        import asyncio
        loops, running, most = set(), 0, 0

        async def f(completions, **context):
            global running, most
            loops.add(asyncio.get_running_loop())
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
            return [float(c.text[1:]) for c in completions]
    """)
    made = reward(f"{module}:f", batch_size=2, concurrency=3)
    for _ in range(2):
        assert values(made, answers(11)) == [float(i) for i in range(11)]
    assert len(sys.modules[module].loops) == 1
    assert sys.modules[module].most == 3


def test_a_blocking_function_is_called_once_at_a_time(write: Any) -> None:
    module = write("""
        import threading, time
        lock = threading.Lock()

        def f(completions):
            assert lock.acquire(blocking=False)
            time.sleep(0.01)
            lock.release()
            return [float(c.text[1:]) for c in completions]
    """)
    assert values(reward(f"{module}:f", batch_size=2), answers(9)) == [float(i) for i in range(9)]


def test_objects_partials_and_wrapped_functions_are_functions() -> None:
    async def late(completions: list[Completion]) -> list[float]:
        return [1.0] * len(completions)

    class Object:
        def __call__(self, completions: list[Completion]) -> list[float]:
            return [2.0] * len(completions)

    for fn, value in ((lambda c: late(c), 1.0), (Object(), 2.0), (partial(late), 1.0), (partial(Object()), 2.0)):
        function = Function(fn, "f")
        assert values(Calls("f", function, False), answers(2)) == [value] * 2


# What they give


@pytest.mark.parametrize(("given", "said"), [
    ("[1.0]", "gave 1 numbers for 2 answers"),
    ("[1.0, 2.0, 3.0]", "gave 3 numbers for 2 answers"),
    ("None", "is there no `return`?"),
    ("1.0", "gave a float"),
    ("'12'", "gave a str"),
    ("{0: 1.0, 1: 2.0}", "gave a dict"),
    ("(x for x in [1.0, 2.0])", "gave a generator"),
    ("[None, None]", "gave None"),
    ("[float('nan')] * 2", "the score is nan"),
    ("[float('inf')] * 2", "the score is inf"),
    ("[-1e400, -1e400]", "the score is -inf"),
    ("['1.0', '1.0']", "gave '1.0', a str"),
    ("[[1.0], [1.0]]", "gave [1.0], a list"),
    ("[1j, 1j]", "gave 1j, a complex"),
    ("[10**400] * 2", "gave a number that is no float"),
    ("__import__('torch').tensor([[1.0], [1.0]])", "gave [1.0], a list"),
    ("__import__('torch').tensor(1.0)", "gave a float"),
    ("__import__('numpy').array(['1', '1'])", "gave '1', a str"),
])  # fmt: skip
def test_what_is_no_score_is_an_error(given: str, said: str, write: Any) -> None:
    module = write(f"def f(completions):\n    return {given}\n")
    found = scores(reward(f"{module}:f"), answers(2))
    assert [score.value for score in found] == [None, None]
    assert all(said in score.error for score in found)
    assert found[0].error.startswith("f: ")
    assert f"{module}.py:1" in found[0].error or "the score" in found[0].error


def test_one_answer_without_a_score_leaves_the_others_theirs(write: Any) -> None:
    module = write("def f(completions):\n    return [0.5, float('nan'), None, 'x', 3, True]\n")
    assert values(reward(f"{module}:f"), answers(6)) == [0.5, None, None, None, 3.0, 1.0]


@pytest.mark.parametrize("given", [
    numpy.array([0.5, 2.0], numpy.float32), torch.tensor([0.5, 2.0]), [numpy.float32(0.5), torch.tensor(2.0)], (0.5, 2),
    [Score(0.5), Score(numpy.float32(2.0))],
])  # fmt: skip
def test_arrays_and_tensors_are_lists(given: Any) -> None:
    assert [score.value for score in scores_of(given, 2, "f.py:1")] == [0.5, 2.0]


def test_parts_of_a_score_are_kept_and_a_bad_part_fails_it(write: Any) -> None:
    module = write("""
        from valence.types import Score

        def f(completions):
            good, bad = Score(1.0, {"grammar": 0.25}), Score(1.0, {"grammar": float("nan")})
            return [good, bad, Score(None, error="no judge"), Score(None)]
    """)
    found = scores(reward(f"{module}:f"), answers(4))
    assert (found[0].value, found[0].parts) == (1.0, {"f/grammar": 0.25, "f": 1.0})
    assert [score.value for score in found[1:]] == [None] * 3
    assert "part grammar is nan" in found[1].error
    assert found[2].error == "f: no judge"
    assert found[3].error == "f: it gave no score"


# What goes wrong


@pytest.mark.parametrize(("kind", "await_"), [("def", ""), ("async def", "await __import__('asyncio').sleep(0);")])
@pytest.mark.parametrize("raised", ["ValueError('no')", "SystemExit(3)", "KeyboardInterrupt", "GeneratorExit", "StopIteration"])
def test_whatever_is_raised_is_an_error_with_its_line(raised: str, kind: str, await_: str, write: Any) -> None:
    module = write(f"""
        {kind} f(completions):
            print("said")
            {await_}
            helper()

        def helper():
            raise {raised}
    """)
    made = reward(f"{module}:f")
    said = error(made, answers(3))
    name = raised.partition("(")[0]
    assert f"raised {name}" in said or (name == "StopIteration" and "raised RuntimeError" in said)
    assert f"{module}.py:7" in said or name == "StopIteration"
    assert error(made, answers(3)) == said  # and it is called again


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


@pytest.mark.parametrize(("statement", "said"), [
    ("raise BrokenError", "BrokenError"), ("raise AttributeError(Broken())", "AttributeError"),
    ("return [Broken()]", "gave a number that is no float|where a number is wanted"), ("return Broken()", "no repr"),
    ("return BrokenList([1.0])", "no length"), ("return [Score(Broken())]", "where a number is wanted"),
    ("return [Score(1.0, {'x': Broken()})]", "part x is <Broken"), ("return [Score(1.0, {'x': 10**400})]", "part x is 1000"),
    ("return [Score(1.0, {'x': BrokenError()})]", "part x is <BrokenError"),
])  # fmt: skip
def test_objects_that_cannot_be_shown_are_errors(statement: str, said: str, write: Any) -> None:
    module = write(f"""
        from valence.types import Score
{BROKEN}
        def f(completions):
            {statement}
    """)
    assert re.search(said, error(reward(f"{module}:f"), answers(1)))


def test_an_import_whose_error_cannot_be_shown_is_a_mistake(write: Any) -> None:
    module = write(f"""{BROKEN}
        raise BrokenError
    """)
    with pytest.raises(UserError, match="BrokenError"):
        reward(f"{module}:f")


@pytest.mark.parametrize("is_private", [True, False])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_changes_the_working_directory_does_not_move_the_program(
    kind: str, is_private: bool, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_private:  # as where the system gives threads no working directory of their own
        monkeypatch.setattr(threads, "own_working_directory", lambda: None)
    module = write(f"""
        import os
        os.chdir("/")

        {kind} f(completions):
            os.chdir("/usr")
            return [1.0] * len(completions)
    """)
    made = reward(f"{module}:f")
    assert os.getcwd() == str(tmp_path)
    assert values(made, answers(2)) == [1.0, 1.0]
    assert os.getcwd() == str(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a working directory of their own on Linux alone")
def test_a_call_that_is_under_way_or_given_up_does_not_move_the_program(write: Any, tmp_path: Path) -> None:
    """A run writes its checkpoints meanwhile, and afterwards."""
    with ThreadPoolExecutor(1) as thread:
        if not thread.submit(threads.own_working_directory).result():
            pytest.skip("this system does not allow it")
    module = write("""
        import os, threading
        moved, go_on = threading.Event(), threading.Event()

        def f(completions):
            os.chdir("/usr")
            moved.set()
            go_on.wait(30)
            os.chdir("/")
            moved.set()
            return [1.0]
    """)
    made = reward(f"{module}:f", timeout=0.3)
    assert values(made, answers(1)) == [None]
    loaded = sys.modules[module]
    assert loaded.moved.is_set()
    assert os.getcwd() == str(tmp_path)
    loaded.moved.clear()
    loaded.go_on.set()
    assert loaded.moved.wait(30)
    assert os.getcwd() == str(tmp_path)


def test_the_program_may_change_its_working_directory(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write("""
        import os
        seen = []

        def f(completions):
            seen.append(os.getcwd())
            return [1.0]
    """)
    made = reward(f"{module}:f")
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        monkeypatch.chdir(folder)
        assert values(made, answers(1)) == [1.0]
    assert sys.modules[module].seen == [str(tmp_path), str(tmp_path / "below")]


def test_an_asynchronous_function_that_cancels_itself_is_an_error(write: Any) -> None:
    module = write("""
        import asyncio

        async def f(completions):
            raise asyncio.CancelledError
    """)
    assert "raised CancelledError" in error(reward(f"{module}:f"), answers(1))


@pytest.mark.parametrize(("kind", "wait", "said"), [
    ("def", "import time; time.sleep(3)", "the call was given up"),
    ("async def", "import asyncio; await asyncio.sleep(3)", "the call was given up"),
    ("async def", "import time; time.sleep(3)", "it blocks its event loop"),
])  # fmt: skip
def test_a_call_that_hangs_is_given_up_and_the_next_one_made(kind: str, wait: str, said: str, write: Any) -> None:
    module = write(f"""
        {kind} f(completions):
            if completions[0].text == "a0":
                {wait}
            return [1.0] * len(completions)
    """)
    made = reward(f"{module}:f", timeout=0.5, batch_size=1)
    began = time.monotonic()
    found = scores(made, answers(2)[:1])
    assert time.monotonic() - began < 2.8
    assert found[0].value is None
    assert "no answer within 0.5 s" in found[0].error
    assert f"{module}.py:1" in found[0].error
    assert said in found[0].error
    assert values(made, answers(2)[1:]) == [1.0]


def test_a_function_that_never_returns_is_not_called_without_end(write: Any) -> None:
    module = write("""
        import threading
        over, called = threading.Event(), 0

        def f(completions):
            global called
            called += 1
            over.wait(30)
            return [1.0]
    """)
    before = threading.active_count()
    made = reward(f"{module}:f", timeout=0.02, batch_size=1)
    found = scores(made, answers(MOST_ABANDONED + 5))
    assert all(score.value is None for score in found)
    assert sys.modules[module].called == MOST_ABANDONED
    assert "earlier calls never came back" in found[-1].error
    sys.modules[module].over.set()
    until = time.monotonic() + 5
    while threading.active_count() > before + 1 and time.monotonic() < until:
        time.sleep(0.01)
    calls_of(made).backend.seconds = 30.0
    assert values(made, answers(1)) == [1.0]


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
        made = reward(f"{module}:f", settings={"kind": kind}, retries=3)
        pauses: list[float] = []

        async def sleep(seconds: float, pauses: list[float] = pauses) -> None:
            pauses.append(seconds)

        calls_of(made).sleep = sleep
        assert values(made, answers(1)) == [value]
        assert len(sys.modules[module].called) == number
        assert len(pauses) == number - 1
        sys.modules[module].called.clear()


def test_time_outs_of_a_function_are_tried_again_while_there_is_time(write: Any) -> None:
    module = write("""
        import asyncio

        called = []

        async def hangs(completions):
            called.append(1)
            await asyncio.sleep(60)

        def raises(completions):
            called.append(1)
            raise TimeoutError("its own")
    """)
    for name, tries in (("hangs", 2), ("raises", 4)):
        timeout, clock = (0.1 if name == "hangs" else 60.0), count()
        made = reward(f"{module}:{name}", timeout=timeout, retries=3)
        calls_of(made).clock = lambda clock=clock: 0.1 * next(clock)
        calls_of(made).sleep = lambda _: asyncio.sleep(0.001)
        assert f"({tries} tries)" in error(made, answers(1))
        assert len(sys.modules[module].called) == tries
        sys.modules[module].called.clear()


def test_who_takes_completions_for_texts_is_told(write: Any) -> None:
    module = write("def f(completions, **kwargs):\n    return [float(c.strip() == 'x') for c in completions]\n")
    assert "a parameter `prompts` asks for TRL's lists" in error(reward(f"{module}:f"), answers(1))


# Finding them


@pytest.mark.parametrize(("target", "source", "said"), [
    ("@:nothing", "def f(completions): ...", "@.py has no 'nothing'"),
    ("@:concize", "def concise(completions): ...", "did you mean concise"),
    ("@:Judge", "class Judge: ...", "this is a class, not a function"),
    ("@:limit", "limit = 3", "this is a int, not a function"),
    ("@:f", "x = 1\nimport no_such_library\n", "at @.py:2: ModuleNotFoundError: No module named 'no_such_library'"),
    ("@:f", "x = 1\nimport no_such_library\n", "install it in this environment"),
    ("@:f", "x = 1\ndef f(:\n", "at @.py:2: SyntaxError"),
    ("@:f", "def g():\n    raise ValueError('no')\n\ng()\n", "at @.py:2: ValueError: no"),
    ("@:f", "raise SystemExit(2)", "at @.py:1: SystemExit"),
    ("no_such_package.rewards:f", "", "there is no module 'no_such_package'"),
    ("@.rewards:f", "", "there is no module '@.rewards'"),
    ("@:f", "def f(): ...", "nothing gives it completions"),
    ("@:f", "def f(texts, other): ...", "nothing gives it other"),
    ("@.py:f", "", "name a function in it as @:function"),
    ("@.f", "def f(completions): ...", "write @:f for a function"),
])  # fmt: skip
def test_what_cannot_be_called_is_a_mistake(target: str, source: str, said: str, write: Any) -> None:
    module = write(source)
    with pytest.raises(UserError) as caught:
        reward(target.replace("@", module))
    assert said.replace("@", module) in str(caught.value)
    assert "reward.0.reward" in str(caught.value)


def test_settings_that_a_function_does_not_take_are_refused(write: Any) -> None:
    module = write("def f(completions, scale=1): ...")
    with pytest.raises(UserError, match=r"reward.0.settings: .* has no parameter 'sale'\n.*completions, scale"):
        reward(f"{module}:f", settings={"sale": 1})


def test_the_current_folder_hides_nothing_afterwards(write: Any) -> None:
    module = write("def f(completions): return [1.0]")
    reward(f"{module}:f")
    assert sys.path[-1] == str(Path.cwd())
    assert sys.path[0] != str(Path.cwd())
    Path("package").mkdir()
    Path("package/__init__.py").write_text("def f(completions): return [2.0]\nclass A:\n    g = staticmethod(f)\n")
    assert values(reward("package:A.g"), answers(1)) == [2.0]
    del sys.modules["package"]
