"""The twenty recipes: every family of methods, on models of different architectures.

Nothing in them depends on the machine: type, micro-batch size and compilation are set. All paths
are relative to the folder of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Start:
    """One start of a run. A run that is in the folder already resumes.

    killed_after: the step after whose record the process is killed with SIGKILL.
    """

    overrides: tuple[str, ...] = ()
    killed_after: int | None = None


@dataclass(frozen=True)
class Recipe:
    """A recipe, and how it is run. processes: above 1 it is run by the command line."""

    name: str
    settings: Mapping[str, Any]
    starts: tuple[Start, ...] = (Start(),)
    processes: int = 1

    @property
    def path(self) -> str:
        """Of its file, in the folder of the inputs."""
        return f"recipes/{self.name}.yaml"


DEFAULTS: dict[str, Any] = {
    "model": {"dtype": "float32"},
    "data": {"max_length": 128},
    "train": {
        "batch_size": 6,
        "max_steps": 8,
        "epochs": 10,
        "learning_rate": 2e-3,
        "micro_batch_tokens": 128,
        "compile": "off",
    },
    "eval": {"every": 4},
    "run": {"save_every": 3},
}
STORED: dict[str, Any] = {"eval": {"train_examples": 0}}
"""Defaults of recipes without a reward."""
ONLINE: dict[str, Any] = {
    "train": {"batch_size": 3, "max_steps": 6},
    "rollout": {"num_rollouts": 4, "max_new_tokens": 10},
}
"""Defaults of recipes with one."""
LORA: dict[str, Any] = {
    "model": {"lora": {"rank": 4}},
    "train": {"learning_rate": 5e-3},
    "run": {"export": "adapter"},
}


def _recipe(
    method: str, model: str, rows: str, /, *, name: str = "", lora: bool = False,
    starts: tuple[Start, ...] = (Start(),), processes: int = 1, **sections: Any,
) -> Recipe:  # fmt: skip
    """A recipe from the defaults. sections: added to them, setting by setting."""
    files = {"train": f"{rows}_train.jsonl", "eval": f"{rows}_held_out.jsonl"}
    named = {"model": {"name": f"models/{model}"}, "data": files}
    kind = ONLINE if "reward" in sections else STORED
    settings: dict[str, Any] = {"method": method}
    for part in (DEFAULTS, kind, named, LORA if lora else {}, sections):
        for key, value in part.items():
            is_section = isinstance(value, dict)
            settings[key] = settings.get(key, {}) | value if is_section else value
    return Recipe(name or method, settings, starts, processes)


RECIPES = (
    # Thumbs. The first has full weights, a frozen reference and several micro-batches a step.
    _recipe(
        "kto", "llama", "thumbs",
        data={"test": "thumbs_held_out.jsonl"},
        reference={"cache": "off"},
        loss={"class_weights": "auto"},
        train={"micro_batch_tokens": 96, "clip_norm": 0.5, "schedule": "cosine", "warmup": 2},
    ),
    _recipe("kto", "gemma2", "thumbs", name="kto_lora_cached", lora=True, train={"seed": 1}),
    _recipe(
        "bco", "qwen3", "thumbs",
        data={"stratify": True}, train={"drop_last": True, "micro_batch_tokens": 512},
    ),
    # Pairs.
    _recipe(
        "dpo", "cohere", "soft_pairs", name="dpo_modifiers",
        loss={"ld_alpha": 0.5, "label_smoothing": 0.1, "f_divergence": "js", "wpo": True,
              "nll_weight": 0.2, "nll_average": "sequence"},
    ),
    _recipe("ipo", "mistral-window", "pairs", train={"checkpointing": "full", "clip_norm": None}),
    _recipe("aot", "phi3", "pairs"),
    _recipe(
        "dpo", "granite", "pairs", name="synced_reference",
        reference={"sync_every": 3, "sync_mix": 0.6}, loss={"humanline": [-0.02, 0.03]},
    ),
    _recipe(
        "cpo", "qwen2", "pairs", name="keep_best",
        train={"learning_rate": 1e-2, "max_steps": 12, "schedule": "constant"},
        eval={"every": 2},
        run={"keep": 1, "keep_best": {"metric": "eval/rewards/rejected", "mode": "max"},
             "save_hf": True},  # the best is not the last
    ),
    # Demonstrations.
    _recipe(
        "sft", "gemma3", "conversations",
        data={"train_on": "assistant"}, train={"weight_decay": 0.1, "betas": [0.8, 0.95]},
    ),
    _recipe(
        "dft", "gpt2", "demonstrations",
        train={"micro_batch_tokens": 64, "learning_rate": 5e-4},
    ),
    # Reward models.
    _recipe("bradley_terry", "llama-tied", "margin_pairs", loss={"center_coef": 0.01}),
    _recipe("ordinal", "gpt_neox", "stars", lora=True, run={"export": "merged"}),
    # Completions with scores that are stored; two objectives in every step.
    _recipe(
        "grpo", "qwen3_moe", "groups", name="grpo_stored",
        loss={"kl_weight": 0.05}, train={"batch_size": 4, "router_aux_loss": 0.01},
    ),
    _recipe(
        "kto", "llama", "thumbs", name="mixed_objectives", lora=True,
        mix=[{"method": "sft", "train": [{"path": "conversations_train.jsonl"}], "weight": 0.3,
              "batch_size": 4}],
    ),
    # The policy's own completions.
    _recipe(
        "grpo", "llama", "prompts", name="online_grpo", lora=True,
        reward=[{"reward": "regression_rewards:vowels"},
                {"reward": "contains", "weight": 0.1, "settings": {"words": ["a", "e"]}}],
        rollout={"temperature": 0.8}, loss={"kl_weight": 0.05},
    ),
    _recipe(
        "ppo", "qwen2", "prompts", reward="models/judge",
        rollout={"num_rollouts": 2, "epochs": 2, "steps": 2},
        train={"max_steps": 8, "learning_rate": 5e-4},
        loss={"kl_target": 0.5, "kl_horizon": 40.0},
        value={"trunk": "separate", "learning_rate": 4e-3},
    ),
    _recipe(
        "rejection", "gemma3", "prompts",
        reward={"reward": "regression_rewards:near_length", "settings": {"scale": 0.5}},
        rollout={"top_n": 2, "max_failed": 1.0, "mask_truncated": False, "top_p": 0.9},
        train={"learning_rate": 5e-4},
    ),
    _recipe(
        "online_kto", "gpt_neox", "prompts", lora=True, reward="regression_rewards:vowels",
        rollout={"steps": 2}, starts=(Start(killed_after=5), Start()),
    ),
    # Several processes, and several starts.
    _recipe(
        "kto", "llama", "thumbs", name="two_processes",
        train={"micro_batch_tokens": 96}, processes=2,
    ),
    _recipe(
        "dpo", "qwen3", "pairs", name="resumed", lora=True,
        train={"schedule": "cosine", "learning_rate": 2e-3},
        starts=(Start(killed_after=5), Start(), Start(overrides=("train.max_steps=11",))),
    ),
)  # fmt: skip
ARCHITECTURES = tuple(sorted({r.settings["model"]["name"].split("/")[1] for r in RECIPES}))
"""Names of the models in ``tests/tiny_models.py`` that the recipes train."""
