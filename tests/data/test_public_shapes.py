"""Rows in the columns of public data sets and of the data of other tools, and what they become.

Each row names where its columns were found. The texts are invented.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.encoding import encoded, encoder
from tests.data.rows import Source, shown_findings, write
from tests.errors import raises_error
from tests.tiny import tiny_tokenizer
from valence.config.schema import SourceSettings
from valence.data.audit import Finding, audit
from valence.data.format_table import SHAPES
from valence.data.load import DataFile, Loaded, load, recognize
from valence.data.rendering import describe_first_rows
from valence.jobs.sample_rows import load_prompts, prompt_columns
from valence.types import (
    Chat,
    Demonstration,
    Example,
    Ids,
    Judgement,
    Kind,
    Origin,
    Preference,
    Prompt,
    Ranking,
    Sampled,
)

HERE = Origin("", 0)
HUB = "https://huggingface.co/datasets/"
GITHUB = "https://github.com/"
FACTORY = GITHUB + "hiyouga/LLaMA-Factory/blob/main/data/"
SWIFT = GITHUB + "modelscope/ms-swift/blob/main/docs/source_en/Customization/Custom-dataset.md"
AXOLOTL = GITHUB + "axolotl-ai-cloud/axolotl/blob/main/"
NEMO = GITHUB + "NVIDIA-NeMo/RL/blob/main/nemo_rl/data/datasets/"
TRL = GITHUB + "huggingface/trl/blob/main/examples/datasets/"


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def shared(who: str, value: str) -> dict[str, str]:
    return {"from": who, "value": value}


ASK, MORE = turn("user", "Is it wet?"), turn("user", "Why?")
YES, NO = turn("assistant", "Yes."), turn("assistant", "No.")
SYSTEM = turn("system", "Be brief.")
TOOL = {"name": "clock", "description": "The time.", "parameters": {}}
CALL = turn(
    "assistant",
    None,
    tool_calls=[{"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
)


def chat(*turns: Any, tools: tuple[Any, ...] = ()) -> Chat:
    return Chat(turns, tools)


def pair(prompt: Any = "Is it wet?", chosen: Any = "Yes.", rejected: Any = "No.", **more: Any):
    return Preference(prompt=prompt, chosen=chosen, rejected=rejected, origin=HERE, **more)


def chat_pair(*prompt: Any, tools: tuple[Any, ...] = (), **more: Any) -> Preference:
    return pair(chat(*prompt, tools=tools), chat(YES), chat(NO), **more)


def demo(prompt: Any = "Is it wet?", completion: Any = "Yes.") -> Demonstration:
    return Demonstration(prompt=prompt, completion=completion, origin=HERE)


def judged(prompt: Any = "Is it wet?", completion: Any = "Yes.", **more: Any) -> Judgement:
    return Judgement(prompt=prompt, completion=completion, origin=HERE, **more)


def ranked(*scores: float, prompt: Any = "Is it wet?", texts: Any = ("Yes.", "No.")) -> Ranking:
    return Ranking(prompt=prompt, completions=texts, scores=scores, origin=HERE)


def prompted(prompt: Any = "Is it wet?", **info: Any) -> Prompt:
    return Prompt(prompt=prompt, info=info, origin=HERE)


@dataclass(frozen=True)
class Shape:
    """A row of a data set or tool, the kind that a method reads, and the example it must become."""

    source: str
    kind: Kind
    row: Mapping[str, Any]
    example: Example


SHAPES_READ = [
    # Two answers in the columns chosen and rejected
    Shape(HUB + "Anthropic/hh-rlhf", "preference", {
        "chosen": "\n\nHuman: Is it wet?\n\nAssistant: Yes.",
        "rejected": "\n\nHuman: Is it wet?\n\nAssistant: No.",
    }, chat_pair(ASK)),
    Shape(HUB + "Anthropic/hh-rlhf (several turns)", "preference", {
        "chosen": "\n\nHuman: Why?\n\nAssistant: No.\n\nHuman: Is it wet?\n\nAssistant: Yes.",
        "rejected": "\n\nHuman: Why?\n\nAssistant: No.\n\nHuman: Is it wet?\n\nAssistant: No.",
    }, chat_pair(MORE, NO, ASK)),
    Shape(HUB + "Dahoas/rm-static", "preference", {
        "prompt": "\n\nHuman: Is it wet?\n\nAssistant:", "response": " Yes.", "chosen": " Yes.",
        "rejected": " No.",
    }, chat_pair(ASK)),
    Shape(HUB + "HuggingFaceH4/ultrafeedback_binarized", "preference", {
        "prompt": "Is it wet?", "prompt_id": "1f", "chosen": [ASK, YES], "rejected": [ASK, NO],
        "messages": [ASK, YES], "score_chosen": 8.5, "score_rejected": 3.0,
    }, chat_pair(ASK)),
    Shape(HUB + "Skywork/Skywork-Reward-Preference-80K-v0.1", "preference", {
        "chosen": [ASK, YES], "rejected": [ASK, NO], "source": "offsetbias",
    }, chat_pair(ASK)),
    Shape(HUB + "allenai/reward-bench", "preference", {
        "prompt": "Is it wet?", "chosen": "Yes.", "chosen_model": "a", "rejected": "No.",
        "rejected_model": "b", "subset": "alpacaeval-easy", "id": 3,
    }, pair()),
    Shape(AXOLOTL + "src/axolotl/prompt_strategies/dpo/chatml.py (intel)", "preference", {
        "system": "Be brief.", "question": "Is it wet?", "chosen": "Yes.", "rejected": "No.",
    }, chat_pair(SYSTEM, ASK)),
    Shape(AXOLOTL + "src/axolotl/prompt_strategies/dpo/chatml.py (icr)", "preference", {
        "system": "", "input": "Is it wet?", "chosen": "Yes.", "rejected": "No.",
        "generations": ["Yes.", "No."], "order": ["chosen", "rejected"], "rating": [9.0, 7.0],
    }, pair()),
    Shape(AXOLOTL + "src/axolotl/prompt_strategies/dpo/chatml.py (argilla)", "preference", {
        "instruction": "Is it wet?", "chosen_response": "Yes.", "rejected_response": "No.",
    }, pair()),
    Shape(HUB + "lvwerra/stack-exchange-paired", "preference", {
        "qid": 7, "question": "Is it wet?", "date": "2010/01/02",
        "metadata": ["https://a", "https://b"], "response_j": "Yes.", "response_k": "No.",
    }, pair()),
    Shape(FACTORY + "README.md (sharegpt preference)", "preference", {
        "conversations": [shared("human", "Is it wet?")],
        "chosen": shared("gpt", "Yes."), "rejected": shared("gpt", "No."),
    }, chat_pair(ASK)),
    Shape(FACTORY + "README.md (alpaca preference)", "preference", {
        "instruction": "Is it wet?", "input": "", "chosen": "Yes.", "rejected": "No.",
    }, chat_pair(ASK)),
    Shape(SWIFT + " (rejected_response)", "preference", {
        "messages": [SYSTEM, ASK, YES], "rejected_response": "No.",
    }, chat_pair(SYSTEM, ASK)),
    Shape(GITHUB + "modelscope/ms-swift/blob/main/swift/llm/dataset/preprocessor/core.py",
          "preference", {
        "messages": [ASK, YES], "rejected_messages": [ASK, NO],
    }, chat_pair(ASK)),
    Shape("https://platform.openai.com/docs/guides/direct-preference-optimization", "preference", {
        "input": {"messages": [ASK], "tools": [TOOL], "parallel_tool_calls": True},
        "preferred_output": [YES], "non_preferred_output": [NO],
    }, chat_pair(ASK, tools=(TOOL,))),
    Shape(GITHUB + "OpenRLHF/OpenRLHF/blob/main/openrlhf/datasets/reward_dataset.py",
          "preference", {
        "input": "Is it wet?", "chosen": "Yes.", "rejected": "No.", "margin": 2,
    }, pair(margin=2.0)),
    # Two answers, and another column that says which one is better
    Shape(HUB + "stanfordnlp/SHP", "preference", {
        "post_id": "q", "domain": "askculinary_train", "upvote_ratio": 0.98,
        "history": "Is it wet?", "human_ref_A": "Yes.", "human_ref_B": "No.", "labels": 1,
        "score_A": 340, "score_B": 166, "score_ratio": 2.04, "c_root_id_A": "a",
    }, pair()),
    Shape(HUB + "PKU-Alignment/PKU-SafeRLHF", "preference", {
        "prompt": "Is it wet?", "response_0": "No.", "response_1": "Yes.",
        "is_response_0_safe": True, "is_response_1_safe": True, "better_response_id": 1,
        "safer_response_id": 0,
    }, pair()),
    Shape(HUB + "openai/webgpt_comparisons", "preference", {
        "question": {"dataset": "eli5", "id": "1", "full_text": "Is it wet?"},
        "quotes_0": {"title": [], "extract": []}, "answer_0": "No.", "tokens_0": {"prefix": [1]},
        "score_0": -0.5, "quotes_1": {"title": [], "extract": []}, "answer_1": "Yes.",
        "tokens_1": {"prefix": [1]}, "score_1": 0.5,
    }, pair()),
    Shape(TRL + "tldr_preference.py (openai/summarize_from_feedback)", "preference", {
        "info": {"id": "t3", "post": "Is it wet?", "title": "Wet?", "subreddit": "r"},
        "summaries": [{"text": "No.", "policy": "a"}, {"text": "Yes.", "policy": "b"}],
        "choice": 1, "worker": "w", "batch": "batch3", "split": "train", "extra": {},
    }, pair(info={"id": "t3", "post": "Is it wet?", "title": "Wet?", "subreddit": "r"})),
    Shape(HUB + "lmsys/mt_bench_human_judgments", "preference", {
        "question_id": 81, "model_a": "a", "model_b": "b", "winner": "model_b", "judge": "e",
        "conversation_a": [ASK, NO], "conversation_b": [ASK, YES], "turn": 1,
    }, chat_pair(ASK)),
    Shape(HUB + "lmarena-ai/arena-human-preference-140k", "preference", {
        "id": "1", "model_a": "a", "model_b": "b", "winner": "model_a", "evaluation_order": 1,
        "conversation_a": [
            turn("user", [{"type": "text", "text": "Is it wet?", "image": None}]),
            turn("assistant", [{"type": "text", "text": "Yes.", "image": None}]),
        ],
        "conversation_b": [
            turn("user", [{"type": "text", "text": "Is it wet?", "image": None}]),
            turn("assistant", [{"type": "text", "text": "No.", "image": None}]),
        ],
        "language": "en",
    }, chat_pair(ASK)),
    Shape(HUB + "nvidia/HelpSteer2 (preference)", "preference", {
        "split": "train", "prompt": "Is it wet?", "response_1": "Yes.", "response_2": "No.",
        "preference_strength": -2, "preference_statement": "1 is better.",
    }, pair()),
    Shape(NEMO + "preference_datasets/helpsteer3.py", "preference", {
        "domain": "stem", "language": "english", "context": [ASK], "response1": "No.",
        "response2": "Yes.", "overall_preference": 3, "individual_preference": [{"score": 3}],
    }, chat_pair(ASK)),
    Shape("export of HelpSteer3 with the context as the prompt", "preference", {
        "prompt": "Is it wet?", "response1": "Yes.", "response2": "No.", "overall_preference": -1,
    }, pair()),
    Shape(HUB + "nvidia/HelpSteer3 (edit)", "preference", {
        "domain": "stem", "language": "english", "context": [ASK], "original_response": "No.",
        "edited_response": "Yes.", "feedback": ["It is."],
    }, chat_pair(ASK)),
    Shape(GITHUB + "tatsu-lab/alpaca_farm/blob/main/README.md", "preference", {
        "instruction": "Is it wet?", "input": "", "output_1": "No.", "output_2": "Yes.",
        "annotator": "davinci003_3", "preference": 2.0,
    }, chat_pair(ASK)),
    Shape(HUB + "NCSOFT/offsetbias", "preference", {
        "instruction": "Is it wet?", "output_1": "No.", "output_2": "Yes.", "label": 2,
    }, chat_pair(ASK)),
    Shape(HUB + "prometheus-eval/Preference-Collection", "preference", {
        "orig_criteria": "Is it right?", "orig_instruction": "Is it wet?",
        "orig_response_A": "No.", "orig_response_B": "Yes.", "orig_preference": "B",
        "orig_reference_answer": "Yes.",
    }, pair()),
    Shape(GITHUB + "ContextualAI/HALOs (pairwise feedback)", "preference", {
        "type": "pairwise_feedback", "prompt": [ASK], "output_A": [YES], "output_B": [NO],
        "label": 1,
    }, chat_pair(ASK)),
    Shape("https://www.kaggle.com/competitions/lmsys-chatbot-arena/data", "preference", {
        "id": 30192, "model_a": "a", "model_b": "b", "prompt": '["Why?", "Is it wet?"]',
        "response_a": '["No.", "No."]', "response_b": '["No.", "Yes."]',
        "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0,
    }, chat_pair(MORE, NO, ASK)),
    Shape(HUB + "HuggingFaceH4/ultrafeedback_binarized (several turns)", "preference", {
        "prompt": "Why?", "chosen": [MORE, NO, ASK, YES], "rejected": [MORE, NO, ASK, NO],
    }, chat_pair(MORE, NO, ASK)),
    Shape("export of two answers with a score each", "preference", {
        "question": "Is it wet?", "answer_1": "No.", "answer_2": "Yes.", "rating_1": 2,
        "rating_2": 4.5,
    }, pair()),
    Shape("export of a comparison with the lead of the first answer", "preference", {
        "prompt": "Is it wet?", "response_a": "No.", "response_b": "Yes.", "score_a_minus_b": -2,
    }, pair()),
    Shape("export of a comparison with the lead of the second answer", "preference", {
        "question": "Is it wet?", "answer_1": "No.", "answer_2": "Yes.",
        "reward_2_minus_reward_1": 0.5,
    }, pair()),
    Shape("export of a comparison with the column's name as the winner", "preference", {
        "prompt": "Is it wet?", "response_a": "No.", "response_b": "Yes.", "winner": "response_b",
    }, pair()),
    # Several answers with scores or ranks
    Shape(TRL + "ultrafeedback.py (openbmb/UltraFeedback)", "ranking", {
        "source": "evol", "instruction": "Is it wet?", "models": ["a", "b"],
        "completions": [
            {"response": "Yes.", "overall_score": 8.5, "model": "a", "annotations": {}},
            {"response": "No.", "overall_score": 2, "model": "b", "annotations": {}},
        ],
        "correct_answers": ["None"], "incorrect_answers": ["None"],
    }, ranked(8.5, 2.0)),
    Shape(HUB + "berkeley-nest/Nectar", "ranking", {
        "prompt": "\n\nHuman: Is it wet?\n\nAssistant: ",
        "answers": [
            {"answer": "No.", "model": "a", "rank": 2.0},
            {"answer": "Yes.", "model": "b", "rank": 1.0},
        ],
        "turns": 1, "num_responses": 2, "source": ["a"], "good_natured": True,
    }, ranked(-2.0, -1.0, prompt=chat(ASK), texts=(chat(NO), chat(YES)))),
    Shape(HUB + "HuggingFaceH4/stack-exchange-preferences", "ranking", {
        "qid": 7, "question": "Is it wet?", "metadata": ["https://a"], "date": "2010/01/02",
        "answers": [
            {"answer_id": 1, "text": "Yes.", "pm_score": 3, "selected": True, "author": "a"},
            {"answer_id": 2, "text": "No.", "pm_score": 0, "selected": False, "author": "b"},
        ],
    }, ranked(3.0, 0.0)),
    Shape(GITHUB + "argilla-io/distilabel/blob/main/src/distilabel/steps/formatting/dpo.py",
          "ranking", {
        "system_prompt": "Be brief.", "instruction": "Is it wet?", "generations": ["Yes.", "No."],
        "generation_models": ["a", "b"], "ratings": [5.0, 1.0],
    }, ranked(5.0, 1.0, prompt=chat(SYSTEM, ASK), texts=(chat(YES), chat(NO)))),
    Shape(GITHUB + "argilla-io/distilabel/blob/main/src/distilabel/steps/formatting/dpo.py (chat)",
          "ranking", {
        "messages": [ASK], "generations": ["Yes.", "No."], "generation_models": ["a", "b"],
        "ratings": [5.0, 1.0],
    }, ranked(5.0, 1.0, prompt=chat(ASK), texts=(chat(YES), chat(NO)))),
    Shape(GITHUB + "argilla-io/distilabel-workbench/blob/main/projects/criticon/benchmark/"
          "prepare_subset_dpo_mix.py", "ranking", {
        "input": "Is it wet?", "generations": ["Yes.", "No."], "rating": [9.0, 7.0],
    }, ranked(9.0, 7.0)),
    Shape(NEMO + "preference_datasets/preference_dataset.py", "ranking", {
        "context": [ASK],
        "completions": [{"rank": 0, "completion": [YES]}, {"rank": 1, "completion": [NO]}],
    }, ranked(0.0, -1.0, prompt=chat(ASK), texts=(chat(YES), chat(NO)))),
    # One answer with a rating
    Shape(HUB + "nvidia/HelpSteer2", "scored", {
        "prompt": "Is it wet?", "response": "Yes.", "helpfulness": 3, "correctness": 4,
        "coherence": 4, "complexity": 2, "verbosity": 2,
    }, judged(attributes={"helpfulness": 3.0, "correctness": 4.0, "coherence": 4.0,
                          "complexity": 2.0, "verbosity": 2.0})),
    Shape(HUB + "prometheus-eval/Feedback-Collection", "scored", {
        "orig_instruction": "Is it wet?", "orig_response": "Yes.", "orig_score": "4",
        "orig_feedback": "So. It is.", "orig_criteria": "Is it right?",
    }, judged(score=4.0)),
    Shape("export with query, response and score", "scored", {
        "query": "Is it wet?", "response": "Yes.", "score": 0.8,
    }, judged(score=0.8)),
    Shape("export with prompt, response and thumbs_up", "judgement", {
        "prompt": "Is it wet?", "response": "Yes.", "thumbs_up": True, "comment": "It is right.",
    }, judged(label=True)),
    Shape(FACTORY + "dataset_info.json (argilla/kto-mix-15k)", "judgement", {
        "dataset": "a", "completion": [ASK, YES], "label": True, "rating": 5.0,
    }, judged(chat(ASK), chat(YES), label=True)),
    Shape(AXOLOTL + "src/axolotl/prompt_strategies/kto/chatml.py (intel)", "judgement", {
        "system": "Be brief.", "question": "Is it wet?", "completion": "Yes.", "label": False,
    }, judged(chat(SYSTEM, ASK), chat(YES), label=False)),
    Shape(SWIFT + " (KTO)", "judgement", {
        "messages": [SYSTEM, ASK, YES], "label": True,
    }, judged(chat(SYSTEM, ASK), chat(YES), label=True)),
    Shape(FACTORY + "README.md (alpaca KTO)", "judgement", {
        "instruction": "Is it wet?", "input": "", "output": "Yes.", "kto_tag": False,
    }, judged(chat(ASK), chat(YES), label=False)),
    # What the reader of an answer wrote
    Shape("a table of answers with comments", "feedback", {
        "question": "Is it wet?", "response": "Yes.", "comment": "Too short.", "rating": 2,
    }, judged(score=2.0, feedback="Too short.")),
    Shape("scored answers of `valence score`", "feedback", {
        "prompt_ids": [1], "completion_ids": [2], "score": 0.5, "feedback": "Too short.",
    }, judged(Ids((1,)), Ids((2,), Sampled(())), score=0.5, feedback="Too short.")),
    Shape("a chat log with the next message of the user", "feedback", {
        "messages": [ASK, YES], "follow_up": "No, in French.",
    }, judged(chat(ASK), chat(YES), feedback="No, in French.")),
    # Answers to imitate
    Shape(HUB + "openai/gsm8k", "demonstration", {
        "question": "Is it wet?", "answer": "Yes.\n#### 1",
    }, demo(completion="Yes.\n#### 1")),
    Shape(HUB + "hendrycks/competition_math", "demonstration", {
        "problem": "Is it wet?", "level": "Level 5", "type": "Algebra", "solution": "Yes.",
    }, demo()),
    Shape(FACTORY + "dataset_info.json (Open-Orca/OpenOrca)", "demonstration", {
        "id": "niv.1", "system_prompt": "Be brief.", "question": "Is it wet?", "response": "Yes.",
    }, demo(chat(SYSTEM, ASK), chat(YES))),
    Shape(FACTORY + "README.md (alpaca)", "demonstration", {
        "instruction": "Is it wet?", "input": "The sea.", "output": "Yes.", "system": "Be brief.",
        "history": [["Why?", "No."]],
    }, demo(chat(SYSTEM, MORE, NO, turn("user", "Is it wet?\nThe sea.")), chat(YES))),
    Shape(SWIFT + " (query-response)", "demonstration", {
        "system": "Be brief.", "query": "Is it wet?", "response": "Yes.",
        "history": [["Why?", "No."]],
    }, demo(chat(SYSTEM, MORE, NO, ASK), chat(YES))),
    Shape(SWIFT + " (ShareGPT)", "demonstration", {
        "system": "Be brief.",
        "conversation": [
            {"human": "Why?", "assistant": "No."}, {"human": "Is it wet?", "assistant": "Yes."},
        ],
    }, demo(chat(SYSTEM, MORE, NO, ASK), chat(YES))),
    Shape(HUB + "LDJnr/Capybara", "demonstration", {
        "source": "a", "conversation": [
            {"input": "Why?", "output": "No."}, {"input": "Is it wet?", "output": "Yes."},
        ],
    }, demo(chat(MORE, NO, ASK), chat(YES))),
    Shape(SWIFT + " (tools and content in parts)", "demonstration", {
        "messages": [turn("user", [{"type": "text", "value": "Is it wet?"}]), YES],
        "tools": [TOOL],
    }, demo(chat(ASK, tools=(TOOL,)), chat(YES))),
    Shape(FACTORY + "glaive_toolcall_en_demo.json", "demonstration", {
        "conversations": [
            shared("human", "Is it wet?"),
            shared("function_call", '{"name": "clock", "arguments": {"zone": "UTC"}}'),
            shared("observation", "12:00"), shared("gpt", "Yes."),
        ],
        "tools": '[{"name": "clock", "description": "The time.", "parameters": {}}]',
    }, demo(chat(ASK, CALL, turn("tool", "12:00"), tools=(TOOL,)), chat(YES))),
    Shape(HUB + "GAIR/lima", "demonstration", {
        "conversations": ["Why?", "No.", "Is it wet?", "Yes."], "source": "stackexchange",
    }, demo(chat(MORE, NO, ASK), chat(YES))),
    Shape(FACTORY + "dataset_info.json (lmsys/lmsys-chat-1m)", "demonstration", {
        "conversation_id": "c", "model": "a", "conversation": [ASK, YES], "turn": 1,
        "language": "English", "openai_moderation": [{"flagged": False}], "redacted": False,
    }, demo(chat(ASK), chat(YES))),
    Shape(HUB + "databricks/databricks-dolly-15k", "demonstration", {
        "instruction": "Is it wet?", "context": "The sea.", "response": "Yes.",
        "category": "closed_qa",
    }, demo(chat(turn("user", "Is it wet?\nThe sea.")), chat(YES))),
    Shape(AXOLOTL + "docs/dataset-formats/inst_tune.qmd (gpteacher)", "demonstration", {
        "instruction": "Is it wet?", "input": "The sea.", "response": "Yes.",
    }, demo(chat(turn("user", "Is it wet?\nThe sea.")), chat(YES))),
    Shape(AXOLOTL + "docs/dataset-formats/inst_tune.qmd (load_camel_ai)", "demonstration", {
        "role_1": "Physicist", "topic": "a", "message_1": "Is it wet?", "message_2": "Yes.",
    }, demo()),
    Shape(GITHUB + "modelscope/ms-swift/blob/main/swift/llm/dataset/dataset/llm.py "
          "(sql-create-context)", "demonstration", {
        "question": "Is it wet?", "context": "The sea.", "answer": "Yes.",
    }, demo(chat(turn("user", "Is it wet?\nThe sea.")), chat(YES))),
    Shape(HUB + "HuggingFaceH4/no_robots", "demonstration", {
        "prompt": "Is it wet?", "prompt_id": "1f", "messages": [SYSTEM, ASK, YES],
        "category": "Chat",
    }, demo(chat(SYSTEM, ASK), chat(YES))),
    Shape(HUB + "timdettmers/openassistant-guanaco", "demonstration", {
        "text": "### Human: Why?### Assistant: No.\n### Human: Is it wet?\n### Assistant: Yes.",
    }, demo(chat(MORE, NO, ASK), chat(YES))),
    Shape(FACTORY + "c4_demo.jsonl", "demonstration", {
        "text": "It is wet. It rains.", "timestamp": "2019-04-25T12:57:54Z", "url": "https://a",
    }, demo("", "It is wet. It rains.")),
    Shape(GITHUB + "modelscope/ms-swift/blob/main/swift/llm/dataset/dataset/llm.py "
          "(tigerbot-law-plugin)", "demonstration", {
        "response": "It is wet. It rains.",
    }, demo("", "It is wet. It rains.")),
    # Prompts for a reward
    Shape(GITHUB + "volcengine/verl (RL data)", "prompt", {
        "data_source": "openai/gsm8k", "prompt": [ASK], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1"}, "extra_info": {"index": 0},
    }, prompted(chat(ASK), data_source="openai/gsm8k", ability="math",
             reward_model={"style": "rule", "ground_truth": "1"}, extra_info={"index": 0})),
    Shape(HUB + "agentica-org/DeepScaleR-Preview-Dataset", "prompt", {
        "problem": "Is it wet?", "answer": "Yes.", "solution": "It is.",
    }, prompted(answer="Yes.", solution="It is.")),
    Shape(HUB + "openai/gsm8k (for a reward)", "prompt", {
        "question": "Is it wet?", "answer": "1",
    }, prompted(answer="1")),
    Shape(HUB + "Dahoas/static-hh", "prompt", {
        "prompt": "\n\nHuman: Why?\n\nAssistant: No.\n\nHuman: Is it wet?\n\nAssistant:",
    }, prompted(chat(MORE, NO, ASK))),
    Shape(HUB + "OpenAssistant/oasst1", "prompt", {
        "message_id": "1", "parent_id": None, "text": "Is it wet?", "role": "prompter",
    }, prompted(message_id="1", parent_id=None)),
    Shape(SWIFT + " (GRPO)", "prompt", {
        "messages": [SYSTEM, ASK], "solution": "Yes.",
    }, prompted(chat(SYSTEM, ASK), solution="Yes.")),
]  # fmt: skip


def read(folder: Path, kind: Kind, *rows: Mapping[str, Any], **options: Any) -> Loaded:
    return load([Source(write(folder / "rows.jsonl", *rows))], kind, **options)


@pytest.mark.parametrize("shape", SHAPES_READ, ids=lambda shape: shape.source.rpartition("/")[2])
def test_a_public_row_becomes_this_example(shape: Shape, tmp_path: Path) -> None:
    loaded = read(tmp_path, shape.kind, shape.row)
    assert [replace(example, origin=HERE) for example in loaded.examples] == [shape.example]


def test_at_least_fifty_different_shapes_from_twenty_sources() -> None:
    columns = {(shape.kind, *sorted(shape.row), repr(shape.example)) for shape in SHAPES_READ}
    assert len(columns) == len(SHAPES_READ) >= 50
    assert len({shape.source.partition(" ")[0] for shape in SHAPES_READ}) >= 20


def test_every_line_of_the_table_has_a_row(tmp_path: Path) -> None:
    formats = {read(tmp_path, s.kind, s.row).files[0].format for s in SHAPES_READ}
    assert SHAPES.keys() - formats == set()


# Transcripts


TRANSCRIPT = "\n\nHuman: Why?\n\nAssistant: No.\n\nHuman: Is it wet?\n\nAssistant:"


def test_a_transcript_stays_text_without_a_chat_template(tmp_path: Path) -> None:
    row = {"chosen": f"{TRANSCRIPT} Yes.", "rejected": f"{TRANSCRIPT} No."}
    [example] = read(tmp_path, "preference", row).examples
    for plain in (encoder(None), encoder(as_chat=False)):
        as_text = encoded(plain, pair(TRANSCRIPT, " Yes.", " No."))
        unit = encoded(plain, example)
        assert (unit.prompt_ids, unit.answers) == (as_text.prompt_ids, as_text.answers)
        assert plain.encode_prompt(example.prompt) == unit.prompt_ids
    as_turns = encoded(encoder(), chat_pair(MORE, NO, ASK))
    unit = encoded(encoder(), example)
    assert (unit.prompt_ids, unit.answers) == (as_turns.prompt_ids, as_turns.answers)
    [example] = read(tmp_path, "prompt", {"prompt": TRANSCRIPT}).examples
    assert prompt_columns(example.prompt) == {"prompt": TRANSCRIPT}
    assert plain.rendered_as(example.prompt) == [TRANSCRIPT]
    assert plain.encode_prompt(example.prompt) == plain.encode_prompt(TRANSCRIPT)
    marked = {"text": "### Human: Is it wet?### Assistant: Yes."}
    [example] = read(tmp_path, "demonstration", marked).examples
    unit = encoded(encoder(None), example)
    as_text = encoded(encoder(None), demo("### Human: Is it wet?### Assistant:", " Yes."))
    assert (unit.prompt_ids, unit.answers) == (as_text.prompt_ids, as_text.answers)


def test_pairs_of_transcripts_with_the_marks_of_guanaco_become_turns(tmp_path: Path) -> None:
    start = "### Human: Why?### Assistant: No.\n### Human: Is it wet?\n### Assistant:"
    row = {"chosen": f"{start} Yes.", "rejected": f"{start} No."}
    [example] = read(tmp_path, "preference", row).examples
    assert replace(example, origin=HERE) == chat_pair(MORE, NO, ASK)


def test_a_transcript_next_to_tools_or_other_turns_becomes_turns(tmp_path: Path) -> None:
    answers = {"chosen": " Yes.", "rejected": " No."}
    row = {"prompt": "Human: Is it wet?\n\nAssistant:", **answers, "tools": [TOOL]}
    [example] = read(tmp_path, "preference", row).examples
    assert replace(example, origin=HERE) == chat_pair(ASK, tools=(TOOL,))
    repeated = {name: TRANSCRIPT + answer for name, answer in answers.items()}
    [example] = read(tmp_path, "preference", {"prompt": TRANSCRIPT, **repeated}).examples
    assert replace(example, origin=HERE) == chat_pair(MORE, NO, ASK)


@pytest.mark.parametrize("prompt", [
    "\n\nHuman: Why?\n\nHuman: Is it wet?\n\nAssistant:",
    "\n\nAssistant: Hi.\n\nHuman: Is it wet?\n\nAssistant:",
    "Explain this.\n\nHuman: Is it wet?\n\nAssistant:",
])  # fmt: skip
def test_a_text_that_is_no_transcript_stays_text(prompt: str, tmp_path: Path) -> None:
    row = {"chosen": f"{prompt} Yes.", "rejected": f"{prompt} No."}
    [example] = read(tmp_path, "preference", row).examples
    assert replace(example, origin=HERE) == pair(prompt, " Yes.", " No.")


def test_transcripts_with_different_beginnings_are_bad_rows(tmp_path: Path) -> None:
    other = TRANSCRIPT.replace("Why?", "How?")
    with raises_error("row-prompt-not-shared", where="rows.jsonl:1"):
        read(tmp_path, "preference", {"chosen": f"{TRANSCRIPT} Yes.", "rejected": f"{other} No."})


# Rows whose meaning is not certain

PROMPT = {"prompt": "Is it wet?"}
TWO = {**PROMPT, "response_a": "Yes.", "response_b": "No."}


def test_ties_and_battles_of_other_turns_are_left_out_and_counted(tmp_path: Path) -> None:
    battle = {"conversation_a": [ASK, YES], "conversation_b": [ASK, NO]}
    longer = {"conversation_a": [ASK, YES, MORE, NO], "conversation_b": [ASK, NO, MORE, YES]}
    verdicts = ["model_a", "tie", "tie (bothbad)", "both_bad", "model_b"]
    rows = [{**battle, "winner": verdict} for verdict in verdicts]
    loaded = read(tmp_path, "preference", *rows, {**longer, "winner": "model_a"})
    assert [e.chosen for e in loaded.examples] == [chat(YES), chat(NO)]  # type: ignore[union-attr]
    [file] = loaded.files
    assert (file.rows, file.bad, sum(file.unused.values())) == (6, 0, 4)
    assert [origin.line for origin, _ in loaded.unused] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("row", "index"),
    [
        ({"winner": "gpt-4", "model_a": "llama", "model_b": "gpt-4"}, 1),
        ({"winner": "A"}, 0),
        ({"winner": "Response B"}, 1),
        ({"preference": "first"}, 0),
        ({"better": "response_b"}, 1),
    ],
)
def test_verdicts_that_name_an_answer(row: dict[str, Any], index: int, tmp_path: Path) -> None:
    [example] = read(tmp_path, "preference", {**TWO, **row}).examples
    assert isinstance(example, Preference)
    assert example.chosen == ("Yes.", "No.")[index]


@pytest.mark.parametrize("value", ["gpt-4", "better", "neither a nor b is", 3, "not a"])
def test_other_verdicts_are_asked_about(value: object, tmp_path: Path) -> None:
    with raises_error("row-winner-unknown", where="rows.jsonl", fix="response_a") as raised:
        read(tmp_path, "preference", {**TWO, "winner": value})
    assert repr(value) in raised.error.message


@pytest.mark.parametrize(
    ("first", "second", "winner"),
    [
        ("completion_a", "completion_b", "b"),
        ("response1", "response2", 2),
        ("answer_A", "answer_B", "answer_B"),
        ("output_0", "output_1", 1),
    ],
)
def test_names_of_two_answers(first: str, second: str, winner: object, tmp_path: Path) -> None:
    row = {"question": "q", first: "No.", second: "Yes.", "winner": winner}
    [example] = read(tmp_path, "preference", row).examples
    assert isinstance(example, Preference)
    assert (example.chosen, example.rejected) == ("Yes.", "No.")


def pasted(fix: str, number: int) -> dict[str, str]:
    """The mapping of this number that a message holds."""
    mapping = fix.split("{")[number].partition("}")[0]
    return dict(entry.split(": ") for entry in mapping.split(", "))


def test_a_number_that_names_neither_answer_is_asked_about_once(tmp_path: Path) -> None:
    rows = [{**TWO, "label": label} for label in (1, 0)]
    with raises_error("row-winner-unknown", fix="format: pairwise_feedback") as raised:
        read(tmp_path, "preference", *rows)
    path = write(tmp_path / "rows.jsonl", *rows)
    for number, chosen in ((1, ["Yes.", "No."]), (2, ["No.", "Yes."])):
        keys = pasted(str(raised.error.fix), number)
        source = Source(path, format="pairwise_feedback", keys=keys)
        examples = load([source], "preference").examples
        assert [e.chosen for e in examples] == chosen  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("answers", "winner", "values"),
    [
        (("response_1", "response_2"), "label", (1, 0)),
        (("response_1", "response_2"), "label", (1, 1)),
        (("response_0", "response_1"), "label", (1, 0)),
        (("output_1", "output_2"), "preference", (0, 1)),
        (("response_1", "response_2"), "winner", (1, 2, 0)),
        (("response_1", "response_2"), "winner", (1, 0)),
    ],
)
def test_numbers_that_may_be_thumbs_are_asked_about_also_if_bad_rows_are_skipped(
    answers: tuple[str, str], winner: str, values: tuple[int, ...], tmp_path: Path
) -> None:
    texts = dict(zip(answers, ("Yes.", "No."), strict=True))
    rows = [{**PROMPT, **texts, winner: value} for value in values]
    with raises_error("row-winner-unknown", fix="format: pairwise_feedback"):
        read(tmp_path, "preference", *rows, on_bad_row="skip")


def test_numbers_of_answers(tmp_path: Path) -> None:
    rows = [{**PROMPT, "response_1": "1", "response_2": "2", "label": n} for n in (1, 2, 1)]
    loaded = read(tmp_path, "preference", *rows)
    assert [e.chosen for e in loaded.examples] == ["1", "2", "1"]  # type: ignore[union-attr]
    rows = [{**PROMPT, "response_0": "0", "response_1": "1", "choice": n} for n in (1, 0, 1)]
    loaded = read(tmp_path, "preference", *rows)
    assert [e.chosen for e in loaded.examples] == ["1", "0", "1"]  # type: ignore[union-attr]


@pytest.mark.parametrize("names", [
    ("prompt", "response_a", "response_b", "winner_a", "winner_b", "tie"),
    ("question", "answer_1", "answer_2", "winner_model_1", "winner_model_2", "winner_tie"),
])  # fmt: skip
def test_other_names_of_flags_and_ties(names: tuple[str, ...], tmp_path: Path) -> None:
    flags = [(1, 0, 0), (0, 0, 1), (False, True, False), (0, 1, 1), (0.2, 0.5, 0.3)]
    rows = [dict(zip(names, ("q", "Yes.", "No.", *cells), strict=True)) for cells in flags]
    loaded = read(tmp_path, "preference", *rows)
    assert [e.chosen for e in loaded.examples] == ["Yes.", "No.", "No."]  # type: ignore[union-attr]
    assert [origin.line for origin, _ in loaded.unused] == [2, 4]


def test_a_flag_for_ties_is_not_suggested_as_the_label(tmp_path: Path) -> None:
    flags = [{"model_a_won": a, "model_b_won": b, "tie": t} for a, b, t in ((1, 0, 0), (0, 0, 1))]
    with raises_error("format-unknown-columns", fix="format: comparison_scores") as raised:
        read(tmp_path, "preference", *({**TWO, **cells} for cells in flags))
    assert "label: tie" not in str(raised.error.fix)
    keys = {**pasted(str(raised.error.fix), 3), "score_a": "model_a_won", "score_b": "model_b_won"}
    source = Source(str(tmp_path / "rows.jsonl"), format="comparison_scores", keys=keys)
    assert len(load([source], "preference").examples) == 1


ARENA = {"prompt": '["Why?"]', "response_a": '["No."]', "response_b": '["Yes."]'}


def test_flags_of_winners_and_their_ties(tmp_path: Path) -> None:
    flags = [(1, 0, 0), (0, 0, 1), (0, 1, 0), (True, False, False)]
    names = ("winner_model_a", "winner_model_b", "winner_tie")
    loaded = read(
        tmp_path, "preference", *({**ARENA, **dict(zip(names, f, strict=True))} for f in flags)
    )
    chosen = [e.chosen for e in loaded.examples if isinstance(e, Preference)]
    assert chosen == [chat(NO), chat(YES), chat(NO)]
    assert [origin.line for origin, _ in loaded.unused] == [2]
    assert loaded.ignored_columns == {}


def test_other_lists_in_text_stay_text(tmp_path: Path) -> None:
    flags = {"winner_model_a": 1, "winner_model_b": 0}
    for changed in ({"prompt": "List it."}, {"response_a": "[1, 2]"}, {"response_b": '["a", "b"]'}):
        row = {**ARENA, **changed}
        [example] = read(tmp_path, "preference", {**row, **flags}).examples
        assert replace(example, origin=HERE) == pair(*list(row.values()))
    texts = ('["b"]', '["a"]', '["c"]')
    row = {"prompt": texts[0], "chosen": texts[1], "rejected": texts[2]}
    [example] = read(tmp_path, "preference", row).examples
    assert replace(example, origin=HERE) == pair(*texts)


def test_a_lead_between_other_names_than_those_of_the_answers_is_asked_about(
    tmp_path: Path,
) -> None:
    rows = [{**TWO, "score_1_minus_2": n} for n in (1, -1)]
    with raises_error("format-unknown-columns", fix="preference_strength: score_1_minus_2"):
        read(tmp_path, "preference", *rows)


@pytest.mark.parametrize(("column", "values", "is_swapped"), [
    ("preference_score", (-2, 2, 0), False),
    ("preference", (-3, 1), True),
    ("preference_strength", (1, 0, 3), False),
    ("overall_preference", (1, 1, 0), True),
    ("label", (2, -1), False),
    ("human_vote", (True, False), True),
])  # fmt: skip
def test_a_number_for_one_of_two_answers_is_asked_about(
    column: str, values: tuple[Any, ...], is_swapped: bool, tmp_path: Path
) -> None:
    rows = [{**TWO, column: value} for value in values]
    with raises_error(
        "row-winner-unknown" if column in ("preference", "label") else "format-unknown-columns",
        where="rows.jsonl",
        fix=column,
    ) as raised:
        read(tmp_path, "preference", *rows)
    fix = str(raised.error.fix)
    name = re.findall(r"format: (\w+)", fix)[0]
    keys = pasted(fix, 2 if is_swapped else 1)
    source = Source(str(tmp_path / "rows.jsonl"), format=name, keys=keys)
    loaded = load([source], "preference")
    is_first = [
        (float(value) > 0) is (type(value) is bool)
        for value in values
        if value != 0 or value is False
    ]
    assert [e.chosen for e in loaded.examples] == [  # type: ignore[union-attr]
        "Yes." if first is not is_swapped else "No." for first in is_first
    ]


def test_scores_do_not_replace_a_winner(tmp_path: Path) -> None:
    row = {**TWO, "score_a": 1, "score_b": 2, "winner": "a"}
    [example] = read(tmp_path, "preference", row).examples
    assert isinstance(example, Preference)
    assert example.chosen == "Yes."
    loaded = read(tmp_path, "preference", *({**TWO, "score_a": 1, "score_b": n} for n in (0, 1)))
    assert len(loaded.examples) == len(loaded.unused) == 1


MESSAGES = [
    {"message_id": "1", "text": "Is it wet?", "role": "prompter", "lang": "en"},
    {"message_id": "2", "text": "It is.", "role": "assistant", "lang": "en"},
]


@pytest.mark.parametrize(("kind", "name"), [
    ("prompt", "text_prompt"), ("demonstration", "plain_text"),
])  # fmt: skip
def test_single_messages_of_a_conversation_are_asked_about(
    kind: Kind, name: str, tmp_path: Path
) -> None:
    with raises_error(
        "format-unknown-columns", where="rows.jsonl", fix=f"format: {name}"
    ) as raised:
        read(tmp_path, kind, *MESSAGES)
    assert "messages" in str(raised.error.fix)
    source = Source(str(tmp_path / "rows.jsonl"), format=name)
    assert len(load([source], kind).examples) == 2
    with raises_error("format-unknown-columns"):
        read(tmp_path, "preference", *MESSAGES)
    [example] = read(tmp_path, "prompt", {"text": "Teach!", "role": "teacher"}).examples
    assert example.prompt == "Teach!"


@pytest.mark.parametrize("dropped", [(), ("parent_id",), ("message_tree_id",)])
def test_only_messages_that_begin_a_conversation_are_prompts(
    dropped: tuple[str, ...], tmp_path: Path
) -> None:
    # https://huggingface.co/datasets/OpenAssistant/oasst1
    roles = ("prompter", "assistant", "prompter", "assistant", "prompter")
    parents = (None, "0", "1", None, None)
    rows = [
        {"message_id": f"{n}", "parent_id": parent, "message_tree_id": tree, "text": f"text {n}",
         "role": role, "lang": "en", "labels": {"name": ["spam"], "value": [0.0]}}
        for n, (role, parent, tree) in enumerate(zip(roles, parents, "00034", strict=True))
    ]  # fmt: skip
    rows = [{name: v for name, v in row.items() if name not in dropped} for row in rows]
    loaded = read(tmp_path, "prompt", *rows)
    assert [example.prompt for example in loaded.examples] == ["text 0", "text 4"]
    assert [origin.line for origin, _ in loaded.unused] == [2, 3, 4]
    assert loaded.files[0].bad == 0
    sampled = load_prompts([SourceSettings(path=str(tmp_path / "rows.jsonl"))])
    assert [prompt.prompt for prompt in sampled] == ["text 0", "text 4"]
    with raises_error("format-unknown-columns"):
        read(tmp_path, "demonstration", *rows)
    named = [{**row, "role": None, "speaker": row["role"]} for row in rows]
    source = Source(write(tmp_path / "named.jsonl", *named), keys={"role": "speaker"})
    assert len(load([source], "prompt").examples) == 2


def test_a_battle_about_the_first_of_two_rounds(tmp_path: Path) -> None:
    # https://huggingface.co/datasets/lmsys/mt_bench_human_judgments
    row = {
        "conversation_a": [SYSTEM, ASK, NO, MORE, YES],
        "conversation_b": [SYSTEM, ASK, YES, MORE, NO],
        "winner": "model_b",
        "turn": 1,
    }
    [example] = read(tmp_path, "preference", row).examples
    assert replace(example, origin=HERE) == chat_pair(SYSTEM, ASK)


def test_battles_of_several_turns_say_what_to_do(tmp_path: Path) -> None:
    battle = {"conversation_a": [ASK, YES, MORE, NO], "conversation_b": [ASK, NO, MORE, YES]}
    with raises_error("no-usable-rows", where="rows.jsonl:1", fix="first answer"):
        read(tmp_path, "preference", {**battle, "winner": "model_a", "turn": 2})
    for row in (
        {"prompt": [ASK], "response_a": [ASK, YES, MORE, NO], "response_b": [ASK, NO, MORE, YES],
         "winner": "a"},
        {"prompt": "Is it wet?", "chosen": [ASK, YES, MORE, NO], "rejected": [ASK, NO, MORE, YES]},
    ):  # fmt: skip
        with raises_error("row-completion-turns", where="rows.jsonl:1", fix="first answer"):
            read(tmp_path, "preference", row)


@pytest.mark.parametrize("names", [
    ("score_chosen", "score_rejected"), ("chosen_rating", "rejected_rating"),
    ("chosen-rating", "rejected-rating"), ("reward_chosen", "reward_rejected"),
])  # fmt: skip
def test_pairs_that_their_scores_contradict_are_reported(
    names: tuple[str, str], tmp_path: Path
) -> None:
    numbers = [(2, 1), (1, 2), (1, 1), (1, None), ("good", "bad"), ("3", "4")]
    rows = [
        {
            "prompt": f"{n}",
            "chosen": "Yes.",
            "rejected": "No.",
            **dict(zip(names, pair, strict=True)),
        }
        for n, pair in enumerate(numbers)
    ]
    path = write(tmp_path / "rows.jsonl", *rows, {**rows[0], "prompt": "c", "chosen": "Yes!"})
    loaded = load([Source(path)], "preference")
    result = audit(loaded, encoder().encode_all(loaded.examples, loaded.sources), encoder())
    assert result.findings["contradicted_pairs"] == Finding(2, (f"{path}:2", f"{path}:6"))
    assert "contradicted_pairs" in shown_findings(result)
    assert len(loaded.examples) == 7


def test_other_formats_of_pairs_have_scores(tmp_path: Path) -> None:
    scores = {"chosen": "Yes.", "rejected": "No.", "score_chosen": 1, "score_rejected": 2}
    for prompt in ({"instruction": "q"}, {"input": "q"}, {"conversations": [ASK]}):
        loaded = read(tmp_path, "preference", {**prompt, **scores})
        [example] = loaded.examples
        assert isinstance(example, Preference)
        assert example.is_contradicted
        assert loaded.ignored_columns == {}


def test_a_winner_that_the_scores_contradict_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *(
        {**TWO, "score_a": 1, "score_b": n, "winner": winner}
        for n, winner in ((2, "a"), (2, "b"), (0, "b"))
    ))  # fmt: skip
    loaded = load([Source(path)], "preference")
    result = audit(loaded, encoder().encode_all(loaded.examples, loaded.sources), encoder())
    assert result.findings["contradicted_pairs"] == Finding(2, (f"{path}:1", f"{path}:3"))


def test_keys_for_nested_columns_name_places_that_exist(tmp_path: Path) -> None:
    row = {
        "input": {"question": "Is it wet?", "lang": "en"},
        "result": {"model": {"answer": "Yes."}}, "liked": True,
    }  # fmt: skip
    with raises_error("format-unknown-columns", fix="did you mean keys") as raised:
        read(tmp_path, "judgement", row)
    keys = pasted(str(raised.error.fix), 1)
    source = Source(str(tmp_path / "rows.jsonl"), keys=keys)
    [example] = load([source], "judgement").examples
    assert replace(example, origin=HERE) == judged(label=True)
    nested = {"data": {"messages": [ASK, YES]}, "thumb": "up"}
    with raises_error("format-unknown-columns", fix="did you mean keys") as raised:
        read(tmp_path, "judgement", nested)
    source = Source(str(tmp_path / "rows.jsonl"), keys=pasted(str(raised.error.fix), 1))
    [example] = load([source], "judgement").examples
    assert replace(example, origin=HERE) == judged(chat(ASK), chat(YES), label=True)


@pytest.mark.parametrize(("column", "stars", "threshold"), [
    ("rating", range(1, 6), 4), ("stars", range(1, 6), 4), ("score", (0.1, 0.7, 0.9), 0.7),
])  # fmt: skip
def test_one_message_holds_all_settings_that_turn_stars_into_thumbs(
    column: str, stars: Sequence[float], threshold: float, tmp_path: Path
) -> None:
    rows = [{"question": f"q {n}", "answer": "a", column: n} for n in stars]
    code = "format-unknown-columns" if column == "stars" else "kind-mismatch"
    with raises_error(code, fix="scores_to_judgements") as raised:
        read(tmp_path, "judgement", *rows)
    fix = str(raised.error.fix)
    assert f"{min(stars):g} to {max(stars):g}" in fix
    assert f"data.threshold: {threshold:g}" in fix
    keys = pasted(fix, 1) if column == "stars" else {}
    path = write(tmp_path / "rows.jsonl", *rows)
    loaded = load(
        [Source(path, keys=keys)], "judgement", convert="scores_to_judgements", threshold=threshold
    )
    assert [e.label for e in loaded.examples] == [n >= threshold for n in stars]  # type: ignore[union-attr]


def test_a_conversation_with_a_thumb_or_a_rejected_answer(tmp_path: Path) -> None:
    [example] = read(tmp_path, "judgement", {"messages": [ASK, YES], "thumbs_up": False}).examples
    assert isinstance(example, Judgement)
    assert example.label is False
    row = {"messages": [ASK, YES], "rejected_response": "No."}
    [example] = read(tmp_path, "demonstration", row).examples
    assert isinstance(example, Demonstration)


def test_a_prompt_in_the_answers_goes_before_a_column_of_another_name(tmp_path: Path) -> None:
    row = {"question": "Wet?", "chosen": [ASK, YES], "rejected": [ASK, NO]}
    [example] = read(tmp_path, "preference", row).examples
    assert example.prompt == chat(ASK)


def test_two_answers_without_a_verdict_are_asked_about(tmp_path: Path) -> None:
    for row in (TWO, {"question": "q", "response_a": "Yes.", "response_b": "No."}):
        with raises_error("format-unknown-columns", fix="chosen: response_a") as raised:
            read(tmp_path, "preference", row)
        assert "completion:" not in str(raised.error.fix)
        keys = pasted(str(raised.error.fix), 1)
        source = Source(write(tmp_path / "rows.jsonl", row), keys=keys)
        assert load([source], "preference").examples[0].prompt == row.get("prompt", "q")


@pytest.mark.parametrize(
    ("row", "kind", "keys"),
    [
        ({"question": "q", "answer": "a", "is_correct": True}, "demonstration", "label"),
        ({"question": "q", "answer": "a", "upvotes": 3}, "demonstration", "completion"),
        ({"question": "q", "choices": ["a", "b"], "answer": "b"}, "demonstration", "completion"),
        ({"passage": "It is wet.", "question": "q", "answer": "a"}, "demonstration", "completion"),
        ({"prompt": "q", "response": "a", "is_safe": False}, "judgement", "label"),
    ],
)
def test_columns_that_may_matter_are_asked_about(
    row: dict[str, Any], kind: Kind, keys: str, tmp_path: Path
) -> None:
    with raises_error("format-unknown-columns", fix=f"{keys}: ") as raised:
        read(tmp_path, kind, row)
    source = Source(write(tmp_path / "rows.jsonl", row), keys=pasted(str(raised.error.fix), 1))
    [example] = load([source], "judgement" if keys == "label" else kind).examples
    assert isinstance(example, Judgement if keys == "label" else Demonstration)


def test_stars_next_to_the_formats_own_columns_are_asked_about(tmp_path: Path) -> None:
    rows = [{"prompt": f"q {n}", "completion": "a", "stars": n} for n in (1, 3, 5)]
    with raises_error("format-unknown-columns", fix="score: stars") as raised:
        read(tmp_path, "judgement", *rows)
    assert "scores_to_judgements" in str(raised.error.fix)
    assert len(read(tmp_path, "demonstration", *rows).examples) == 3


def test_stars_are_not_read_as_thumbs(tmp_path: Path) -> None:
    rows = [{"question": f"q {n}", "answer": "a", "rating": n} for n in range(1, 6)]
    with raises_error("kind-mismatch", fix="scores_to_judgements") as raised:
        read(tmp_path, "judgement", *rows)
    assert "1 to 5" in str(raised.error.fix)
    [*examples] = read(
        tmp_path, "judgement", *rows, convert="scores_to_judgements", threshold=4
    ).examples
    assert [e.label for e in examples] == [False] * 3 + [True] * 2  # type: ignore[union-attr]


def test_a_text_next_to_another_text_is_no_plain_text(tmp_path: Path) -> None:
    with raises_error("kind-mismatch"):
        read(tmp_path, "demonstration", {"text": "It is wet.", "summary": "Quite wet."})
    with raises_error("format-unknown-columns"):
        read(tmp_path, "demonstration", {"response": "It is wet.", "article": "It rains a lot."})


def test_the_first_row_of_a_file_is_shown_as_it_was_read(tmp_path: Path) -> None:
    rows = [{**TWO, "winner": winner} for winner in ("tie", "b", "a")]
    [text] = describe_first_rows(read(tmp_path, "preference", *rows), tiny_tokenizer())
    heading, *parts = text.split("\n  ")
    assert "rows.jsonl" in heading
    assert parts == ["prompt: Is it wet?", "chosen: No.", "rejected: Yes."]
    rows = [{"question": "a " * 90, "response": "Yes.", "thumbs_up": False}]
    [text] = describe_first_rows(read(tmp_path, "judgement", *rows), tiny_tokenizer())
    assert "label: down" in text
    assert "feedback" not in text
    assert max(map(len, text.split("\n  ")[1:])) < 80


def test_the_first_row_of_token_ids_is_shown_as_text(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("Wet?", "It is")]
    row = {"prompt_ids": ids[0], "completion_ids": ids[1], "completion": "It is", "stop": "length"}
    [text] = describe_first_rows(read(tmp_path, "demonstration", row), tokenizer)
    assert text.split("\n  ")[1:] == ["prompt: Wet?", "completion: It is"]


def test_a_flag_next_to_an_answer_is_not_left_out(tmp_path: Path) -> None:
    rows = [{**PROMPT, "response": "Yes.", "is_safe": is_safe} for is_safe in (True, False)]
    with raises_error("format-unknown-columns", fix="label: is_safe"):
        recognize(DataFile(write(tmp_path / "rows.jsonl", *rows)))


def test_keys_name_the_columns_of_formats_with_a_test(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"chat": [SYSTEM, ASK]})
    [example] = load([Source(path, keys={"messages": "chat"})], "prompt").examples
    assert replace(example, origin=HERE) == prompted(chat(SYSTEM, ASK))
    graded = [{"text": "Yes.", "rank": 1}, {"text": "No.", "rank": 2}]
    path = write(tmp_path / "graded.jsonl", {"prompt": "Is it wet?", "replies": graded})
    [example] = load([Source(path, keys={"answers": "replies"})], "ranking").examples
    assert replace(example, origin=HERE) == ranked(-1.0, -2.0)
