"""Write feedback.jsonl and held_out.jsonl: answers sampled from SmolLM2-135M-Instruct and rated by
the rule in judge.py.

    python -m examples.quickstart.make_feedback

The same machine and library versions give the same files; another processor rounds differently and
may sample other answers.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.assets import smollm2
from examples.quickstart.judge import judge
from valence.data.encode import Encoder
from valence.rollouts import HFGenerator, Sampling
from valence.types import Chat, Completion

HERE = Path(__file__).parent
TEMPERATURE, MAX_NEW_TOKENS = 0.6, 128


def main() -> None:
    folder = smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    encoder = Encoder(AutoTokenizer.from_pretrained(folder), max_length=1024)
    generator = HFGenerator(model, encoder.tokenizer, end_ids=encoder.end_ids)
    for prompts, out, n, seed in (
        ("prompts", "feedback", 2, 1),
        ("held_out_prompts", "held_out", 1, 2),
    ):
        chats = read_prompts(HERE / f"{prompts}.jsonl")
        sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS, seed=seed)
        answers = generator.generate([encoder.encode_prompt(chat) for chat in chats], n, sampling)
        judged = [
            (chat, answer)
            for chat, several in zip(chats, answers, strict=True)
            for answer in several
        ]
        write_judged(HERE / f"{out}.jsonl", judged)


def read_prompts(path: Path) -> list[Chat]:
    """The prompts of a file with ``{"prompt": [message, ...]}`` on each line."""
    return [
        Chat(tuple(json.loads(line)["prompt"]))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def write_judged(out: Path, answers: Sequence[tuple[Chat, Completion]]) -> None:
    """Writes a judged row per answer, without those that were cut off, and prints what was kept."""
    reasons: Counter[str] = Counter()
    with out.open("w", encoding="utf-8") as file:
        for chat, answer in answers:
            # In training an answer is followed by its end-of-turn. A cut-off answer never had one:
            # it is no training row.
            if answer.stop == "length":
                continue
            label, reason = judge(chat.messages[-1]["content"], answer.text, finished=True)
            reasons[reason] += 1
            turn = {"role": "assistant", "content": answer.text}
            row = {"prompt": chat.messages, "completion": [turn], "label": label}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(
        f"{out.name}: {reasons.total()} rows; {len(answers) - reasons.total()} cut-off answers "
        f"left out"
    )
    for reason, count in reasons.most_common():
        print(f"  {count:4d}  {reason}")


if __name__ == "__main__":
    main()
