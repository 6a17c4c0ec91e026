"""Commands whose outputs are compared: status, standard output and error, and every file.

They run one after the other in a copy of the inputs, so that one uses the files of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.regression.exports import EXPORTS, Export

Change = str | bytes | tuple[str, str] | float | PurePosixPath | None
"""Of a file before a command: its text or bytes; a text in it that another one replaces; the share
of it that remains; the folder that is copied to it; or None, which removes it."""


@dataclass(frozen=True)
class Command:
    """words: after ``valence``. needs: names of commands that run before it. changes: file, which
    may be a pattern if it exists already -> the change."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    changes: Mapping[str, Change] = field(default_factory=dict[str, Change])


def select(commands: Sequence[Command], names: Iterable[str]) -> list[Command]:
    """The commands with these names, and those that they need."""
    by_name = {command.name: command for command in commands}
    selected = set[str]()
    remaining = [name for name in names if name in by_name]
    while remaining:
        selected.add(name := remaining.pop())
        remaining += by_name[name].needs
    return [command for command in commands if command.name in selected]


def _command(name: str, words: str, *more: str, needs: str = "", **changes: Change) -> Command:
    """more: words that contain spaces. needs: names, separated by spaces."""
    return Command(name, (*words.split(), *more), tuple(needs.split()), changes)


def _import(export: Export) -> Command:
    words = ("import", export.tool, *export.paths, "--out", f"imported/{export.name}.jsonl")
    return Command(f"import_{export.name}", (*words, *export.options), ("make_folders",))


THUMBS = "thumbs_train.jsonl"
SHORT = "--max-new-tokens 8"
OUTPUTS = (
    # Rows
    _command("make_folders", "--version", **{"imported/.keep": "", "out/.keep": ""}),
    *(_import(export) for export in EXPORTS),
    _command(
        "import_again",
        "import langfuse exports/langfuse/scores.jsonl exports/langfuse/steps.jsonl"
        " --out imported/langfuse.jsonl --include-machine --json",
        needs="import_langfuse",
    ),
    _command("import_list", "import --list"),
    _command("audit", f"audit {THUMBS} stars_train.jsonl"),
    _command("audit_json", "audit pairs_train.jsonl --json"),
    _command(
        "audit_with_a_model",
        f"audit {THUMBS} --model models/llama --out out/review.jsonl --top 5",
        needs="make_folders",
    ),
    _command("inspect", "inspect recipes/kto.yaml --row 3 --stage all"),
    _command("split", f"split {THUMBS} --share 0.3 --train out/train.jsonl"
             " --held-out out/held_out.jsonl", needs="make_folders"),
    _command("init", f"init {THUMBS} --model models/llama --out out/recipe.yaml",
             needs="make_folders"),
    # Recipes
    _command("check", "check recipes/kto.yaml"),
    _command("check_all", "check recipes/online_grpo.yaml --all"),
    # Runs
    _command("train_kto", "train recipes/kto.yaml train.max_steps=3 eval.every=2 run.dir=runs/kto"),
    _command(
        "train_grpo",
        "train recipes/online_grpo.yaml train.max_steps=2 run.dir=runs/grpo"
        " run.samples.prompts=1 run.samples.max_new_tokens=4",
    ),
    _command("train_done", "train recipes/kto.yaml train.max_steps=3 eval.every=2 run.dir=runs/kto",
             needs="train_kto"),
    _command("resume_with_more_steps", "train recipes/kto.yaml train.max_steps=4 eval.every=2"
             " run.dir=runs/kto --json", needs="train_kto"),
    _command("runs", "report", needs="train_kto train_grpo"),
    _command("runs_json", "report --json", needs="train_kto train_grpo"),
    _command("report", "report runs/kto", needs="train_kto"),
    # Runs with equal times, as a section is only shown if they differ.
    _command("report_comparison", "report runs/kto runs/copy --out out/comparison.html",
             needs="make_folders train_kto", **{"runs/copy": PurePosixPath("runs/kto")}),
    _command("report_markdown", "report runs/kto runs/grpo --md", needs="train_kto train_grpo"),
    # Models
    _command("sample_greedy", f"sample runs/kto {SHORT} --temperature 0 --prompt",
             "What is the sun?", needs="train_kto"),
    _command("sample_seed", f"sample models/llama {SHORT} --seed 7 -n 3 --system sun"
             " --prompt moon"),
    _command("sample_file", f"sample runs/grpo {SHORT} --data prompts_held_out.jsonl -n 2 --seed 3"
             " --out out/answers.jsonl", needs="make_folders train_grpo"),
    _command("sample_again", f"sample runs/grpo {SHORT} --data prompts_held_out.jsonl -n 2 --seed 3"
             " --out out/answers.jsonl", needs="sample_file"),
    _command("score_with_a_rule", "score recipes/kto.yaml --data out/answers.jsonl --reward length"
             " --out out/scored.jsonl", needs="sample_file"),
    _command("score_with_a_function", "score recipes/online_grpo.yaml --data out/answers.jsonl"
             " --out out/rewarded.jsonl", needs="sample_file"),
    _command("score_implicit", "score runs/kto --data thumbs_held_out.jsonl"
             " --out out/implicit.jsonl", needs="make_folders train_kto"),
    _command("score_with_a_reward_model", "score models/judge --data thumbs_held_out.jsonl"
             " --out out/judged.jsonl", needs="make_folders"),
    _command("evaluate", "evaluate runs/kto --data thumbs_held_out.jsonl --out out/metrics.json",
             needs="make_folders train_kto"),
    _command("compare", f"compare recipes/kto.yaml runs/kto --prompts prompts_held_out.jsonl"
             f" --judge regression_rewards:vowels --out comparison {SHORT} --json",
             needs="train_kto"),
    _command("export_gguf", "export runs/kto exported/kto --gguf f16 --gguf q8_0 --no-verify",
             needs="train_kto"),
    _command("export_merged", "export runs/grpo exported/merged", needs="train_grpo"),
    _command("export_adapter", "export runs/grpo exported/adapter --adapter --no-verify",
             needs="train_grpo"),
    # Reference
    _command("recipe", "recipes kto"),
    _command("loss", "losses kto"),
    _command("rule", "rewards contains"),
)  # fmt: skip
