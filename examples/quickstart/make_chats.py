"""Write chats.jsonl: the answers of feedback.jsonl, each with the next message of a simulated user.

python -m examples.quickstart.make_chats
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from benchmarks.hindsight.user import message, verdict

HERE = Path(__file__).parent


def main() -> None:
    rows = [json.loads(line) for line in (HERE / "feedback.jsonl").read_text("utf-8").splitlines()]
    questions = [row["prompt"][-1]["content"] for row in rows]
    rng = random.Random(0)
    with (HERE / "chats.jsonl").open("w", encoding="utf-8") as file:
        for row, question in zip(rows, questions, strict=True):
            answer = row["completion"][-1]["content"]
            text, _ = message(verdict(question, answer), questions, rng)
            reply = {"role": "user", "content": text}
            chat = {"messages": [*row["prompt"], *row["completion"], reply]}
            file.write(json.dumps(chat, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
