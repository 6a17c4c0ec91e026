"""Rows of an evaluation with their text, as HTML that opens to the whole of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from valence.reports.console import esc
from valence.reports.formatting import number, visible
from valence.reports.html import folded
from valence.reports.rows import (
    SIDES,
    Json,
    Listed,
    is_own,
    is_pair,
    listed,
    moved,
    per_token,
    value,
    verdict,
)
from valence.reports.stats import finite

SHOWN = 20
"""Rows of one list."""

AT_ONCE = 6
"""Rows that are seen as soon as a list is open."""

SNIPPET, ASKED, PROMPT = 240, 150, 400
"""Characters of an answer and of a prompt that are shown of a row that is closed, and of a prompt
above answers to it.
"""

WHOLE = 8_000
"""Most characters of one text."""

ROOM = 1_200_000
"""Most bytes of texts that open on one page, so that it stays one that a telephone loads."""


@dataclass
class Room:
    """How many bytes of texts the page may still take."""

    left: int = ROOM

    def whole(self, text: str, where: str) -> str:
        """The text in a box, or as much of it as there is room for, with where the rest is."""
        most = min(WHOLE, max(0, self.left))
        shown = esc(text[:most])
        self.left -= len(shown.encode("utf-8"))
        rest = len(text) - most
        more = (
            f'<p class="dim">and {number(rest)} more characters in {esc(where)}</p>'
            if rest > 0
            else ""
        )
        return f'<pre dir="auto">{shown}</pre>{more}' if shown or not rest else more


def cut(text: str, most: int) -> str:
    """The beginning of a text on one line, to the end of a word."""
    line = " ".join(visible(text).split())
    return line if len(line) <= most else f"{line[:most].rpartition(' ')[0] or line[:most]} …"


def both_ends(text: str, most: int) -> str:
    """The beginning and the end of a text on one line: a prompt ends with what is asked."""
    line = " ".join(visible(text).split())
    if len(line) <= most:
        return line
    return (
        f"{line[: most // 3].rpartition(' ')[0] or line[: most // 3]} … "
        f"{line[-most * 2 // 3 :].partition(' ')[2]}"
    )


def row_lists(evaluation: Json, before: Json | None, room: Room, where: str, key: str) -> str:
    """All lists of an evaluation, the first one open. before: the first evaluation, if it is
    another. where: the file.
    """
    lists = listed(evaluation["rows"], before["rows"] if before else None, SHOWN)
    earlier = (
        {row["id"]: row for row in before["rows"] if isinstance(row.get("id"), str)}
        if before
        else {}
    )
    return "".join(
        folded(
            f"{each.title} ({len(each.rows)})",
            _rows(each, earlier, room, where, f"{key} {each.title}"),
            key=f"{key} {each.title}",
            opened=i == 0,
        )
        for i, each in enumerate(lists)
    )


def _rows(found: Listed, earlier: Mapping[str, Json], room: Room, where: str, key: str) -> str:
    shown = [
        _row(row, each, earlier.get(str(row.get("id"))), found, room, where)
        for row, each in found.rows
    ]
    return f'<p class="dim">{esc(found.note)}</p>{_at_once(shown, key)}'


def _at_once(shown: Sequence[str], key: str) -> str:
    """The first of some pieces of HTML, and what opens to the others."""
    rest = shown[AT_ONCE:]
    return "".join(shown[:AT_ONCE]) + (
        folded(f"{len(rest)} more", "".join(rest), key=f"{key} more") if rest else ""
    )


def _number(value: float) -> str:
    """Three digits, which fit the column."""
    return number(value) if abs(value) >= 1000 else f"{value + 0.0:.3g}"


def _row(
    row: Json, listed_for: float, before: Json | None, found: Listed, room: Room, where: str
) -> str:
    sign = "+" if found.title == "Most moved" and listed_for > 0 else ""
    prompt = (
        f'<span class="ask" dir="auto">{esc(both_ends(_text(row, "prompt"), ASKED))}</span>'
        if "prompt" in row
        else ""
    )
    said = "".join(
        f'<span class="said" dir="auto">{tag}{esc(cut(_text(row, part), SNIPPET))}</span>'
        for part, tag in _answers(row)
    )
    lines = f'<span class="meta">{_meta(row, before)}</span>{prompt}{said}'
    whole = "".join(
        f"<div><h4>{esc(part.replace('_', ' '))}{_told(row, part)}</h4>"
        f"{room.whole(_text(row, part), where)}</div>"
        for part in ("prompt", *(part for part, _ in _answers(row)))
        if part in row
    )
    return (
        f'<details class="row"><summary><span class="num">{sign}{esc(_number(listed_for))}</span>'
        f'<span class="lines">{lines}</span></summary><div class="whole '
        f'two">{whole}</div></details>'
    )


def _text(row: Json, part: str) -> str:
    held = row.get(part)
    return held if isinstance(held, str) else "" if held is None else str(held)


def _answers(row: Json) -> list[tuple[str, str]]:
    """The keys of the row's answers, each with a tag before it."""
    if is_pair(row):
        return [
            (name, f'<b class="tag {way}">{name}</b>')
            for name, way in (("chosen", "up"), ("rejected", "down"))
        ]
    if "completion" in row:
        return [("completion", "")]
    names = [name for name in row if name.startswith("completion_") and name[11:].isdecimal()]
    return [(name, f'<b class="tag none">{esc(name[11:])}</b>') for name in names]


def _told(row: Json, part: str) -> str:
    """The numbers of one of several answers."""
    side = {"chosen": "_chosen", "rejected": "_rejected"}.get(part, part.removeprefix("completion"))
    if part in ("prompt", "completion") or not side:
        return ""
    return "".join(f" · {esc(said)}" for said in _numbers(row, side))


def _numbers(row: Json, side: str = "") -> list[str]:
    said: list[str] = []
    if (reward := value(row, side)) is not None:
        said.append(f"reward {_number(reward)}")
    if finite(tokens := row.get(f"tokens{side}")):
        said.append(f"{number(tokens)} tokens")
    if (each := per_token(row, side)) is not None:
        said.append(f"{_number(each)} nats a token")
    return said


def _meta(row: Json, before: Json | None) -> str:
    """Verdict, numbers and origin of a row."""
    tag = ""
    if (label := verdict(row)) is not None:
        tag = f'<b class="tag {"up" if label else "down"}">thumbs {"up" if label else "down"}</b>'
    said = _numbers(row)
    if is_pair(row):
        known = ((name, value(row, f"_{name}")) for name in SIDES)
        said = [f"{name} {_number(reward)}" for name, reward in known if reward is not None]
    if (
        before is not None
        and not is_pair(row)
        and (old := value(before)) is not None
        and not is_own(row)
    ):
        said.insert(1, f"was {_number(old)}")
    if "target" in row:
        given = row["target"] if isinstance(row["target"], list) else [row["target"]]
        said.append("target " + ", ".join("none" if each is None else str(each) for each in given))
    if row.get("stop") == "length":
        said.append("cut off")
    if row.get("error"):
        said.append(f"no score: {cut(str(row['error']), 120)}")
    if isinstance(parts := row.get("parts"), Mapping) and len(parts) > 1:
        said += [
            f"{name} {_number(part) if finite(part) else part}" for name, part in parts.items()
        ]
    origin = str(row.get("origin") or "")
    where = f'<bdi title="{esc(origin)}">{esc(_file_and_line(origin))}</bdi>' if origin else ""
    return tag + " · ".join([*map(esc, said), *([where] if where else [])])


def _file_and_line(origin: str) -> str:
    """Without its folders, which the data's paths and a pointer held over it tell."""
    return origin.replace("\\", "/").rpartition("/")[2] or origin


# Answers before and after


def samples(found: Sequence[Json], room: Room) -> str:
    """Answers to the same prompts before the first step and after the last."""
    shown = [
        _beside(
            _text(each, "prompt"),
            [(name, _text(each, name)) for name in ("before", "after") if name in each],
            room,
        )
        for each in found
    ]
    later = (
        ""
        if any("after" in each for each in found)
        else '<p class="dim">Those after training will stand beside them.</p>'
    )
    return later * bool(shown) + _at_once(shown, "samples")


def own_samples(first: Json, last: Json, room: Room) -> str:
    """The policy's answers to held-out prompts at the first and at the last evaluation, those whose
    reward changed most first.
    """
    earlier = {row["id"]: row for row in first["rows"] if isinstance(row.get("id"), str)}
    shown: list[str] = []
    for row, _ in moved(last["rows"], first["rows"])[:SHOWN]:
        answers = [
            (_titled(each, at), _text(at, "completion"))
            for each, at in ((first, earlier[row["id"]]), (last, row))
        ]
        shown.append(_beside(_text(row, "prompt"), answers, room))
    return _at_once(shown, "samples")


def _titled(evaluation: Json, row: Json) -> str:
    return " · ".join([f"step {evaluation['step']}", *_numbers(row)])


def _beside(prompt: str, answers: Iterable[tuple[str, str]], room: Room) -> str:
    shown = "".join(
        f"<div><h4>{esc(title)}</h4>{room.whole(text, 'the run folder')}</div>"
        for title, text in answers
    )
    asked = both_ends(prompt, PROMPT)
    whole = room.whole(prompt, "the run folder") if len(prompt) > PROMPT else ""
    more = (
        f"<details><summary><small>the whole prompt</small></summary>{whole}</details>"
        if whole
        else ""
    )
    return (
        f'<article><p dir="auto"><b>{esc(asked)}</b></p>{more}<div '
        f'class="two">{shown}</div></article>'
    )
