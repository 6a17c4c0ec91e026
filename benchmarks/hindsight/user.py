"""The simulated user: a rule that accepts or rejects an answer, and the message that the user
writes afterwards.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from examples.quickstart.judge import content_words

MAX_WORDS = 35
TOPIC_CHANGES = 0.2
"""Share of the messages that are about something else."""
ACCEPTED, NEW_TOPIC = "accepted", "new topic"
MESSAGES: dict[str, tuple[str, ...]] = {
    "too long": (
        "That is too long. Two short sentences are enough.",
        "Way too much text. Please keep it short.",
        "I asked for a short answer.",
        "Can you say that in one sentence?",
        "Too long, I stopped reading. Make it brief.",
        "Shorter, please.",
        "I only wanted a quick answer, not an essay.",
        "Less text please, just the main point.",
        "Please get to the point faster.",
        "That was a lot to read. A sentence or two would do.",
    ),
    "repetitive": (
        "You repeat yourself.",
        "You say the same thing twice. Say it once.",
        "Please do not repeat the same words over and over.",
        "That goes around in circles.",
        "The same phrase comes again and again.",
        "Why do you write everything twice?",
        "Too repetitive. Make the point once and stop.",
        "Half of this is the same sentence again.",
        "Stop repeating yourself, please.",
        "One mention is enough, you repeat it.",
    ),
    "off topic": (
        "That is not what I asked.",
        "You did not answer my question.",
        "What does this have to do with my question?",
        "Please stick to the question.",
        "This misses the point. Answer what I asked.",
        "That answers something else.",
        "I asked something different.",
        "Please read my question again.",
        "You ignored the question.",
        "Not related to my question at all.",
    ),
    "list": (
        "No lists please, just a sentence.",
        "I did not want a list.",
        "Please write plain text without numbers and line breaks.",
        "Just one paragraph, please.",
        "Please answer in normal sentences and not in bullet points.",
        "The formatting is too much. One line is enough.",
        "No headings, no bullets, no steps. Just tell me.",
        "Can you write that as one plain paragraph?",
        "Please do not split it into lines.",
        "Skip the list and tell me the answer.",
    ),
    ACCEPTED: (
        "Thanks!",
        "Thank you, that helps.",
        "Great, that is what I needed.",
        "Perfect, thanks.",
        "Good answer, thank you.",
        "Nice and short, thanks.",
        "That is clear, thank you.",
        "Exactly what I wanted.",
        "Very helpful, thanks a lot.",
        "Got it, thank you!",
    ),
}


def verdict(question: str, answer: str, *, is_finished: bool = True) -> str:
    """``ACCEPTED``, or the kind of complaint about an answer. It rates the form only.

    is_finished: the model ended the answer before the token limit.
    """
    words = re.findall(r"[a-z0-9'\u2019]+", answer.lower())
    threes = list(zip(words, words[1:], words[2:], strict=False))
    if "\n" in answer.strip() or re.match(r"\s*(\d+[.)]|[-*•])\s", answer):
        return "list"
    if not is_finished or len(words) > MAX_WORDS:
        return "too long"
    if len(set(threes)) < len(threes):
        return "repetitive"
    if not content_words(question) & content_words(answer):
        return "off topic"
    return ACCEPTED


def message(kind: str, questions: Sequence[str], rng: random.Random) -> tuple[str, str]:
    """What the user writes after an answer of this kind, and the kind of the message."""
    if rng.random() < TOPIC_CHANGES:
        return rng.choice(questions), NEW_TOPIC
    return rng.choice(MESSAGES[kind]), kind
