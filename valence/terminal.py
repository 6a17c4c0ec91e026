"""The only module that prints.

Text from rows, files, settings, models and rewards is untrusted: it is escaped here.

- ``Terminal`` is the console of every command. Strings are never parsed as Rich markup, and control
  characters are escaped in all output, also inside tables. Colors come from ``style=`` and
  ``rich.text.Text``.
- ``print_message`` prints one message on any console, also on a plain ``rich.console.Console``.
- ``write_line`` and ``json_line`` are for output that programs read.
- ``ResilientStream`` lets a run continue when its standard output cannot be written.
"""

from __future__ import annotations

import atexit
import errno
import json
import os
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Span, Text

MAX_WIDTH = 2000
"""Of a line of a table in a pipe or a file, in characters."""

UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that are escaped: controls, format characters (bidirectional marks, zero-width
characters), surrogates, line and paragraph separators.
"""


def escape_control(text: str) -> str:
    """Return ``text`` with control characters and invisible characters made visible.

    ASCII controls become their pictures (``␛``), other characters their code (``<U+202E>``). Tabs
    and newlines are unchanged.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(character: str) -> str:
    code = ord(character)
    if character in "\t\n":
        return character
    if code < 32:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    return f"<U+{code:04X}>" if unicodedata.category(character) in UNPRINTABLE else character


def escape_text(text: Text) -> Text:
    """Return the styled text with ``escape_control`` applied and its styles kept in place."""
    plain = text.plain
    if plain.isprintable() or (escaped := escape_control(plain)) == plain:
        return text
    offsets = list(accumulate((len(escape_control(c)) for c in plain), initial=0))
    copy = text.blank_copy(escaped)
    last = len(plain)
    copy.spans = [
        Span(offsets[min(s.start, last)], offsets[min(s.end, last)], s.style) for s in text.spans
    ]
    return copy


def json_line(value: Any) -> str:
    """``value`` as JSON on one line, with ``\\u`` escapes for characters that ``escape_control``
    would escape.
    """
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if line.isprintable():
        return line
    hidden = {c for c in line if unicodedata.category(c) in UNPRINTABLE}
    return line.translate(
        {ord(c): json.dumps(c)[1:-1] if ord(c) != 0x7F else "\\u007f" for c in hidden}
    )


# ---------------------------------------------------------------- streams that cannot be written

stream_errors: dict[str, str] = {}
"""Why a stream could not be written, by the name of the stream."""


def output_errors() -> tuple[str, ...]:
    """Messages about streams that could not be written so far."""
    return tuple(stream_errors.values())


class ResilientStream:
    """A text stream that tolerates write errors.

    Characters that its encoding lacks are written as backslash escapes. After an ``OSError`` (disk
    full, device error, closed pipe) the text is lost, the error is in ``output_errors()``, and
    later writes are tried again.
    """

    def __init__(self, stream: IO[str], name: str = "") -> None:
        self._stream = stream
        self._name = name or str(getattr(stream, "name", "output"))

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            encoding = getattr(self._stream, "encoding", None) or "ascii"
            with self._tolerating():
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._tolerating():
            self._stream.flush()

    @contextmanager
    def _tolerating(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        if self._name not in stream_errors:
            # otherwise the interpreter exits with status 120
            atexit.register(self.discard_unwritten)
        stream_errors.setdefault(
            self._name, f"{self._name} cannot be written ({reason}); output is lost"
        )
        if error.errno == errno.EPIPE:
            discard(self._stream)

    def discard_unwritten(self) -> None:
        """Drop the content of the buffer of a stream that cannot be written."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def resilient(stream: IO[str]) -> IO[str]:
    """``stream`` as a ``ResilientStream``."""
    if isinstance(stream, ResilientStream):
        return cast(IO[str], stream)
    known = {id(sys.stdout): "standard output", id(sys.stderr): "standard error"}
    return cast(IO[str], ResilientStream(stream, known.get(id(stream), "")))


def discard(file: IO[str]) -> None:
    """Redirect a file's descriptor, if it has one, and the content of its buffer to the null
    device.
    """
    with suppress(OSError, ValueError, AttributeError):
        number = file.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, number)
        os.close(null)


# ---------------------------------------------------------------- printing for people


class Terminal(Console):
    """A console for untrusted text: no markup, control characters escaped, write errors
    tolerated.
    """

    plain = False
    """Draw no progress bars, because other output goes to the same terminal."""

    def __init__(self, *, warnings_only: bool = False, **settings: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **settings})
        self.warnings_only = warnings_only
        """Print nothing but warnings, and those on standard error."""

    def print(self, *objects: Any, **options: Any) -> None:
        if not self.warnings_only:
            super().print(*objects, **options)

    @property
    def file(self) -> IO[str]:
        return resilient(super().file)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    @property
    def encoding(self) -> str:
        return (getattr(self.file, "encoding", None) or "utf-8").lower()

    def render_str(self, text: str, **settings: Any) -> Text:  # type: ignore[override]
        return super().render_str(escape_control(text), **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Render with escaped text; control codes of Rich are not escaped."""
        escaped = escape_text(renderable) if isinstance(renderable, Text) else renderable
        for segment in super().render(escaped, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(escape_control(segment.text), segment.style)


def print_message(console: Console, message: str, style: str = "") -> None:
    """Print one message without wrapping; newlines start a new line, other controls are escaped."""
    console.print(Text(escape_control(message), style), soft_wrap=True)


def print_table(console: Console, table: Table) -> None:
    """Print a table; in a pipe or a file, cells are not wrapped unless ``COLUMNS`` is set."""
    wide = console
    if not console.is_terminal and "COLUMNS" not in os.environ:
        needed = Measurement.get(console, console.options.update(width=MAX_WIDTH), table).maximum
        wide = Terminal(
            warnings_only=prints_only_warnings(console),
            file=console.file,
            width=max(console.width, needed),
        )
    wide.print(table)


def only_warnings(console: Console) -> Terminal:
    """A console for the warnings alone, on standard error; silent if the other one is."""
    return Terminal(warnings_only=True, quiet=console.quiet)


def prints_only_warnings(console: Console) -> bool:
    return isinstance(console, Terminal) and console.warnings_only


def print_warning(console: Console, message: str) -> None:
    """Print a warning, on standard error if the console prints only warnings.

    A quiet console, such as that of ranks other than 0, hides it.
    """
    if prints_only_warnings(console):
        console = Terminal(stderr=True, quiet=console.quiet)
    print_message(console, message, "yellow")


# ---------------------------------------------------------------- printing for programs


def write_line(line: str, file: IO[str] | None = None) -> None:
    """Print a line at once.

    A closed pipe or a full disk is not an error.
    """
    target = file or sys.stdout
    if target is not None:  # pyright: ignore[reportUnnecessaryComparison]  # `>&-`
        print(line, file=resilient(target), flush=True)


@contextmanager
def safe_streams() -> Iterator[None]:
    """Inside the block, write errors do not end the program, and warnings are escaped.

    At the end, a line on standard error names the streams that could not be written.
    """
    before, earlier_errors = warnings.formatwarning, set(output_errors())
    out, err = ((s and resilient(s)) for s in (sys.stdout, sys.stderr))
    warnings.formatwarning = _format_warning
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                yield
            finally:
                for message in output_errors():
                    if message not in earlier_errors and os.strerror(errno.EPIPE) not in message:
                        write_line(f"valence: {message}", sys.stderr)
    finally:
        warnings.formatwarning = before


def print_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """A ``sys.excepthook`` that escapes messages, which may quote untrusted text."""
    write_line(
        escape_control("".join(traceback.format_exception(kind, error, trace)).rstrip("\n")),
        sys.stderr,
    )


def _format_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    is_from_valence = category is UserWarning and Path(filename).is_relative_to(
        Path(__file__).parent
    )
    text = (
        f"valence: warning: {message}"
        if is_from_valence
        else f"{filename}:{lineno}: {category.__name__}: {message}"
    )
    return f"{escape_control(text)}\n"
