"""Whether a run is still the one that its folder holds: settings one by one, rows by a hash
each.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from valence.checksums import KEY, checksum
from valence.distributed.protocol import Group
from valence.errors import UserError
from valence.models.policy_model import PolicyModel
from valence.runs.folder import versions
from valence.trainer.prepare import Corpus, Prepared

FREE = (
    {
        f"run.{name}"
        for name in (
            "dir",
            "save_every",
            "keep",
            "save_state",
            "save_hf",
            "max_failed_saves",
            "max_time",
            "export",
        )
    }
    | {f"parallel.{name}" for name in ("shard", "tensor", "reshard", "sync", "offload")}
    | {"eval.train_examples"}
)
"""Settings on which neither the weights nor the log depend, but for their last digits."""
MAY_GROW = ("train.epochs", "train.max_steps")
OF_THE_ORDER = (
    "train.batch_size",
    "train.drop_last",
    "train.seed",
    "data.stratify",
    "rollout.epochs",
    "rollout.steps",
)
"""Settings that say which rows make up which step."""
PLACE = re.compile(r"((?:data|mix\.\d+)\.(?:train|eval|test))\.\d+\.path")
ROWS = "rows.safetensors"
LISTED = 12


def changes(path: Path, was: Mapping[str, Any], prepared: Prepared) -> dict[str, str]:
    """Settings and lists of rows that are not as they were (``was``: what a checkpoint says of its
    run), and how.
    """
    rows = _changed_rows(path, was["rows"], prepared) if was.get("rows") else {}
    return _changed_settings(was.get("settings") or {}, prepared, rows) | rows


def refuse(
    changed: Mapping[str, str],
    facts: Mapping[str, Any],
    allow: Sequence[str],
    prepared: Prepared,
    path: Path,
) -> None:
    """Raises UserError about changes that are allowed neither by name nor by an earlier start
    (``facts``: of run.json), and about a name to allow that is none.
    """
    names = {*settings_of(prepared), *rows_of(prepared), *changed}
    for each in allow:
        if not any(_within(name, each) for name in names):
            near = difflib.get_close_matches(
                each, [*names, *(name.rsplit(".", 1)[-1] for name in names)], 1
            )
            meant = [
                name
                for name in sorted(names)
                if near and (name == near[0] or name.endswith(f".{near[0]}"))
            ]
            raise UserError(
                f"there is no setting {each}",
                code="allow-unknown-setting",
                where="--allow",
                fix=f"did you mean {meant[0]}?" if meant else None,
            )
    known = _accepted(facts, prepared)
    refused = [
        name
        for name in changed
        if name not in known and not any(_within(name, each) for each in allow)
    ]
    if not refused:
        return
    said = [f"  {changed[name]}" for name in refused[:LISTED]]
    said += [f"  and {len(refused) - LISTED} more"] if len(refused) > LISTED else []
    named = refused if len(refused) <= 4 else sorted({name.split(".")[0] for name in refused})
    words = " ".join(f"--allow {name}" for name in named)
    raise UserError(
        "\n".join(["the run in this folder was another one:", *said]),
        code="run-differs",
        where=f"run.dir: {path}",
        fix=f"undo the change; or go on with it all the same: {words}; or start anew: `valence "
        f"train RECIPE --fresh`; "
        "or choose another run.dir",
    )


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """Every setting, as JSON has it, by dotted name."""
    return json.loads(
        json.dumps(
            {name: each.value for name, each in prepared.source.settings.items()}, default=str
        )
    )


def choices_of(policy: PolicyModel, world: Group) -> dict[str, Any]:
    """What the last bits of a result depend on besides settings and rows: choices that were made,
    and the machine.
    """
    made = {"compiled": policy.compiled, "packed": policy.packs, "sharded": policy.is_sharded}
    return made | _machine(world)


def _machine(world: Group) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    chip = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "device": "cuda" if cuda else "cpu",
        "chip": chip,
    }


def differences(was: Mapping[str, Any], world: Group) -> list[str]:
    """What is not as it was on the machine, so that the last digits of results may differ."""
    before = {**(was.get("versions") or {}), **(was.get("choices") or {})}
    here = versions() | _machine(world)
    return [
        f"{name} {before[name]} then, {here[name]} now"
        for name in here
        if before.get(name, here[name]) != here[name]
    ]


def _within(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def _accepted(facts: Mapping[str, Any], prepared: Prepared) -> set[str]:
    """Settings and lists of rows that are as they were at the last start, which may have been after
    the newest checkpoint.
    """
    now, was = (
        settings_of(prepared) | rows_of(prepared),
        {**(facts.get("settings") or {}), **(facts.get("rows") or {})},
    )
    return {name for name in now.keys() | was.keys() if was and now.get(name) == was.get(name)}


def _changed_settings(
    was: Mapping[str, Any], prepared: Prepared, rows: Mapping[str, str]
) -> dict[str, str]:
    """But for those that may change freely, have grown and may, or follow from the rows; and paths
    whose rows are the same.
    """
    now, settings = settings_of(prepared) if was else {}, prepared.source.settings
    found: dict[str, str] = {}
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        if before == after or name in FREE or name.startswith("run.sinks"):
            continue
        if name not in was and settings[name].is_default:  # new in this version
            continue
        if (
            name in now
            and settings[name].origin in ("the rows", "loss.class_weights: auto")
            and rows
        ):
            continue
        if name in MAY_GROW and (after is None or (before is not None and after > before)):
            continue
        place = PLACE.fullmatch(name)
        if place and place[1] not in rows:
            continue
        found[name] = (
            f"{name}: {json.dumps(before, ensure_ascii=False)} -> "
            f"{json.dumps(after, ensure_ascii=False)}"
        )
    return found


# ------------------------------------------------------------------ rows


def rows_of(prepared: Prepared) -> dict[str, Any]:
    """How many rows each list of the recipe has, and a digest of them."""
    return {
        _list(name): {
            "rows": len(c.units),
            "digest": _digest(c, in_order=not name.endswith("train")),
        }
        for name, c in prepared.corpora.items()
    }


def hashes_of(prepared: Prepared) -> bytes:
    """A hash of every row, by which it can be said later what has changed; as safetensors with a
    checksum.
    """
    hashes = {
        _list(name): torch.from_numpy(np.array(c.units.columns["fingerprint"]))
        for name, c in prepared.corpora.items()
    }
    return save(hashes, metadata={KEY: _checksum(hashes)})


def _checksum(hashes: Mapping[str, torch.Tensor]) -> str:
    return str(checksum({name: each.tolist() for name, each in hashes.items()}))


def _kept_hashes(path: Path) -> dict[str, torch.Tensor]:
    """The hashes that were written when the run began; none when the file is not there or has
    changed.
    """
    try:
        with safe_open(path, "pt") as file:
            hashes = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            known = (file.metadata() or {}).get(KEY)
    except (OSError, SafetensorError):
        return {}
    return hashes if known in (None, _checksum(hashes)) else {}


def _changed_rows(path: Path, was: Mapping[str, Any], prepared: Prepared) -> dict[str, str]:
    now = rows_of(prepared)
    names = [name for name in sorted(now.keys() | was.keys()) if was.get(name) != now.get(name)]
    kept = _kept_hashes(path / ROWS) if names else {}
    corpora = {_list(name): corpus for name, corpus in prepared.corpora.items()}
    return {name: _how(name, was, now, kept.get(name), corpora.get(name)) for name in names}


def _list(corpus: str) -> str:
    """The setting that names the rows of a corpus."""
    return corpus if corpus.startswith("mix") else f"data.{corpus}"


def _how(
    name: str,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    kept: torch.Tensor | None,
    corpus: Corpus | None,
) -> str:
    """What has changed about a list of rows, in words."""
    before = (was.get(name) or {}).get("rows", 0)
    said = f"{name}: {before} rows then, {now[name]['rows'] if corpus else 'none'} now"
    if kept is None or corpus is None:
        return said
    hashes = corpus.units.columns["fingerprint"].tolist()
    old = set(kept.tolist())
    new = [i for i, each in enumerate(hashes) if each not in old]
    gone = len(old - set(hashes))
    first = corpus.units.origins[new[0]] if new else None
    parts = [f"{len(new)} are new, the first of them {first}"] if new else []
    parts += [f"{gone} are gone or have changed"] if gone else []
    return f"{said}: {', '.join(parts) or 'the same ones in another order'}"


def _digest(corpus: Corpus, in_order: bool) -> str:
    """Of all rows.

    The order of those to train on counts only among rows with the same content, as it does for a
    run.
    """
    columns = corpus.units.columns
    hashes = np.array(columns["fingerprint"])
    if not in_order:
        hashes = hashes[np.argsort(columns["id"], kind="stable")]
    return hashlib.sha256(hashes.tobytes()).hexdigest()[:32]
