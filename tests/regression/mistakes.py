"""Commands with a mistake or damage in their input: exit status, and code and place of the error.

Each runs in a copy of the folder that SETUP leaves, which has rows, a model, a recipe, answers, and
a run with two checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.regression.commands import Change, Command

RECIPE = """\
method: kto
model: {name: models/llama, dtype: float32}
data:
  train: thumbs_train.jsonl
  max_length: 128
train:
  batch_size: 6
  max_steps: 2
  micro_batch_tokens: 128
eval: {train_examples: 0}
run: {dir: runs/first, save_every: 1}
"""
DPO, SFT, GRPO = (RECIPE.replace("kto", method) for method in ("dpo", "sft", "grpo"))
ONLINE = """\
method: grpo
model: {name: models/llama, dtype: float32}
data: {train: prompts_train.jsonl, max_length: 128}
reward: length
rollout: {num_rollouts: 2, max_new_tokens: 4}
train: {batch_size: 2, max_steps: 2, micro_batch_tokens: 128}
run: {dir: runs/online}
"""
SETUP = (
    Command(
        "setup_train",
        ("train", "recipe.yaml"),
        changes={
            "recipe.yaml": RECIPE,
            "online.yaml": ONLINE,
            "exports": None,
            "models/[!l]*": None,
            "models/llama-tied": None,
            "recipes": None,
        },
    ),
    Command(
        "setup_sample",
        ("sample", "runs/first", "--data", "prompts_held_out.jsonl", "--max-new-tokens", "4",
         "--temperature", "1", "--out", "answers.jsonl"),
    ),
    Command(
        "setup_compare",
        ("compare", "models/llama", "runs/first", "--prompts", "prompts_held_out.jsonl", "--judge",
         "length", "--max-new-tokens", "4", "--out", "comparison"),
    ),
    Command(
        "setup_import",
        ("import", "openai", "export.jsonl", "--out", "imported.jsonl"),
        changes={
            "export.jsonl": json.dumps({
                "input": {"messages": [{"role": "user", "content": "Hi"}]},
                "preferred_output": [{"role": "assistant", "content": "a"}],
                "non_preferred_output": [{"role": "assistant", "content": "b"}],
            }) + "\n",
            "runs/first/report.html": None,
            "comparison/report.html": None,
        },
    ),
)  # fmt: skip

THUMB = {"prompt": "p", "completion": "a", "label": True}
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}
DEMONSTRATION = {"prompt": "p", "completion": "a"}
GROUP = {"prompt": "p", "completions": ["a", "b"], "scores": [1, 2]}
CHAT = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]}
PROMPT = {"prompt": "p"}


def _error(name: str, words: str, changes: Mapping[str, Change] | None = None) -> Command:
    return Command(f"error_{name}", tuple(words.split()), changes=changes or {})


def _row(name: str, good: Mapping[str, Any], bad: object, recipe: str = RECIPE) -> Command:
    """The second of three rows is bad."""
    text = bad if isinstance(bad, str) else json.dumps(bad)
    lines = (json.dumps(good), text, json.dumps(good))
    changes: dict[str, Change] = {"rows.jsonl": "\n".join(lines) + "\n", "bad.yaml": recipe}
    return _error(f"row_{name}", "check bad.yaml data.train=rows.jsonl", changes)


def _file(name: str, path: str, content: str | bytes) -> Command:
    return _error(f"file_{name}", f"check recipe.yaml data.train={path}", {path: content})


def _recipe(name: str, content: str) -> Command:
    """A recipe with a mistake in its text."""
    return _error(f"recipe_{name}", "check bad.yaml", {"bad.yaml": content})


def _setting(name: str, *overrides: str, recipe: str = "recipe.yaml") -> Command:
    """Settings on the command line."""
    return Command(f"error_setting_{name}", ("check", recipe, *overrides))


def _added(name: str, lines: str) -> Command:
    return _recipe(name, RECIPE + lines)


def _replaced(name: str, before: str, after: str) -> Command:
    return _recipe(name, RECIPE.replace(before, after))


STEP_2, RUN = "runs/first/checkpoints/step-2", "runs/first"
RESUME = "train recipe.yaml train.max_steps=3"
ERRORS = (
    # Rows
    _row("syntax", THUMB, "{"),
    _row("not_an_object", THUMB, [1]),
    _row("column_missing", THUMB, {"prompt": "p", "completion": "a"}),
    _row("label_empty", THUMB, THUMB | {"label": None}),
    _row("label_type", THUMB, THUMB | {"label": "perhaps"}),
    _row("weight", THUMB, THUMB | {"weight": -1}),
    _row("completion_type", THUMB, THUMB | {"completion": 5}),
    _row("completion_empty", THUMB, THUMB | {"completion": ""}),
    _row("name_twice", THUMB, '{"prompt": "p", "prompt": "q", "completion": "a", "label": true}'),
    _row("pair_equal", PAIR, PAIR | {"rejected": "a"}, DPO),
    _row("pair_column_missing", PAIR, {"prompt": "p", "chosen": "a"}, DPO),
    _row("demonstration_null", DEMONSTRATION, DEMONSTRATION | {"completion": None}, SFT),
    _row("chat_role", CHAT, {"messages": [{"role": "king", "content": "p"}]}, SFT),
    _row("chat_content", CHAT, {"messages": [{"role": "user"}]}, SFT),
    _row("group_lengths", GROUP, GROUP | {"scores": [1]}, GRPO),
    _row("prompt_type", PROMPT, {"prompt": 7}, ONLINE),
    _row("format", THUMB, PAIR),
    # Files of rows
    _file("empty", "rows.jsonl", ""),
    _file("suffix", "rows.xlsx", "x"),
    _file("encoding", "rows.jsonl", json.dumps(THUMB).encode("utf-16")),
    _file("binary", "rows.jsonl", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"),
    _file("parquet", "rows.parquet", "no parquet"),
    _file("gzip", "rows.jsonl.gz", "no gzip"),
    _file("csv_fields", "rows.csv", "prompt,completion,label\np,a,1\np,a,b,1\n"),
    _file("unknown_columns", "rows.jsonl", '{"question": "p", "answer": "a"}\n'),
    _setting("rows_missing", "data.train=absent.jsonl"),
    # Recipes
    _recipe("empty", ""),
    _recipe("syntax", "method: kto\nmodel: {name: x\n"),
    _recipe("tab", "method: kto\nmodel:\n\tname: x\n"),
    _recipe("list", "- kto\n"),
    _recipe("no_method", RECIPE.partition("\n")[2]),
    _error("recipe_missing", "check absent.yaml"),
    _error("recipe_is_data", "check thumbs_train.jsonl"),
    _added("unknown_section", "trian: {seed: 1}\n"),
    _replaced("unknown_setting", "  batch_size", "  batch_sizes"),
    _replaced("other_name", "  batch_size: 6", "  lr: 6"),
    _replaced("type", "batch_size: 6", "batch_size: six"),
    _replaced("range", "batch_size: 6", "batch_size: 0"),
    _replaced("duplicate", "  max_steps: 2", "  max_steps: 2\n  batch_size: 7"),
    _replaced("method_unknown", "method: kto", "method: ktoo"),
    _replaced("model_missing", "models/llama", "models/lama"),
    _setting("unknown", "train.sed=1"),
    _setting("syntax", "train.seed"),
    _setting("type", "train.learning_rate=fast"),
    _setting("range", "train.learning_rate=-1"),
    _setting("choice", "train.schedule=cosin"),
    _setting("of_another_method", "loss.label_smoothing=0.1"),
    _setting("reward_without_rollouts", "reward=length"),
    _setting("conflict", "model.lora={rank: 2}", "model.adapter=x"),
    _setting("reward_unknown", "reward=lenght", recipe="online.yaml"),
    _setting("reward_module", "reward=absent_module:f", recipe="online.yaml"),
    _setting("reward_function", "reward=regression_rewards:absent", recipe="online.yaml"),
    _setting("reward_settings", "reward={reward: length, settings: {absent: 1}}",
             recipe="online.yaml"),
    # Command line
    _error("command_unknown", "trian recipe.yaml"),
    _error("option_unknown", "train recipe.yaml --seed 1"),
    _error("option_conflict", "sample models/llama --out x.jsonl --append --fresh --prompt a"),
    _error("option_unused", "sample models/llama --system a"),
    _error("loss_unknown", "losses ktoo"),
    _error("rule_unknown", "rewards lenght"),
    _error("recipe_name_unknown", "recipes ktoo"),
    # Models and runs
    _error("model_config", "check recipe.yaml",
           {"models/llama/config.json": ('"hidden_size": 32', '"hidden_size": "big"')}),
    _error("model_weights", "check recipe.yaml", {"models/llama/model.safetensors": 0.5}),
    _error("model_tokenizer", "check recipe.yaml", {"models/llama/tokenizer.json": "{}"}),
    _error("train_weights", "train recipe.yaml run.dir=runs/new",
           {"models/llama/model.safetensors": 0.5}),
    _error("run_missing", "train runs/absent"),
    _error("run_is_no_run", "sample models --prompt a"),
    _error("step_missing", "export runs/first out --step 7"),
    _error("step_invalid", "export runs/first out --step last"),
    _error("resume_changed_setting", f"{RESUME} train.learning_rate=0.5"),
    _error("resume_changed_rows", RESUME, {"thumbs_train.jsonl": json.dumps(THUMB) + "\n"}),
    _error("resume_newest_damaged", RESUME, {f"{STEP_2}/*.safetensors": 0.5}),
    _error("resume_all_damaged", RESUME, {"runs/first/checkpoints/*/*.safetensors": 0.5}),
    _error("resume_manifest", RESUME, {"runs/first/checkpoints/*/manifest.json": ""}),
    _error("resume_no_checkpoints", RESUME, {"runs/first/checkpoints": None}),
    _error("resume_log_damaged", RESUME, {f"{RUN}/metrics.jsonl": 0.5}),
    _error("resume_log_missing", RESUME, {f"{RUN}/metrics.jsonl": None}),
    _error("resume_run_json", RESUME, {f"{RUN}/run.json": 0.5}),
    _error("resume_config", RESUME, {f"{RUN}/config.yaml": "method: [\n"}),
    _error("sample_damaged", "sample runs/first --prompt a", {f"{STEP_2}/*.safetensors": 0.5}),
    _error("report_run_json", "report runs/first", {f"{RUN}/run.json": 0.5}),
    _error("report_log", "report runs/first", {f"{RUN}/metrics.jsonl": "5\n"}),
    _error("report_missing", "report runs/absent"),
    _error("folder_not_a_run", "train recipe.yaml run.dir=models"),
    # Output files
    _error("sample_output_foreign",
           "sample models/llama --data prompts_held_out.jsonl --out thumbs_train.jsonl"),
    _error("sample_output_damaged", "sample runs/first --data prompts_held_out.jsonl"
           " --max-new-tokens 4 --temperature 1 --out answers.jsonl", {"answers.jsonl": 0.5}),
    _error("sample_output_other", "sample runs/first --data prompts_held_out.jsonl"
           " --max-new-tokens 5 --temperature 1 --out answers.jsonl"),
    _error("sample_rows", "sample models/llama --data thumbs.jsonl --out x.jsonl",
           {"thumbs.jsonl": '{"text": 5}\n'}),
    _error("score_output_foreign", "score recipe.yaml --reward length --data answers.jsonl"
           " --out thumbs_train.jsonl"),
    _error("score_reward_unknown", "score recipe.yaml --reward lenght --data answers.jsonl"
           " --out scored.jsonl"),
    _error("score_rows", "score models/llama --data prompts_train.jsonl --out scored.jsonl"),
    _error("export_exists", "export runs/first models"),
    _error("export_type", "export runs/first out --gguf q9_9"),
    _error("compare_about", "compare models/llama runs/first --prompts prompts_held_out.jsonl"
           " --judge length --max-new-tokens 4 --out comparison", {"comparison/about.json": "{"}),
    _error("compare_changed", "compare models/llama runs/first --prompts prompts_held_out.jsonl"
           " --judge length --max-new-tokens 5 --out comparison"),
    _error("compare_foreign", "compare models/llama runs/first --prompts prompts_held_out.jsonl"
           " --judge length --out models"),
    _error("compare_no_judge", "compare models/llama runs/first --prompts prompts_held_out.jsonl"),
    # Imports
    _error("import_unknown", "import open-webu export.jsonl"),
    _error("import_missing", "import openai absent.jsonl"),
    _error("import_other_tool", "import langfuse export.jsonl"),
    _error("import_syntax", "import openai bad.jsonl", {"bad.jsonl": "{\n"}),
    _error("import_option", "import openai export.jsonl --left a"),
    _error("import_category", "import openai export.jsonl --category good"),
    _error("import_output_foreign", "import openai export.jsonl --out thumbs_train.jsonl"),
    _error("import_output_edited", "import openai export.jsonl --out imported.jsonl",
           {"imported*.jsonl": ('"a"', '"c"')}),
    _error("audit_missing", "audit absent.jsonl"),
    _error("inspect_row", "inspect recipe.yaml --row 99"),
    _error("split_exists", "split thumbs_train.jsonl --train answers.jsonl --held-out x.jsonl"),
    _error("init_exists", "init thumbs_train.jsonl --out recipe.yaml"),
    _error("evaluate_no_rows", "evaluate runs/first"),
    _error("evaluate_output", "evaluate runs/first --data thumbs_held_out.jsonl --out absent/x"),
)  # fmt: skip
