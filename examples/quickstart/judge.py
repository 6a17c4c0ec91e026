"""The rule that rates the answers of this example.

A person who reads the question and the answer can apply it without a tool.
"""

from __future__ import annotations

import re

MAX_WORDS, FEWEST_WORDS = 40, 5
LITTLE_WORDS = """
    a an and are as at be by can could do does few for from give good had has have how i if in is it its just make me
    more my name new of on one or our should so some suggest than that the their them there they this to was way we
    what when which who why will with word words would write you your
    answer brief keep please sentences short two
"""
STOP_WORDS = frozenset(LITTLE_WORDS.split())


def judge(question: str, answer: str, finished: bool) -> tuple[bool, str]:
    """Rate an answer to a request for a short one: thumbs up (True) or down, and the reason.

    finished: the model ended the answer before the token limit. The rule rates form and relevance;
    it does not check facts.
    """
    words = re.findall(r"[a-z0-9'\u2019]+", answer.lower())
    question_words, answer_words = content_words(question), content_words(answer)
    if not finished or len(words) > MAX_WORDS:
        return False, f"rambles: more than {MAX_WORDS} words"
    if len(words) < FEWEST_WORDS:
        return False, f"too little: fewer than {FEWEST_WORDS} words"
    if not answer.rstrip("\"'\u201d\u2019)* \n").endswith((".", "!", "?")):
        return False, "does not end as a sentence"
    threes = list(zip(words, words[1:], words[2:], strict=False))
    if len(set(threes)) < len(threes):
        return False, "repeats itself: the same three words twice"
    if not question_words & answer_words:
        return False, "ignores the question: none of its words appear"
    if not answer_words - question_words:
        return False, "only restates the question"
    return True, "short and to the point"


def content_words(text: str) -> set[str]:
    """The content words, truncated to five letters so that "bake" and "baked", "star" and "stars"
    match.
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {word.removesuffix("s")[:5] for word in words if word not in STOP_WORDS}
