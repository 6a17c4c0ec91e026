"""Mutants of a source file: small changes of its code, each of which a test should notice.

A mutant replaces one segment of the text. All other characters stay as they are, so that line
numbers in tracebacks are those of the original. Texts, annotations, decorators, default values,
assertions and the arguments of exceptions are never changed.
"""

from __future__ import annotations

import ast
import io
import tokenize
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

COMPARISONS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "in": "not in", "not in": "in", "is": "is not", "is not": "is",
}  # fmt: skip
NEGATED = (ast.Eq, ast.NotEq, ast.In, ast.NotIn, ast.Is, ast.IsNot)
"""Comparisons whose swap is their negation."""
ARITHMETIC = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "+=": "-=",
    "-=": "+=",
    "*=": "/=",
    "/=": "*=",
}
EXTREMES = (
    "min max",
    "minimum maximum",
    "amin amax",
    "argmin argmax",
    "any all",
    "floor ceil",
    "clamp_min clamp_max",
)
EXTREME = {a: b for pair in EXTREMES for a, b in (pair.split(), reversed(pair.split()))}
METHODS = frozenset([
    "abs", "bool", "clamp", "clamp_min", "clamp_max", "clone", "copy", "cumsum", "detach",
    "double", "exp", "expm1", "flip", "float", "isnan", "log", "log1p", "logical_not", "long",
    "lower", "masked_fill", "nan_to_num", "neg", "relu", "round", "sigmoid", "sqrt", "square",
    "strip",
])  # fmt: skip
FUNCTIONS = frozenset([
    "abs", "ceil", "exp", "expm1", "float", "floor", "log", "log1p", "logsigmoid", "relu",
    "reversed", "round", "sigmoid", "sorted", "sqrt", "square",
])  # fmt: skip
"""Functions of one argument that can be dropped, alone or as attributes of a module."""
SYMMETRIC = frozenset([
    "allclose", "equal", "gcd", "isclose", "isinstance", "issubclass", "logaddexp", "max",
    "maximum", "min", "minimum", "zip",
])  # fmt: skip
"""Calls that do not depend on the order of their arguments, or fail at once in another order."""
MESSAGES = frozenset(["print", "print_message", "debug", "info", "log", "warning"])
"""Calls that show texts."""
PRESENTED = frozenset([
    "daemon", "description", "device", "digits", "doc", "encoding", "errors", "fix", "flush",
    "help", "indent", "maxsize", "mininterval", "name", "ndigits", "stacklevel", "strict",
    "timeout", "title", "what", "where", "width",
])  # fmt: skip
"""Keyword arguments that choose a text, a format, a time limit or another device."""
MODULES = frozenset(["math", "torch", "functional", "np", "numpy", "F"])
LARGE = 10
"""Constants from here on are limits and sizes, where one more makes no difference."""


@dataclass(frozen=True)
class Mutant:
    """One change: characters ``start`` to ``end`` of ``file`` become ``text``.

    before, after: the changed expression, for people. keys: of the entries of tables that it is in.
    """

    file: str
    function: str
    operator: str
    number: int
    line: int
    start: int
    end: int
    text: str
    before: str
    after: str
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.file}::{self.function}::{self.operator}#{self.number}"

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def find_mutants(source: str, file: str) -> list[Mutant]:
    """All mutants of a source text, in the order of their places."""
    finder = _Finder(source)
    finder.visit_all(ast.parse(source).body, ())
    numbers: Counter[tuple[str, str]] = Counter()
    mutants: list[Mutant] = []
    for change in sorted(
        finder.changes, key=lambda change: (change.node.lineno, change.node.col_offset)
    ):
        numbers[change.function, change.operator] += 1
        node_start, node_end = finder.text.span(change.node)
        before = source[node_start:node_end]
        after = source[node_start : change.start] + change.new + source[change.end : node_end]
        line = finder.text.line(change.start)
        mutant = Mutant(
            file=file,
            function=change.function,
            operator=change.operator,
            number=numbers[change.function, change.operator],
            line=line,
            start=change.start,
            end=change.end,
            text=change.new,
            before=before,
            after=after,
            keys=change.keys,
        )
        mutants.append(mutant)
    return mutants


@dataclass(frozen=True)
class _Change:
    node: ast.expr | ast.stmt
    function: str
    operator: str
    start: int
    end: int
    new: str
    keys: tuple[str, ...]


class Text:
    """Offsets of syntax nodes and tokens in a source text."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        ignored = (
            tokenize.COMMENT,
            tokenize.NL,
            tokenize.NEWLINE,
            tokenize.INDENT,
            tokenize.DEDENT,
        )
        self.tokens = [
            (self._starts[token.start[0] - 1] + token.start[1], token.string)
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in ignored
        ]

    def offset(self, line: int, column: int) -> int:
        """Characters before a place that ``ast`` gives (column in bytes of UTF-8)."""
        text = self._lines[line - 1]
        return self._starts[line - 1] + len(text.encode()[:column].decode())

    def line(self, offset: int) -> int:
        """From 1."""
        return bisect_right(self._starts, offset)

    def span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(
            node.end_lineno, node.end_col_offset
        )

    def of(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        start, end = self.span(node)
        return self.source[start:end]

    def tokens_between(self, start: int, end: int) -> list[tuple[int, str]]:
        first = bisect_left(self.tokens, (start, ""))
        return self.tokens[first : bisect_left(self.tokens, (end, ""))]


class _Finder:
    def __init__(self, source: str) -> None:
        self.text = Text(source)
        self.changes: list[_Change] = []
        self._names: list[str] = []
        self._keys: list[str] = []

    def visit_all(self, statements: list[ast.stmt], parents: tuple[ast.AST, ...]) -> None:
        for statement in statements:
            self._visit(statement, parents)

    def _visit(self, node: ast.AST, parents: tuple[ast.AST, ...]) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._visit_definition(node, (*parents, node))
                return
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                self.visit_all(node.orelse, parents)
                return
            case ast.AnnAssign():
                if node.value is not None and not (
                    parents and isinstance(parents[-1], ast.ClassDef)
                ):
                    self._visit(node.value, (*parents, node))
                return
            case ast.Lambda():
                self._visit(node.body, (*parents, node))
                return
            case ast.Expr(value=ast.Constant()):
                return
            case ast.Dict():
                self._visit_entries(node, (*parents, node))
                return
            case _ if _is_left_alone(node):
                return
            case _:
                self._mutate(node, parents)
        for child in ast.iter_child_nodes(node):
            self._visit(child, (*parents, node))

    def _visit_entries(self, node: ast.Dict, parents: tuple[ast.AST, ...]) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            text = (
                key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None
            )
            if key is not None:
                self._visit(key, parents)
            self._keys += [text] if text else []
            self._visit(value, parents)
            del self._keys[len(self._keys) - bool(text) :]

    def _visit_definition(
        self,
        node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
        parents: tuple[ast.AST, ...],
    ) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self._names.append(node.name)
        num_changes = len(self.changes)
        self.visit_all(node.body, parents)
        if len(self.changes) == num_changes and not isinstance(node, ast.ClassDef):
            returns = [n for n in node.body if isinstance(n, ast.Return) and not _is_none(n.value)]
            if returns and returns[-1].value is not None:
                self._add(returns[-1], "return", *self.text.span(returns[-1].value), "None")
        self._names.pop()

    def _mutate(self, node: ast.AST, parents: tuple[ast.AST, ...]) -> None:
        match node:
            case ast.Compare():
                self._swap_comparisons(node)
            case ast.BinOp() | ast.AugAssign():
                self._swap_arithmetic(node)
            case ast.BoolOp():
                self._swap_boolean(node)
            case ast.UnaryOp():
                self._drop_unary(node, parents)
            case ast.Constant():
                self._increase_constant(node, parents)
            case ast.Call():
                self._change_call(node)
            case ast.If() | ast.While() | ast.IfExp():
                self._negate(node.test)
            case ast.comprehension():
                for test in node.ifs:
                    self._negate(test)
            case _:
                pass
        if isinstance(node, ast.AugAssign) or (
            isinstance(node, ast.Expr) and _is_effect(node.value)
        ):
            self._add(node, "deletion", *self.text.span(node), "pass")

    def _add(
        self, node: ast.expr | ast.stmt, operator: str, start: int, end: int, new: str
    ) -> None:
        function = ".".join(self._names) or "module"
        self.changes.append(_Change(node, function, operator, start, end, new, tuple(self._keys)))

    def _swap_comparisons(self, node: ast.Compare) -> None:
        for left, right in pairwise([node.left, *node.comparators]):
            tokens = self.text.tokens_between(self.text.span(left)[1], self.text.span(right)[0])
            words = [(at, token) for at, token in tokens if token not in "()"]
            word = " ".join(token for _, token in words)
            if word in COMPARISONS:
                at, last = words[-1]
                self._add(node, "comparison", words[0][0], at + len(last), COMPARISONS[word])

    def _swap_arithmetic(self, node: ast.BinOp | ast.AugAssign) -> None:
        if isinstance(node, ast.BinOp):
            left, right = node.left, node.right
        else:
            left, right = node.target, node.value
        if _is_text(left) or _is_text(right):
            return
        between = self.text.tokens_between(self.text.span(left)[1], self.text.span(right)[0])
        for at, token in between:
            if token in ARITHMETIC:
                self._add(node, "arithmetic", at, at + len(token), ARITHMETIC[token])

    def _swap_boolean(self, node: ast.BoolOp) -> None:
        for left, right in pairwise(node.values):
            for at, token in self.text.tokens_between(
                self.text.span(left)[1], self.text.span(right)[0]
            ):
                if token in ("and", "or"):
                    self._add(
                        node, "boolean", at, at + len(token), "or" if token == "and" else "and"
                    )

    def _drop_unary(self, node: ast.UnaryOp, parents: tuple[ast.AST, ...]) -> None:
        start, end = self.text.span(node)
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            if (
                isinstance(parents[-1] if parents else None, ast.keyword)
                and _keyword(parents[-1]) == "dim"
            ):
                return  # the last dimension is often also the second
            operator = {"Not": "not", "USub": "negative", "Invert": "not"}[type(node.op).__name__]
            (_, first), (following, _), *_ = self.text.tokens_between(start, end)
            assert first in ("not", "-", "~")
            self._add(node, operator, start, following, "")

    def _increase_constant(self, node: ast.Constant, parents: tuple[ast.AST, ...]) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) >= LARGE:
            return
        self._add(node, "constant", *self.text.span(node), repr(value + 1))

    def _negate(self, test: ast.expr) -> None:
        """Not where dropping a ``not`` or swapping a comparison does the same."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return
        if (
            isinstance(test, ast.Compare)
            and len(test.ops) == 1
            and isinstance(test.ops[0], NEGATED)
        ):
            return
        if isinstance(test, ast.Constant) or _is_left_alone(test):
            return
        self._add(test, "condition", *self.text.span(test), f"(not ({self.text.of(test)}))")

    def _change_call(self, node: ast.Call) -> None:
        name = callee(node)
        self._swap_extreme(node, name)
        self._drop_call(node, name)
        self._drop_keywords(node)
        if len(node.args) >= 2 and name not in SYMMETRIC:
            first, second = node.args[:2]
            texts = self.text.of(first), self.text.of(second)
            starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not starred and texts[0] != texts[1] and not isinstance(first, ast.GeneratorExp):
                (start, inner), (outer, end) = self.text.span(first), self.text.span(second)
                swapped = f"{texts[1]}{self.text.source[inner:outer]}{texts[0]}"
                self._add(node, "arguments", start, end, swapped)

    def _swap_extreme(self, node: ast.Call, name: str) -> None:
        if name in EXTREME:
            end = self.text.span(node.func)[1]
            self._add(node, "extreme", end - len(name), end, EXTREME[name])
        for keyword in node.keywords:
            if (
                keyword.arg in ("min", "max")
                and name == "clamp"
                and len(node.keywords) == 1
                and not node.args
            ):
                start = self.text.span(keyword)[0]
                self._add(node, "extreme", start, start + 3, EXTREME[keyword.arg])

    def _drop_call(self, node: ast.Call, name: str) -> None:
        start, end = self.text.span(node)
        func = node.func
        of_module = isinstance(func, ast.Attribute) and _last_name(func.value) in MODULES
        if isinstance(func, ast.Attribute) and not of_module:
            if name in METHODS:
                receiver = self.text.span(func.value)[1]
                dot = next(
                    at for at, token in self.text.tokens_between(receiver, end) if token == "."
                )
                self._add(node, "call", dot, end, "")
        elif (
            name in FUNCTIONS
            and len(node.args) == 1
            and not isinstance(node.args[0], ast.Starred | ast.GeneratorExp)
        ):
            self._add(node, "call", start, end, f"({self.text.of(node.args[0])})")

    def _drop_keywords(self, node: ast.Call) -> None:
        """With the comma before it, or after it where it is the first argument."""
        arguments = sorted([*node.args, *node.keywords], key=self.text.span)
        for place, argument in enumerate(arguments):
            if not isinstance(argument, ast.keyword) or argument.arg in {*PRESENTED, None}:
                continue
            if isinstance(argument.value, ast.Constant | ast.JoinedStr) and _is_text(
                argument.value
            ):
                continue
            start, end = self.text.span(argument)
            stop = self.text.span(node)[1]
            if place:
                start = self._after(arguments[place - 1], start)
            end = self._closing(end, stop)
            if not place and len(arguments) > 1:
                end = self.text.span(arguments[1])[0]
            self._add(node, "keyword", start, end, "")

    def _after(self, argument: ast.expr | ast.keyword, stop: int) -> int:
        """Where the comma behind an argument is."""
        commas = [
            at
            for at, token in self.text.tokens_between(self.text.span(argument)[1], stop)
            if token == ","
        ]
        return commas[-1]

    def _closing(self, end: int, stop: int) -> int:
        """``end``, behind parentheses that belong to the argument that ends there."""
        for at, token in self.text.tokens_between(end, stop - 1):
            if token != ")":
                break
            end = at + 1
        return end


def callee(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    return _last_name(node.func)


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return node.attr
        case _:
            return ""


def _keyword(node: ast.AST) -> str | None:
    return node.arg if isinstance(node, ast.keyword) else None


def _is_none(node: ast.expr | None) -> bool:
    return node is None or (isinstance(node, ast.Constant) and node.value is None)


def _is_text(node: ast.expr) -> bool:
    match node:
        case ast.JoinedStr() | ast.List() | ast.Tuple() | ast.ListComp():
            return True
        case ast.Constant():
            return isinstance(node.value, str | bytes)
        case ast.BinOp():
            return _is_text(node.left) or _is_text(node.right)
        case _:
            return False


def _is_effect(node: ast.expr) -> bool:
    return isinstance(node, ast.Call | ast.Await) and not _is_left_alone(node)


def _is_left_alone(node: ast.AST) -> bool:
    """What is for people, type checkers or other platforms."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Assign():
            return any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            )
        case ast.Call():
            name = callee(node)
            return (
                name in MESSAGES
                or name.endswith(("Error", "Exception", "Warning"))
                or name in ("cast", "TypeVar")
            )
        case ast.Subscript():
            return _last_name(node.value) == "Literal"
        case ast.keyword():
            return node.arg in PRESENTED
        case ast.If():
            return isinstance(node.test, ast.Compare) and _last_name(node.test.left) == "__name__"
        case _:
            return any(_last_name(n) == "platform" for n in _tests(node))


def _tests(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Compare):
        yield node.left
