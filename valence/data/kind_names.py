"""Descriptions of the kinds of rows, and the method to suggest for each.

A leaf: the tables of methods import it.
"""

from __future__ import annotations

from valence.types import Kind

WORDS: dict[Kind, str] = {
    "judgement": "completions rated up or down",
    "preference": "pairs of a chosen and a rejected completion",
    "demonstration": "completions to imitate",
    "ranking": "several scored completions per prompt",
    "prompt": "prompts",
    "scored": "completions with a label, a score or attributes",
    "feedback": "completions with what their reader wrote about them",
}
METHOD_FOR: dict[Kind, str] = {
    "judgement": "kto",
    "preference": "dpo",
    "demonstration": "sft",
    "ranking": "grpo",
    "prompt": "grpo with a reward",
    "scored": "pointwise",
    "feedback": "hindsight",
}
"""The method to suggest for rows of each kind."""
TEACHER_METHOD_FOR: dict[Kind, str] = {"demonstration": "distill", "prompt": "online_distill"}
"""The method to suggest for rows of a kind if there is a larger model to learn from."""
METHOD_WORDS: dict[Kind, str] = {
    "judgement": "thumb vote like rating rated binary feedback label",
    "preference": "pair comparison chosen rejected",
    "demonstration": "demo imitation imitate finetune finetuning fine_tuning supervised",
    "ranking": "ranked group",
    "prompt": "reward rl rlhf rlvr online verifier",
    "scored": "score reward_model rm",
    "feedback": "comment follow_up critique text self_distillation sdpo sdft",
}
"""Words for rows of each kind that people write for a method, in the singular."""
COLUMNS_OF: dict[Kind, str] = {
    "judgement": "prompt, completion and label",
    "preference": "prompt, chosen and rejected",
    "demonstration": "prompt and completion",
    "ranking": "prompt, completions and scores",
    "prompt": "prompt",
    "scored": "prompt, completion, and score or label",
    "feedback": "prompt, completion and feedback",
}
"""The columns to suggest for rows of each kind."""


def method_for(word: str) -> str | None:
    """The method to suggest for a word that names rows, such as `thumbs`; None if it names none."""
    singular = word.lower().replace("-", "_").removesuffix("s")
    for kind, words in METHOD_WORDS.items():
        if singular == kind or singular in words.split():
            return METHOD_FOR[kind]
    return None
