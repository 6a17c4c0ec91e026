"""From votes to rows that train: thumbs, scores, pairs, demonstrations, and unlabelled rows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain, combinations, zip_longest
from statistics import fmean
from typing import Any, Literal, get_args

from valence.data.formats import read_example
from valence.data.importers.records import Skipped, SkipReason, Vote
from valence.errors import UserError
from valence.types import Example, Kind, Message

RowKind = Literal["thumbs", "scores", "pairs", "demonstrations", "unlabelled"]
Row = dict[str, Any]

MAX_TURN_PAIRS = 64
"""Maximum pairs of the rated completions of one turn. A prompt that many users rated would give a
pair for each two of its completions otherwise, and outweigh all other prompts.
"""
MAX_TURN_TRIES = 64 * MAX_TURN_PAIRS
"""Maximum pairs of a turn that are looked at: completions with the same text give none."""
ROW_KINDS: tuple[RowKind, ...] = get_args(RowKind)
KIND_OF: dict[RowKind, Kind] = {
    "thumbs": "judgement",
    "scores": "scored",
    "pairs": "preference",
    "demonstrations": "demonstration",
    "unlabelled": "feedback",
}
"""The kind of rows that methods read, and the name of their format."""


@dataclass
class ImportedRows:
    """The rows of each kind, the same as Examples, and the votes that gave none.

    The origin of an Example is that of its first vote. num_replaced: votes that a later vote of
    the same rater replaced. num_disputed: completions whose raters disagreed, and that a majority
    decided. num_pairs_left_out: pairs of a liked and a disliked completion beyond MAX_TURN_PAIRS.
    """

    rows: dict[RowKind, list[Row]] = field(default_factory=lambda: {kind: [] for kind in ROW_KINDS})
    examples: dict[RowKind, list[Example]] = field(
        default_factory=lambda: {kind: [] for kind in ROW_KINDS}
    )
    unused: list[Skipped] = field(default_factory=list[Skipped])
    num_replaced: int = 0
    num_disputed: int = 0
    num_pairs_left_out: int = 0

    @property
    def skipped(self) -> Counter[SkipReason]:
        """How many gave no row, by reason."""
        return Counter(item.reason for item in self.unused)

    def add(
        self,
        kind: RowKind,
        row: Row,
        votes: Sequence[Vote],
        *,
        comments: Sequence[Vote] = (),
        **info: Any,
    ) -> None:
        """Add a row that is made of these votes. One that no method could read is skipped.

        comments: the votes whose words are the feedback of the row. info: further columns of the
        row's info.
        """
        if parts := feedback_parts(comments):
            row = row | {"feedback": "\n\n".join(parts.values())}
            info["feedback"] = parts
        row = row | {"info": _info(votes) | info}
        origin = votes[0].origin
        if not row["prompt"]:
            self.unused.append(Skipped("no_prompt", origin))
            return
        try:
            ids = "_ids" if "prompt_ids" in row else ""
            example = read_example(f"{KIND_OF[kind]}{ids}", row, origin)
        except UserError as error:
            self.unused.append(Skipped("shape_unknown", origin, error.message))
            return
        self.rows[kind].append(row)
        self.examples[kind].append(example)


def feedback_parts(votes: Iterable[Vote]) -> dict[str, str]:
    """What people wrote about a completion: the comments on it, the reasons and tags in words, the
    corrections, and the follow-up. Only the parts that there are, in this order.
    """
    votes = list(votes)
    tags = [_in_words(tag) for vote in votes for tag in vote.tags]
    reasons = dict.fromkeys(tag for tag in tags if tag.casefold() not in ("", "other"))
    texts = {
        "comment": [vote.comment for vote in votes],
        "reasons": [", ".join(reasons)],
        "correction": [vote.correction or "" for vote in votes if _differs(vote)],
        "follow_up": [vote.follow_up for vote in votes],
    }
    parts = {
        name: "\n\n".join(dict.fromkeys(filter(None, map(str.strip, values))))
        for name, values in texts.items()
    }
    return {name: text for name, text in parts.items() if text}


def _in_words(tag: str) -> str:
    """A tag such as ``not_helpful`` as words."""
    return " ".join(re.split(r"[\s_-]+", tag)).strip()


def _differs(vote: Vote) -> bool:
    """Whether a correction is not the completion itself."""
    original = str(vote.completion.get("content") or "")
    return (vote.correction or "").strip() != original.strip()


def latest_votes(votes: Iterable[Vote]) -> list[Vote]:
    """The last vote of each rater on each completion, in the order of their times.

    Of votes with the same time, the later one in the export counts.
    """
    latest: dict[str, Vote] = {}
    for vote in votes:
        before = latest.get(vote.key)
        if before is None or vote.updated_at >= before.updated_at:
            latest[vote.key] = vote
    return sorted(latest.values(), key=lambda vote: vote.updated_at)


def make_rows(votes: Sequence[Vote], *, unlabelled: bool = False) -> ImportedRows:
    """Make rows of all votes. unlabelled: also rows without a label or a score, of completions
    that were corrected or that a user message follows.

    - Thumbs of several raters on one completion are one row: the majority's label, weighted by the
      size of the majority. Where there is none, the completion gives no row.
    - Scores of several raters are averaged.
    - A comparison gives a pair. Where raters disagree, or call it a tie, ``soft`` is the share of
      votes for the chosen one. Two completions that are both bad give two thumbs down, and two
      identical ones no row.
    - Regenerated completions of one prompt, one liked and one disliked, give a pair as well; those
      of one rater first, and at most MAX_TURN_PAIRS per prompt.
    - A correction gives a demonstration, and a pair in which it is preferred to the completion.
    - Rows of one completion that people have judged have their words as ``feedback``, in the order
      of ``feedback_parts``, separated by blank lines; ``info.feedback`` has the parts.
    """
    result = ImportedRows()
    latest = latest_votes(votes)
    result.num_replaced = len(votes) - len(latest)
    groups: dict[str, list[Vote]] = defaultdict(list)
    for vote in latest:
        if vote.has_verdict or vote.is_follow_up:
            groups[vote.target].append(vote)
    siblings: dict[tuple[str, ...], list[tuple[bool, list[Vote]]]] = defaultdict(list)
    for group in groups.values():
        compared = [vote for vote in group if vote.winner is not None]
        if compared:
            _add_comparison(compared, result)
        rated = [vote for vote in group if vote.other is None and vote.label is not None]
        label = _add_thumbs(rated, group, result) if rated else None
        first = group[0]
        if label is not None and first.parent:
            siblings[first.source, first.session, first.parent].append((label, rated))
        if scored := [vote for vote in group if vote.other is None and vote.score is not None]:
            _add_score(scored, group, result)
        is_labelled = label is not None or bool(scored)
        if unlabelled and not compared and not is_labelled and feedback_parts(group):
            _add_unlabelled(group, result)
        for vote in group:
            if vote.correction:
                _add_correction(vote, vote.correction, result)
    for rated_siblings in siblings.values():
        _add_sibling_pairs(rated_siblings, result)
    return result


def import_votes(items: Iterable[Vote | Skipped]) -> ImportedRows:
    """The rows of what a reader yields; what it skipped comes first in ``unused``."""
    votes: list[Vote] = []
    skipped: list[Skipped] = []
    for item in items:
        if isinstance(item, Vote):
            votes.append(item)
        else:
            skipped.append(item)
    imported = make_rows(votes, unlabelled=any(vote.is_follow_up for vote in votes))
    imported.unused[:0] = skipped
    return imported


def pairs_left_out(number: int) -> str:
    """A sentence about pairs beyond MAX_TURN_PAIRS."""
    return (
        f"Up to {number:,} pairs were left out: a prompt gives at most {MAX_TURN_PAIRS} pairs of a "
        "liked and a disliked answer."
    )


def agreement(votes: Iterable[Vote]) -> tuple[int, float | None]:
    """How many completions or comparisons several raters voted on, and the share of all pairs of
    such votes that agree; None where there is no such pair.
    """
    verdicts = [[verdict for _, verdict in group] for group in votes_by_target(votes).values()]
    shared = [group for group in verdicts if len(group) > 1]
    pairs = [a == b for group in shared for a, b in combinations(group, 2)]
    return len(shared), fmean(pairs) if pairs else None


def votes_by_target(votes: Iterable[Vote]) -> dict[str, list[tuple[Vote, str]]]:
    """The votes on each completion or comparison, each with its verdict: "up" or "down"; "first",
    "second", "tie" or "both_bad". Scores and corrections are no verdicts.
    """
    groups: dict[str, list[tuple[Vote, str]]] = defaultdict(list)
    first: dict[str, str | Message] = {}
    for vote in votes:
        side = vote.message or vote.completion
        if vote.winner in ("this", "other"):
            is_first = (vote.winner == "this") is (side == first.setdefault(vote.target, side))
            verdict = "first" if is_first else "second"
        elif vote.winner is not None:
            verdict = vote.winner
        elif vote.label is not None:
            verdict = "up" if vote.label else "down"
        else:
            continue
        groups[vote.target].append((vote, verdict))
    return groups


def _add_sibling_pairs(siblings: list[tuple[bool, list[Vote]]], result: ImportedRows) -> None:
    """Add pairs of a liked and a disliked completion of one turn, up to MAX_TURN_PAIRS: first those
    that one rater has rated.
    """
    liked = [votes for label, votes in siblings if label]
    disliked = [votes for label, votes in siblings if not label]
    by_rater: dict[str, tuple[list[list[Vote]], list[list[Vote]]]] = defaultdict(lambda: ([], []))
    for label, votes in siblings:
        for rater in {vote.rater_hash for vote in votes if vote.rater}:
            by_rater[rater][not label].append(votes)
    # one pair of each rater in turn
    by_one_rater = chain.from_iterable(
        zip_longest(*(_crossed(*sides) for sides in by_rater.values()))
    )
    tried = set[tuple[int, int]]()
    num_pairs = 0
    for pair in chain(filter(None, by_one_rater), _crossed(liked, disliked)):
        if num_pairs == MAX_TURN_PAIRS or len(tried) == MAX_TURN_TRIES:
            result.num_pairs_left_out += len(liked) * len(disliked) - len(tried)
            break
        up, down = pair
        key = id(up), id(down)
        if key in tried:
            continue
        tried.add(key)
        sides = {"chosen": _rated(up[0]), "rejected": _rated(down[0])}
        is_same = sides["chosen"][0] == sides["rejected"][0]
        if up[0].prompt == down[0].prompt and not is_same:
            result.add("pairs", _row(up[0], sides), [*up, *down])
            num_pairs += 1


def _crossed(
    liked: Sequence[list[Vote]], disliked: Sequence[list[Vote]]
) -> Iterator[tuple[list[Vote], list[Vote]]]:
    """All pairs, in an order in which the first n pairs use all completions about equally often."""
    for shift in range(min(len(liked), len(disliked))):
        for i in range(max(len(liked), len(disliked))):
            is_longer = len(liked) >= len(disliked)
            up, down = (i, i + shift) if is_longer else (i + shift, i)
            yield liked[up % len(liked)], disliked[down % len(disliked)]


def _add_thumbs(votes: list[Vote], group: list[Vote], result: ImportedRows) -> bool | None:
    """Add the row of a completion. Returns its label; None if its raters are divided.

    votes: thumbs. group: all votes on the completion.
    """
    balance = sum(1 if vote.label else -1 for vote in votes)
    if balance == 0:
        result.unused += [Skipped("disagreement", vote.origin) for vote in votes]
        return None
    if abs(balance) < len(votes):
        result.num_disputed += 1
    row = _row(votes[0], {"completion": _rated(votes[0])}) | {"label": balance > 0}
    if abs(balance) != 1:
        row["weight"] = float(abs(balance))
    result.add("thumbs", row, votes, comments=group)
    return balance > 0


def _add_score(votes: list[Vote], group: list[Vote], result: ImportedRows) -> None:
    scores = [vote.score for vote in votes if vote.score is not None]
    row = _row(votes[0], {"completion": _rated(votes[0])}) | {"score": fmean(scores)}
    result.add("scores", row, votes, comments=group)


def _add_unlabelled(votes: list[Vote], result: ImportedRows) -> None:
    votes = [vote for vote in votes if feedback_parts([vote])]
    row = _row(votes[0], {"completion": _rated(votes[0])})
    result.add("unlabelled", row, votes, comments=votes)


def _add_comparison(votes: list[Vote], result: ImportedRows) -> None:
    """Add the pair of two completions, or two thumbs down where most raters call both bad."""
    first = votes[0]
    assert first.other is not None
    this: Side = _rated(first)
    other: Side = (*first.other_turns, first.other), first.other_tokens
    if this[0] == other[0]:
        result.unused += [Skipped("identical", vote.origin) for vote in votes]
        return
    winners: Counter[str] = Counter()
    for vote in votes:
        # the texts of a message may have been edited between two votes
        is_same_side = (vote.message or vote.completion) == (first.message or first.completion)
        winner = vote.winner or "tie"
        if not is_same_side and winner in ("this", "other"):
            winner = "other" if winner == "this" else "this"
        winners[winner] += 1
    if winners["both_bad"] > len(votes) / 2:
        for side in (this, other):
            row = _row(first, {"completion": side}) | {"label": False}
            result.add("thumbs", row, votes, comments=votes)
        return
    num_votes = winners["this"] + winners["other"] + winners["tie"]
    share = (winners["this"] + winners["tie"] / 2) / num_votes
    if len(set(winners) - {"both_bad"}) > 1:
        result.num_disputed += 1
    chosen, rejected = this, other
    models = first.model, first.other_model
    if share < 0.5:
        chosen, rejected, share = other, this, 1 - share
        models = first.other_model, first.model
    row = _row(first, {"chosen": chosen, "rejected": rejected})
    if share < 1:
        row["soft"] = share
    names = dict(zip(("chosen_model", "rejected_model"), models, strict=True))
    result.add("pairs", row, votes, **(names if all(models) and len(set(models)) == 2 else {}))


def _add_correction(vote: Vote, correction: str, result: ImportedRows) -> None:
    better: Message = {"role": "assistant", "content": correction}
    if vote.turns:  # it corrects what the assistant wrote after them
        vote = replace(vote, prompt=(*vote.prompt, *vote.turns), turns=(), tokens={})
    result.add("demonstrations", _row(vote, {"completion": ((better,), {})}), [vote])
    if _differs(vote):
        ids = vote.tokens.get("correction_ids")
        tokens = {**vote.tokens, "completion_ids": ids} if ids else {}
        sides: dict[str, Side] = {"chosen": ((better,), tokens), "rejected": _rated(vote)}
        result.add("pairs", _row(vote, sides), [vote])


Side = tuple[tuple[Message, ...], Mapping[str, Any]]
"""The turns of a completion, and its tokens if they are known."""


def _rated(vote: Vote) -> Side:
    return (*vote.turns, vote.completion), vote.tokens


def _row(vote: Vote, completions: Mapping[str, Side]) -> Row:
    """The prompt and completions of a row, with the tokens of all of them if these are known and
    belong to one prompt and one vocabulary, and the digest of the vocabulary. Pairs of completions
    with results of tools have no tokens.

    A completion that is text alone is written as text.
    """
    row: Row = {"prompt": [dict(message) for message in vote.prompt]}
    for name, ((*earlier, last), _) in completions.items():
        is_text = set(last) <= {"role", "content"} and isinstance(last.get("content"), str)
        is_text &= not earlier
        row[name] = last["content"] if is_text else [dict(turn) for turn in (*earlier, last)]
    if vote.tools:
        row["tools"] = [dict(tool) for tool in vote.tools]
    all_tokens = [tokens for _, tokens in completions.values()]
    if not all(all_tokens):
        return row
    if len(all_tokens) > 1 and any("mask" in tokens for tokens in all_tokens):
        return row  # rows of pairs have no mask
    prompts = {(tokens["vocabulary"], tuple(tokens["prompt_ids"])) for tokens in all_tokens}
    if len(prompts) > 1:
        return row
    ((vocabulary, prompt_ids),) = prompts
    row["prompt_ids"] = list(prompt_ids)
    for name, (_, tokens) in completions.items():
        row[f"{name}_ids"] = list(tokens["completion_ids"])
    if "completion" in completions:
        tokens = completions["completion"][1]
        names = ("temperature", "top_p", "vocabulary", "mask")
        sampled = {name: tokens[name] for name in names if name in tokens}
        row |= {"logps": list(tokens["logps"]), "sampled": sampled}
    else:
        row["sampled"] = {"vocabulary": vocabulary}
    return row


def _info(votes: Sequence[Vote]) -> dict[str, Any]:
    """Where a row is from. Nothing in it names a person."""
    first = votes[0]
    info: dict[str, Any] = {"source": first.source, "votes": [vote.id for vote in votes]}
    unique: dict[str, list[str]] = {
        "raters": [vote.rater_hash for vote in votes],
        "model": [name for vote in votes for name in (vote.model, vote.other_model)],
        "comment": [vote.comment for vote in votes],
        "tags": [tag for vote in votes for tag in (*vote.tags, *vote.topics)],
    }
    for name, values in unique.items():
        distinct = list(dict.fromkeys(value for value in values if value))
        if distinct:
            is_single = name in ("model", "comment") and len(distinct) == 1
            info[name] = distinct[0] if is_single else distinct
    if latest := max(vote.updated_at for vote in votes):
        info["updated_at"] = datetime.fromtimestamp(latest, UTC).isoformat(timespec="seconds")
    return {**dict(first.info), **info}
