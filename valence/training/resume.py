"""A run that is taken up: whether it is still the same run, and its newest state."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch.optim.lr_scheduler import LambdaLR

from valence.checkpoint import store
from valence.checkpoint.keeper import Checkpoints, Saved
from valence.checkpoint.store import write_whole
from valence.engine.logprobs import Engine
from valence.errors import UserError
from valence.training.folder import RunFolder, now, versions
from valence.training.loop import Run
from valence.training.plan import make_plan
from valence.training.saving import load_weights
from valence.training.setup import Corpus, Prepared
from valence.types import Encoded

FREE = {
    f"run.{name}" for name in ("dir", "save_every", "keep", "save_state", "save_hf", "max_failed_saves", "max_time", "export")
}
"""Settings on which neither the weights nor the log depend."""
MAY_GROW = ("train.epochs", "train.max_steps")
ROWS = "rows.safetensors"
LISTED = 12


@dataclass(frozen=True)
class Earlier:
    """What a run that is taken up was. ``saved``: its newest whole checkpoint, if it came that far; ``changed``: settings and
    rows that differ and may, and how; ``first``: the step at which the present rows begin."""

    folder: RunFolder
    saved: Saved | None
    state: Mapping[str, Any] | None
    was: Mapping[str, Any]
    changed: Mapping[str, str]
    first: int
    total: int

    @property
    def step(self) -> int:
        return self.state["counters"]["step"] if self.state else 0

    @property
    def finished(self) -> bool:
        facts = self.folder.facts
        return facts.get("status") == "done" and (facts.get("steps", 0) >= self.total or bool(facts.get("ended_early")))

    @property
    def choices(self) -> Mapping[str, Any]:
        return self.was.get("choices") or {}

    @property
    def compiled(self) -> bool | None:
        """Whether its layers were compiled; None where that is to be chosen anew."""
        return None if "train.compile" in self.changed else self.choices.get("compiled")

    @property
    def budget(self) -> Sequence[Sequence[Any]]:
        """The tokens that ran at once, as Budget has them; empty where that is to be chosen anew."""
        if "train.micro_batch_tokens" in self.changed:
            return ()
        return self.folder.facts.get("micro_batch_tokens") or (self.state["budget"] if self.state else ())

    @property
    def micro_batch_tokens(self) -> int | None:
        return self.budget[0][2] if self.budget else None

    @property
    def told(self) -> str:
        """What is said before it goes on."""
        path, total = self.folder.path, self.total
        if self.finished:
            how = (
                f"it ended early: {self.folder.facts['ended_early']}"
                if self.folder.facts.get("ended_early")
                else f"{total} steps"
            )
            when = f", {self.folder.facts['finished']}" if self.folder.facts.get("finished") else ""
            return (
                f"the run in {path} is finished ({how}{when}): there is nothing to do\n"
                "  to train longer, raise train.epochs or train.max_steps; to start anew, --fresh"
            )
        where = f"after step {self.step} of {total}" if self.state else "from its first step (it has no checkpoint yet)"
        lines = [f"taking up the run in {path} {where}", *(f"  with {said}" for said in self.changed.values())]
        if self.first and self.first == self.step:
            lines.append(f"  the rows have changed: all of the new ones are trained on, from step {self.first} on")
        if other := differences(self.was):
            lines.append(f"  last digits may differ from those of an undisturbed run: {', '.join(other)}")
        return "\n".join(lines)


def look(folder: RunFolder, prepared: Prepared, allow: Sequence[str] = ()) -> Earlier:
    """The run in this folder. Raises UserError, with a list of differences, when it is not the one that the recipe describes, but
    for what is allowed by name (a setting, or a section with all in it)."""
    checkpoints = Checkpoints(folder.path / "checkpoints", None)
    checkpoints.tidy()
    saved = checkpoints.newest(folder.say)
    was = saved.facts if saved else folder.identity
    rows = _changed_rows(folder.path, was.get("rows") or {}, prepared) if was.get("rows") else {}
    changed = (_changed_settings(was["settings"], prepared) if was.get("settings") else {}) | rows
    known = _accepted(folder.facts, prepared)
    if refused := [name for name in changed if name not in known and not _allowed(name, allow)]:
        raise _refusal([changed[name] for name in refused], folder.path, refused)
    state = store.load(saved.path) if saved and saved.has_state else None
    first = 0
    if state:
        counters = state["counters"]
        first = counters["step"] if any(name.endswith("train") for name in rows) else counters["first"]
    found = Earlier(folder, saved, state, was, changed, first, prepared.steps_from(first))
    if saved and not state and not found.finished:
        raise UserError(
            "the checkpoints of this run hold no state to go on from (run.save_state is false)",
            where=str(saved.path),
            fix="start anew with --fresh, which moves it aside; its models are in checkpoints/step-N/model",
        )
    return found


def take_up(run: Run, earlier: Earlier) -> None:
    """Puts a run where the earlier one was saved last; before the first checkpoint, where it began."""
    if run.policy.packs and earlier.choices.get("packed") is False:
        run.policy.lay_out(packed=False)
    if run.finished or earlier.state is None:
        if earlier.state:
            load_weights(run, earlier.state)
        else:
            run.registry.parts["log"].load_state_dict({"bytes": 0})
        return
    fresh = [{name: value for name, value in group.items() if name != "params"} for group in run.optimizer.param_groups]
    bases = getattr(run.scheduler, "base_lrs", [])
    run.load_state_dict(earlier.state)
    run.counters.first = earlier.first
    if earlier.budget:
        run.budget.load_state_dict([list(change) for change in earlier.budget])
    else:
        run.budget.load_state_dict([[0, "evaluation", make_plan(run.prepared, run.policy.causal).micro_batch_tokens]])
    if any(name.startswith("train.") for name in earlier.changed):
        for group, settings in zip(run.optimizer.param_groups, fresh, strict=True):
            group.update(settings)
        run.scheduler.base_lrs = bases
    if isinstance(run.scheduler, LambdaLR):  # the number of steps may have grown
        for group, base, factor in zip(run.optimizer.param_groups, run.scheduler.base_lrs, run.scheduler.lr_lambdas, strict=True):
            group["lr"] = base * factor(run.scheduler.last_epoch)
    assert run.saver is not None
    run.saver.checkpoints.prune(run.best.step)  # as the one that was killed would have
    run.saver.saved = earlier.state["counters"]["step"], earlier.state["counters"]["settled"]


def begin(folder: RunFolder, prepared: Prepared, command: str, budget: Sequence[Any], earlier: Earlier | None) -> None:
    """Writes what is known before the first step, or before the next one."""
    folder.write("config.yaml", prepared.source.to_yaml())
    folder.write("audit.json", {name: corpus.audit.to_dict() for name, corpus in prepared.corpora.items()})
    changed = [
        {"setting": name, "value": setting.value, "origin": setting.origin}
        for name, setting in prepared.source.settings.items()
        if not setting.is_default
    ]
    facts: dict[str, Any] = {"command": command, "started": now()}
    if earlier:
        here = {"at": now(), "step": earlier.step, "with": list(earlier.changed.values())}
        facts = {"taken_up": [*folder.facts.get("taken_up", []), here]}
    folder.state(
        **facts, status="running", changed=changed, method=prepared.recipe.method, cwd=os.getcwd(),
        total_steps=prepared.steps_from(earlier.first if earlier else 0), versions=versions(),
        settings=settings_of(prepared), rows=rows_of(prepared),
        micro_batch_tokens=earlier.budget if earlier and earlier.budget else budget,
    )  # fmt: skip
    write_rows(prepared, folder.path)


def settings_of(prepared: Prepared) -> dict[str, Any]:
    """Every setting, as JSON has it, by dotted name."""
    return json.loads(json.dumps({name: each.value for name, each in prepared.source.settings.items()}, default=str))


def choices_of(policy: Engine) -> dict[str, Any]:
    """What the last bits of a result depend on besides settings and rows: choices that were made, and the machine."""
    return {"compiled": policy.compiled, "packed": policy.packs, **_machine()}


def _machine() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    chip = torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability()
    return {"threads": torch.get_num_threads(), "device": "cuda" if cuda else "cpu", "chip": chip}


def differences(was: Mapping[str, Any]) -> list[str]:
    """What is not as it was on the machine, so that the last digits of results may differ."""
    before = {**(was.get("versions") or {}), **(was.get("choices") or {})}
    here = versions() | _machine()
    return [f"{name} {before[name]} then, {here[name]} now" for name in here if before.get(name, here[name]) != here[name]]


def _accepted(facts: Mapping[str, Any], prepared: Prepared) -> set[str]:
    """Settings and lists of rows that are as they were at the last start, which may have been after the newest checkpoint."""
    now, was = settings_of(prepared) | rows_of(prepared), {**(facts.get("settings") or {}), **(facts.get("rows") or {})}
    return {name for name in now.keys() | was.keys() if was and now.get(name) == was.get(name)}


def _changed_settings(was: Mapping[str, Any], prepared: Prepared) -> dict[str, str]:
    """Settings that are not as they were, and how; but for those that may change freely, or have grown and may."""
    found: dict[str, str] = {}
    now, settings = settings_of(prepared), prepared.source.settings
    for name in sorted(was.keys() | now.keys()):
        before, after = was.get(name), now.get(name)
        new = name not in was and settings[name].is_default  # in this version
        if before == after or name in FREE or new:
            continue
        if name in MAY_GROW and (after is None or (before is not None and after > before)):
            continue
        found[name] = f"{name}: {json.dumps(before, ensure_ascii=False)} -> {json.dumps(after, ensure_ascii=False)}"
    return found


def _allowed(name: str, allow: Sequence[str]) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in allow)


def _refusal(said: Sequence[str], path: Path, names: Sequence[str]) -> UserError:
    shown = [f"  {line}" for line in said[:LISTED]] + ([f"  and {len(said) - LISTED} more"] if len(said) > LISTED else [])
    what = "\n".join(["the run in this folder was another one:", *shown])
    allow = " ".join(f"--allow {name}" for name in names[:3])
    fix = f"undo the change; or go on with it all the same: {allow}; or start anew with --fresh; or choose another run.dir"
    return UserError(what, where=f"run.dir: {path}", fix=fix)


# ------------------------------------------------------------------ rows


def rows_of(prepared: Prepared) -> dict[str, Any]:
    """How many rows each list of the recipe has, and a digest of them."""
    return {_list(name): {"rows": len(c.units), "digest": _digest(c)} for name, c in prepared.corpora.items()}


def write_rows(prepared: Prepared, path: Path) -> None:
    """Keeps a hash of every row, so that it can be said later which have changed."""
    write_whole(path / ROWS, save({_list(name): torch.tensor(_hashes(c.units)) for name, c in prepared.corpora.items()}))


def _changed_rows(path: Path, was: Mapping[str, Any], prepared: Prepared) -> dict[str, str]:
    now = rows_of(prepared)
    names = [name for name in now if was.get(name) != now[name]]
    try:
        kept = load_file(path / ROWS) if names else {}
    except (OSError, SafetensorError):
        kept = {}
    corpora = {_list(name): corpus for name, corpus in prepared.corpora.items()}
    return {name: _how(name, was, now, kept.get(name), corpora[name]) for name in names}


def _list(corpus: str) -> str:
    """The setting that names the rows of a corpus."""
    return corpus if corpus.startswith("mix") else f"data.{corpus}"


def _how(name: str, was: Mapping[str, Any], now: Mapping[str, Any], kept: torch.Tensor | None, corpus: Corpus) -> str:
    """What has changed about a list of rows, in words."""
    before = (was.get(name) or {}).get("rows", 0)
    said = f"{name}: {before} rows then, {now[name]['rows']} now"
    if kept is None:
        return said
    hashes = _hashes(corpus.units)
    old = set(kept.tolist())
    new = [unit for unit, each in zip(corpus.units, hashes, strict=True) if each not in old]
    gone = len(old - set(hashes))
    parts = [f"{len(new)} are new, the first of them {new[0].origin}"] if new else []
    parts += [f"{gone} are gone or have changed"] if gone else []
    return f"{said}: {', '.join(parts) or 'the same ones in another order'}"


def _digest(corpus: Corpus) -> str:
    """Of all rows. Their order counts only among those with the same content, as it does for a run."""
    units, hashes = corpus.units, _hashes(corpus.units)
    order = sorted(range(len(units)), key=lambda i: units[i].id)
    return hashlib.sha256(array("q", [hashes[i] for i in order]).tobytes()).hexdigest()[:32]


def _hashes(units: Sequence[Encoded]) -> list[int]:
    return [_hash(unit) for unit in units]


def _hash(unit: Encoded) -> int:
    """Of all that training reads of a row: its tokens, which of them are trained on, and its verdict."""
    digest = hashlib.blake2b(digest_size=8)
    for ids, mask in ((unit.prompt_ids, unit.prompt_mask), *((answer.ids, answer.mask) for answer in unit.answers)):
        digest.update(array("q", ids).tobytes() + b"|" + bytes(mask) + b"|")
    rest = (unit.id, unit.kind, unit.label, unit.scores, unit.attributes, unit.margin, unit.soft, unit.weight)
    digest.update(repr(rest).encode())
    return int.from_bytes(digest.digest(), "little", signed=True)
