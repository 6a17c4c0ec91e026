"""Compare the settings and rows of a recipe with those of the run in its folder.

FREE settings may always differ, FIXED ones and training rows never. Every other difference needs
``--allow``.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from valence.distributed.process_group import Group
from valence.errors import UserError
from valence.methods import method_of
from valence.models.policy_model import PolicyModel
from valence.reports.run_record import MODEL
from valence.storage import KEY, checksum
from valence.training.folder import RunFolder, versions
from valence.training.prepare import Corpus, Prepared

FREE = (
    {
        f"run.{name}"
        for name in (
            "dir",
            "save_every",
            "keep",
            "save_state",
            "save_hf",
            "async_save",
            "max_failed_saves",
            "max_time",
            "export",
        )
    }
    | {
        f"parallel.{name}"
        for name in ("shard", "tensor", "context", "shard_size", "reshard", "sync", "offload")
    }
    | {"eval.train_examples", "eval.other_text"}
)
"""Settings that change neither weights nor log beyond their last digits."""
FIXED = re.compile(
    r"train\.(?:batch_size|drop_last|seed|epochs)|data\.(?:train|stratify)"
    r"|rollout\.(?:epochs|steps)|mix\.\d+\.(?:train|batch_size)"
)
"""Settings and lists of rows that decide which rows form which step, and may not change."""
FILE_SETTING = re.compile(r"((?:data|mix\.\d+)\.(?:train|eval|test))(?:\.\d+\.path)?")
"""Settings that say where the rows are, or that they are in memory."""
ROWS = "rows.safetensors"
MAX_LISTED = 12


def changes(
    path: Path, recorded: Mapping[str, Any], facts: Mapping[str, Any], prepared: Prepared
) -> dict[str, str]:
    """Describe each setting and list of rows that differs from the previous run.

    path: the run's folder. recorded: settings and rows in its checkpoint. facts: content of
    run.json, which describes the last start.
    """
    last_rows = facts.get("rows") or {}
    rows = (
        _changed_rows(path, recorded["rows"], last_rows, prepared) if recorded.get("rows") else {}
    )
    return _changed_settings(recorded.get("settings") or {}, prepared, rows) | rows


def refuse(
    changed: Mapping[str, str],
    recorded: Mapping[str, Any],
    allow: Sequence[str],
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Path | None,
) -> None:
    """Raise UserError for a change that neither ``allow`` nor an earlier start permits, and for any
    change of what is fixed.

    Also raised for a name in ``allow`` that is not a setting. recorded: settings and rows in the
    newest checkpoint. checkpoint: its folder, if there is one.
    """
    names = {*settings_of(prepared), *rows_of(prepared), *changed}
    for allowed in allow:
        if not any(_within(name, allowed) for name in names):
            near = difflib.get_close_matches(
                allowed, [*names, *(name.rsplit(".", 1)[-1] for name in names)], 1
            )
            meant = [
                name
                for name in sorted(names)
                if near and (name == near[0] or name.endswith(f".{near[0]}"))
            ]
            raise UserError(
                f"there is no setting {allowed}",
                code="allow-unknown-setting",
                where="--allow",
                fix=f"did you mean {meant[0]}?"
                if meant
                else "use a name from config.yaml in the run folder, such as train.learning_rate",
            )
    known = _accepted(folder.facts, prepared)
    fixed = [name for name in changed if FIXED.fullmatch(name)]
    refused = [
        name
        for name in changed
        if fixed or (name not in known and not any(_within(name, allowed) for allowed in allow))
    ]
    if not refused:
        return
    lines = [f"  {changed[name]}" for name in refused[:MAX_LISTED]]
    lines += [f"  and {len(refused) - MAX_LISTED} more"] if len(refused) > MAX_LISTED else []
    raise UserError(
        "\n".join(["the folder contains a run with other settings or rows:", *lines]),
        code="run-differs",
        where=f"run.dir: {folder.path}",
        fix=_fix_of_fixed(fixed, recorded, prepared, folder, checkpoint)
        if fixed
        else _fix_of(refused),
    )


def _fix_of_fixed(
    fixed: Sequence[str],
    recorded: Mapping[str, Any],
    prepared: Prepared,
    folder: RunFolder,
    checkpoint: Path | None,
) -> str:
    """The fix for changes that ``--allow`` does not accept."""
    fixes = [f"undo the change of {', '.join(fixed)}, which cannot be allowed"]
    if fixed == ["train.epochs"] and not _is_shorter(recorded["settings"], prepared):
        fixes.append(f"to train longer, set train.max_steps: {prepared.total_steps} instead")
    return "; or ".join([*fixes, start_from_model(folder, checkpoint)])


def _fix_of(refused: Sequence[str]) -> str:
    """The fix for changes that ``--allow`` accepts, by their names or those of their sections."""
    parents = {name.rpartition(".")[0] or name for name in refused}
    sections = sorted(p for p in parents if not any(_within(p, q) for q in parents - {p}))
    accepted = next(
        (names for names in (refused, sections) if len(names) <= 4),
        sorted({name.split(".")[0] for name in refused}),
    )
    options = " ".join(f"--allow {name}" for name in accepted)
    return (
        f"undo the change; or accept it: {options}; or start over: `valence train RECIPE --fresh`; "
        "or choose another run.dir"
    )


def start_from_model(folder: RunFolder, checkpoint: Path | None) -> str:
    """The fix that starts a new run from the model of a run. checkpoint: its newest one, if any."""
    models = [folder.path / MODEL] if folder.facts.get("status") == "done" else []
    models += [checkpoint / "model"] if checkpoint else []
    model = next((path for path in models if path.is_dir()), None)
    if model is None and checkpoint is None:
        return "start over: `valence train RECIPE --fresh`; or choose another run.dir"
    if model is None:
        path = shlex.quote(str(folder.path))
        settings = f"run `valence export {path} FOLDER`, and set model.name: FOLDER"
    elif (model / "adapter_config.json").is_file():
        settings = f"set model.adapter: {model} in place of model.lora"
    else:
        settings = f"set model.name: {model}"
    return f"start a new run from the model of this one: {settings}, and another run.dir"


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """Every setting by its dotted name, as JSON values, and digests of users' losses."""
    settings = {name: setting.value for name, setting in prepared.source.settings.items()}
    recipe = prepared.recipe
    methods = {"method": prepared.method} | {
        f"mix.{i}.method": method_of(part.method) for i, part in enumerate(recipe.mix)
    }
    settings |= {f"{name}.source": m.source for name, m in methods.items() if m.is_custom}
    return json.loads(json.dumps(settings, default=str))


def choices_of(policy: PolicyModel, world: Group) -> dict[str, Any]:
    """Choices and the machine, on which the last bits of a result depend besides settings."""
    choices = {
        "compiled": policy.compiled,
        "packed": policy.packs,
        "sharded": policy.is_sharded,
    }
    return choices | _backends(policy) | _machine(world)


def _backends(policy: PolicyModel) -> dict[str, Any]:
    """The backends of the head and of packed attention."""
    attention = policy.attention_backend if policy.packs else None
    return {"head": policy.head_backend, "attention": attention}


def _machine(world: Group) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    chip = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "device": "cuda" if cuda else "cpu",
        "chip": chip,
    }


def machine_differences(
    recorded: Mapping[str, Any], policy: PolicyModel, world: Group
) -> list[str]:
    """Differences of machine, versions and backends, on which the last digits of results depend."""
    before = {**(recorded.get("versions") or {}), **(recorded.get("choices") or {})}
    here = versions() | _machine(world) | _backends(policy)
    return [
        f"{name} {before[name]} then, {here[name]} now"
        for name in here
        if before.get(name, here[name]) != here[name]
    ]


def _within(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def _accepted(facts: Mapping[str, Any], prepared: Prepared) -> set[str]:
    """Settings and lists of rows that are unchanged since the last start.

    That start may be later than the newest checkpoint.
    """
    now, recorded = (
        settings_of(prepared) | rows_of(prepared),
        {**(facts.get("settings") or {}), **(facts.get("rows") or {})},
    )
    return {
        name
        for name in now.keys() | recorded.keys()
        if recorded and now.get(name) == recorded.get(name)
    }


def _changed_settings(
    recorded: Mapping[str, Any], prepared: Prepared, rows: Mapping[str, str]
) -> dict[str, str]:
    """Describe changed settings that need permission.

    Left out: settings in FREE, a number of steps that does not get smaller, a number of epochs that
    train.max_steps overrides, and where the same rows are.
    """
    now, settings = settings_of(prepared) if recorded else {}, prepared.source.settings
    changed: dict[str, str] = {}
    for name in sorted(recorded.keys() | now.keys()):
        before, after = recorded.get(name), now.get(name)
        if before == after or name in FREE or name.startswith("run.sinks"):
            continue
        setting = settings.get(name)  # None for the code of a user's loss
        if (
            name not in recorded and setting is not None and setting.is_default
        ):  # new in this version
            continue
        if name == "train.max_steps" and not _is_shorter(recorded, prepared):
            continue
        if name == "train.epochs" and (
            recorded.get("train.max_steps") or now.get("train.max_steps")
        ):
            continue
        file_setting = FILE_SETTING.fullmatch(name)
        if file_setting and file_setting[1] not in rows:
            continue
        if setting is None and before is not None and after is not None:
            changed[name] = f"{name}: the code of {now[name.removesuffix('.source')]} has changed"
            continue
        changed[name] = (
            f"{name}: {json.dumps(before, ensure_ascii=False)} -> "
            f"{json.dumps(after, ensure_ascii=False)}"
        )
    return changed


def _is_shorter(recorded: Mapping[str, Any], prepared: Prepared) -> bool:
    """Whether the recipe asks for fewer steps than the settings ``was`` would on the same rows."""
    before = prepared.num_steps(recorded["train.epochs"], recorded["train.max_steps"])
    return prepared.total_steps < before


# ------------------------------------------------------------------ rows


def rows_of(prepared: Prepared) -> dict[str, Any]:
    """Number and digest of the rows in each list of the recipe."""
    return {
        _list(name): {
            "rows": len(c.units),
            "digest": _digest(c, _in_order(name)),
        }
        for name, c in prepared.corpora.items()
    }


def hashes_of(prepared: Prepared) -> bytes:
    """A hash of every row, to find changed rows later, as safetensors with a checksum."""
    hashes = {
        _list(name): torch.from_numpy(np.array(c.units.columns["fingerprint"]))
        for name, c in prepared.corpora.items()
    }
    return save(hashes, metadata={KEY: _checksum(hashes)})


def _checksum(hashes: Mapping[str, torch.Tensor]) -> str:
    return str(checksum({name: values.tolist() for name, values in hashes.items()}))


def _saved_hashes(path: Path) -> dict[str, torch.Tensor]:
    """The hashes from the last start of the run; empty if the file is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            hashes = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError):
        return {}
    return hashes if known in (None, _checksum(hashes)) else {}


def mark_training_rows(path: Path, prepared: Prepared) -> Prepared:
    """The same with the rows that the run in a folder has trained on marked in all other lists."""
    trained = _saved_hashes(path / ROWS).get(_list("train"))
    if trained is None:
        return prepared

    def marked(corpus: Corpus) -> Corpus:
        units = corpus.units
        is_trained = np.isin(units.columns["fingerprint"], trained.numpy())
        origins = units.origins.select(np.flatnonzero(is_trained))
        return replace(
            corpus, trained_origins=corpus.trained_origins | frozenset(map(str, origins))
        )

    corpora = {
        name: corpus if name.endswith("train") else marked(corpus)
        for name, corpus in prepared.corpora.items()
    }
    return replace(prepared, corpora=corpora)


def _changed_rows(
    path: Path, recorded: Mapping[str, Any], last_rows: Mapping[str, Any], prepared: Prepared
) -> dict[str, str]:
    """last_rows: rows at the last start, of which the folder has the hashes."""
    now = rows_of(prepared)
    names = [
        name for name in sorted(now.keys() | recorded.keys()) if recorded.get(name) != now.get(name)
    ]
    saved = _saved_hashes(path / ROWS) if names else {}
    corpora = {_list(name): corpus for name, corpus in prepared.corpora.items()}
    return {
        name: _describe_change(
            name,
            recorded.get(name) or {"rows": 0},
            # a start that was killed before its first save has other rows than the checkpoint
            saved.get(name) if last_rows.get(name) == recorded.get(name) else None,
            corpora.get(name),
        )
        for name in names
    }


def _list(corpus: str) -> str:
    """The setting that names the rows of a corpus."""
    return corpus if corpus.startswith("mix") else f"data.{corpus}"


def _describe_change(
    name: str, recorded: Mapping[str, Any], saved: torch.Tensor | None, corpus: Corpus | None
) -> str:
    """Describe how a list of rows differs.

    recorded: its number of rows and their digest in the checkpoint. saved: the hashes of these
    rows, if they are known.
    """
    before = recorded["rows"]
    counts = f"{name}: {before} rows then, {len(corpus.units) if corpus else 'none'} now"
    if corpus is None:
        return counts
    num_appended = len(corpus.units) - before
    if num_appended > 0 and recorded.get("digest") == _digest(corpus, _in_order(name), before):
        first = corpus.units.origins[before]
        return f"{counts}: {num_appended} appended, the first is {first}"
    if saved is None:
        return counts
    hashes = corpus.units.columns["fingerprint"].tolist()
    old, new = Counter(saved.tolist()), list[int]()
    for i, value in enumerate(hashes):  # the same row may occur several times
        if old[value]:
            old[value] -= 1
        else:
            new.append(i)
    num_gone = old.total()
    parts = [f"{len(new)} are new, the first is {corpus.units.origins[new[0]]}"] if new else []
    parts += [f"{num_gone} are gone or changed"] if num_gone else []
    return f"{counts}: {', '.join(parts) or 'the same rows in another order'}"


def _in_order(name: str) -> bool:
    """Whether the order of a list of rows counts. The sampler orders training rows itself."""
    return not name.endswith("train")


def _digest(corpus: Corpus, in_order: bool, num_rows: int | None = None) -> str:
    """Digest of the first rows of a list; default: of all rows.

    in_order: whether their order counts. That of training rows counts only among rows with the
    same content.
    """
    columns = corpus.units.columns
    hashes = np.array(columns["fingerprint"][:num_rows])
    if not in_order:
        hashes = hashes[np.argsort(columns["id"][:num_rows], kind="stable")]
    return hashlib.sha256(hashes.tobytes()).hexdigest()[:32]
