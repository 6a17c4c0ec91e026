"""Train on a file of thumbs, then compare the answers to held-out questions before and after."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

import valence
from examples.demo.assets import quick_dtype, smollm2
from examples.demo.measure import mcnemar, share
from examples.quickstart.judge import judge
from examples.quickstart.make_feedback import MAX_NEW_TOKENS, TEMPERATURE, read_prompts
from valence.rollouts import Sampling
from valence.runs.signals import Interrupted
from valence.types import Chat, Completion

HERE = Path(__file__).parent
HELD_OUT = HERE.parent / "quickstart" / "held_out_prompts.jsonl"
FOLDER = Path("runs/demo")
SHOWN = 3


def main() -> None:
    console = Console()
    console.print(
        "Training SmolLM2-135M-Instruct on 193 thumbs (KTO with a LoRA adapter). This takes five "
        "to ten minutes."
    )
    model, recipe = smollm2(), HERE / "recipe.yaml"
    if FOLDER.exists():
        console.print(
            f"Removing the earlier demo in {FOLDER}. (`valence train` never deletes a run.)"
        )
        shutil.rmtree(FOLDER)
    changed = [f"model.name={model}", f"model.dtype={quick_dtype()}"]
    run = valence.train(
        recipe, overrides=changed, console=console, command=f"valence train {recipe}"
    )

    prompts = read_prompts(HELD_OUT)
    sampling = Sampling(temperature=TEMPERATURE, max_new_tokens=MAX_NEW_TOKENS, seed=3)
    console.print(
        f"Asking the new model, then the old one, {len(prompts)} questions that are not in the "
        f"training data."
    )
    after = [answer for (answer,) in run.sample(prompts, sampling, quiet=False)]
    with run.policy.model.disable_adapter():  # type: ignore[operator]
        before = [answer for (answer,) in run.sample(prompts, sampling, quiet=False)]
    show_answers(prompts, before, after, console)

    console.print(f"Report  {FOLDER / 'report.html'}  (open it in a browser)")
    console.print(f"Model   {FOLDER / 'model'}")
    console.print(f"Ask it  valence sample {FOLDER} --prompt 'Why do leaves turn red?'")


def show_answers(
    prompts: Sequence[Chat],
    before: Sequence[Completion],
    after: Sequence[Completion],
    console: Console,
) -> None:
    """Print the share of thumbs up before and after, by the rule of the feedback, and a few answers
    side by side.
    """
    questions = [str(prompt.messages[-1]["content"]) for prompt in prompts]
    table = Table(title=f"Answers to {len(prompts)} held-out questions", title_justify="left")
    for name in ("", "thumbs up (95 % interval)", "mean words", "truncated"):
        table.add_column(name, justify="right" if name else "left")
    labels = {}
    for name, answers in (("before", before), ("after", after)):
        labels[name] = [
            judge(q, a.text, a.stop == "eos")[0] for q, a in zip(questions, answers, strict=True)
        ]
        words = sum(len(a.text.split()) for a in answers) / len(answers)
        truncated = sum(a.stop == "length" for a in answers)
        table.add_row(name, share(labels[name]).percent(), f"{words:.0f}", str(truncated))
    console.print(table)
    p = mcnemar(labels["before"], labels["after"])
    console.print(f"Exact McNemar test, paired by question: p = {p:.1g}", highlight=False)
    console.print(
        "A fixed rule gives the thumbs. It rates length, form and relevance, and does not check "
        "facts."
    )

    side_by_side = Table(show_lines=True)
    for name in ("question", "before", "after"):
        side_by_side.add_column(name, ratio=1 if name == "question" else 2)
    for question, old, new in list(zip(questions, before, after, strict=True))[:SHOWN]:
        side_by_side.add_row(question, as_shown(question, old), as_shown(question, new))
    console.print(f"The first {SHOWN} questions:")
    console.print(side_by_side)


def as_shown(question: str, answer: Completion) -> Text:
    """An answer with the label that the rule gives it."""
    up, reason = judge(question, answer.text, answer.stop == "eos")
    text = Text(answer.text.strip() + (" [...]" if answer.stop == "length" else "") + "\n")
    return text.append(f"thumbs {'up' if up else 'down'}: {reason}", style="green" if up else "red")


if __name__ == "__main__":
    try:
        main()
    except (Interrupted, KeyboardInterrupt):
        sys.exit("stopped")
    except valence.UserError as error:
        sys.exit(str(error))
