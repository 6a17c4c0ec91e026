"""Error messages about a setting: the place, the value, the allowed values and the nearest name."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from difflib import get_close_matches

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from valence.config.describe import (
    Key,
    Node,
    as_yaml,
    at,
    choices_of,
    dotted,
    meaning,
    names_of,
    schema_of,
    settings_table,
    takes,
    takes_null,
    types_of,
)
from valence.config.parse import RawRecipe, value_at
from valence.config.schema import LORA_FIELDS_REFUSED, peft_fields
from valence.errors import UserError


def all_of(problems: Sequence[UserError], name: str) -> UserError:
    """One error that lists every problem of the recipe ``name``."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"  {line}" for problem in problems for line in str(problem).splitlines()]
    message = "\n".join([f"{len(problems)} settings are wrong", *lines])
    return UserError(message, code="settings-invalid", where=name, problems=problems)


def of_setting(
    model: type[BaseModel],
    path: Key,
    prefix: Key,
    error: ErrorDetails,
    raw: RawRecipe,
    loss_names: Collection[str] = (),
) -> UserError:
    """The message for a validation error at ``path`` of ``model``, the section ``prefix``.

    loss_names: settings of the loss of the recipe's method.
    """
    full = (*prefix, *path)
    node = at(schema_of(model), path)
    where = raw.where(full)
    if error["type"] == "extra_forbidden":
        is_lora = full[:-1] == ("model", "lora")
        refused = LORA_FIELDS_REFUSED.get(str(path[-1])) if is_lora else None
        if refused is not None:
            why, fix = refused
            return UserError(
                f"this setting of PEFT is not supported: {why}",
                code="setting-unsupported",
                where=where,
                fix=fix,
            )
        names = names_of(at(schema_of(model), path[:-1]))
        fix = UNNECESSARY.get(str(path[-1])) or _nearest(full, names, loss_names)
        if is_lora:
            near = get_close_matches(str(path[-1]), sorted(peft_fields() - {*names}), n=1)
            fix = "".join(f"did you mean model.lora.{name}? " for name in near) + fix
            fix += "; other fields of PEFT's LoraConfig can be set, too"
        return UserError("there is no such setting", code="setting-unknown", where=where, fix=fix)
    if error["type"] == "missing" and isinstance(error["loc"][-1], str):
        return UserError(
            "the setting is missing",
            code="setting-missing",
            where=where,
            fix=f"add `{path[-1]}: ...`. {meaning(node)}".rstrip(),
        )
    value = value_at(raw.values, full)
    if fix := error.get("ctx", {}).get("fix"):
        return UserError(
            f"{as_yaml(value)} {error['msg']}", code="setting-value", where=where, fix=fix
        )
    if error["type"] == "value_error":
        return UserError(
            f"{as_yaml(value)} is {error['msg'].removeprefix('Value error, ')}",
            code="setting-value",
            where=where,
            fix=_remedy(value, node),
        )
    return UserError(
        f"{as_yaml(value)} is not {takes(node, short=True)}",
        code="setting-type",
        where=where,
        fix=_remedy(value, node),
    )


ALSO_CALLED = {
    "data.eval": "eval_dataset eval_data eval_file validation val_set_size val_size test_size",
    "data.max_length": "max_seq_length max_seq_len max_len cutoff_len",
    "data.train": "dataset train_dataset train_data train_file data_path dataset_name",
    "model.dtype": "bf16 fp16 torch_dtype precision",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rank": "r lora_r lora_rank",
    "model.lora.targets": "target_modules lora_target_modules",
    "model.name": "model_name_or_path model_name model_path pretrain",
    "model.quantize": "load_in_4bit",
    "reference.model": "ref_model ref_model_name_or_path ref_pretrain",
    "rollout.max_new_tokens": "max_completion_length generate_max_len response_length",
    "rollout.num_rollouts": "num_generations n_samples_per_prompt",
    "rollout.replace_tied": "dynamic_sampling use_dynamic_sampling dynamic_filtering filter_groups",
    "data.as_chat": "apply_chat_template",
    "data.chat_template": "chat_template_path chat_template_name",
    "run.dir": "output_dir output save_path ckpt_path folder out",
    "run.log_every": "logging_steps log_interval",
    "run.save_every": "save_steps save_interval checkpoint_every",
    "run.sinks": "report_to wandb tensorboard",
    "eval.every": "eval_steps eval_interval eval_every",
    "train.batch_size": "train_batch_size global_batch_size",
    "train.checkpointing": "gradient_checkpointing activation_checkpointing",
    "train.clip_norm": "max_grad_norm max_norm grad_clip gradient_clipping",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.learning_rate": "lr actor_learning_rate",
    "train.max_steps": "num_steps",
    "train.micro_batch_tokens": "micro_batch_size micro_train_batch_size",
    "train.router_aux_loss": "router_aux_loss_coef aux_loss_coef aux_loss_coeff moe_aux_loss_coeff",
    "train.schedule": "lr_scheduler_type lr_scheduler scheduler",
    "train.warmup": "warmup_ratio warmup_steps lr_warmup_ratio",
}
"""Setting -> its names in other programs."""

_STEP = (
    "counts the examples of an optimizer step over all processes; the size of micro-batches "
    "(train.micro_batch_tokens) depends on memory and never changes the result"
)
UNNECESSARY = {
    "gradient_accumulation_steps": f"remove it: train.batch_size {_STEP}, so there is nothing to "
    f"accumulate",
    "per_device_train_batch_size": f"set train.batch_size instead, which {_STEP}",
}
"""Settings of other programs without a counterpart -> the fix."""


def _nearest(path: Key, names: Sequence[str], loss_names: Collection[str]) -> str:
    """The setting that was probably meant, and those that the section has."""
    name, section = str(path[-1]), dotted(path[:-1]) or "a recipe"
    elsewhere = _with_last_part(name)
    if name in loss_names and section != "loss":
        elsewhere = [f"loss.{name}", *elsewhere]
    known = _also_called(name)
    siblings = [n for n in names if set(name.lower().split("_")) < set(n.split("_"))]
    # a slip of a letter is likelier than another section, and that likelier than another word; a
    # short name, in which a letter is a larger share, may be one of another section
    cutoff = 0.9 if elsewhere else 0.85
    slips = [n for n in get_close_matches(name.lower(), names, 1, cutoff) if n not in siblings]
    here = [dotted((*path[:-1], n)) for n in (*slips, *siblings)]
    near = [*known, *here, *elsewhere] or [
        dotted((*path[:-1], n)) for n in get_close_matches(name.lower(), names, n=1)
    ]
    hint = f"did you mean {' or '.join(near[:2])}? " if near else ""
    return f"{hint}{section} has {', '.join(names) or 'no settings'}"


def settings_named(name: str, *, is_exact: bool = False) -> list[str]:
    """The settings that a name without its section stands for, also as other programs call them.

    is_exact: whether the name is not misspelled.
    """
    named = [*_with_last_part(name), *_also_called(name)]
    if named or is_exact:
        return named
    parts = {row.name.rsplit(".", 1)[-1] for row in settings_table()}
    return [
        setting
        for near in get_close_matches(name.lower(), sorted(parts), n=1, cutoff=0.8)
        for setting in _with_last_part(near)
    ]


def _with_last_part(name: str) -> list[str]:
    """The settings whose dotted name ends with this part, those inside lists only if no other."""
    rows = [row.name for row in settings_table() if row.name.rsplit(".", 1)[-1] == name]
    return [row for row in rows if ".N." not in row] or rows


def _also_called(name: str) -> list[str]:
    """The settings that other programs call by this name."""
    normalized = name.replace("-", "_")
    return [setting for setting, others in ALSO_CALLED.items() if normalized in others.split()]


def _remedy(value: object, node: Node) -> str:
    """How to write the value that was probably meant; otherwise the meaning of the setting."""
    types = types_of(node)
    if isinstance(value, str):
        return _remedy_for_text(value, node, types)
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return f"write {int(value)}"
    if value is None and "array" in types:
        return "write [] for none"
    is_text = types - {"null"} == {"string"} and not choices_of(node)
    if isinstance(value, bool | int | float) and is_text:
        return f'put it in quotes: "{as_yaml(value)}"'
    return _explain(node)


def _remedy_for_text(value: str, node: Node, types: set[str]) -> str:
    near = get_close_matches(value.lower(), choices_of(node), n=1)
    if near:
        return f"did you mean {near[0]}?"
    if value.lower() in ("none", "nil") and takes_null(node):
        return "write null"
    if "boolean" in types and value.lower() in ("yes", "on", "no", "off"):
        return "write true" if value.lower() in ("yes", "on") else "write false"
    if types & {"number", "integer"} and _is_finite_number(value):
        return f"write {value} without quotes"
    return _explain(node)


def _explain(node: Node) -> str:
    """Set a setting to an allowed value, with its meaning."""
    text = meaning(node)
    if names := names_of(node):
        fix = f"write its settings below it, one `name: value` per line: {', '.join(names)}"
        return f"{fix}. {text}" if text else fix
    return f"set it to {takes(node)}: {text}" if text else f"set it to {takes(node)}"


def _is_finite_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
