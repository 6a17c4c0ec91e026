"""The libraries that keep the records of runs: how each is opened, what it is handed, and what it
has of a run already.
"""

from __future__ import annotations

import netrc
import os
import re
import secrets
import struct
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from valence.errors import UserError
from valence.files import refuse_links
from valence.reports.formatting import exact, number

Rows = Sequence[Mapping[str, Any]]


class Backend(Protocol):
    """One library, opened for one run. All of it is called on one thread."""

    def has(self, name: str, step: int) -> bool:
        """Whether the tracker holds this number or table already; asked only of a run that is taken
        up.
        """
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def close(self, status: str) -> None: ...


@dataclass(frozen=True)
class Opening:
    """What a library is opened with.

    ``settings``: of the sink, as the recipe has them; ``config``: every setting of the run, as JSON
    has it; ``state``: what this tracker kept of the run before, which ``keep`` writes; ``last``:
    the last step in the log of a run that is taken up, else -1.
    """

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    folder: Path
    state: dict[str, Any]
    keep: Callable[[], None]
    last: int

    @property
    def name(self) -> str:
        """Of the run in the tracker."""
        return self.settings.get("name") or self.folder.resolve().name

    @property
    def project(self) -> str:
        return self.settings.get("project") or "valence"

    @property
    def tags(self) -> list[str]:
        return list(self.settings.get("tags") or ())

    def place(self, default: str = "") -> Path:
        """The folder for files."""
        if self.settings.get("folder"):
            return Path(self.settings["folder"]).absolute()
        refuse_links(self.folder / default, self.folder)
        return (self.folder / default).absolute()


def wandb_mode(settings: Mapping[str, Any]) -> str:
    """online or offline; auto where neither the recipe nor the environment says which."""
    asked = settings.get("mode") or "auto"
    if asked == "auto" and os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return "offline"
    return str(asked)


def wandb_key() -> bool:
    """Whether wandb can log in without asking: a key in the environment, or where `wandb login`
    puts it.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        known = netrc.netrc(os.environ.get("NETRC") or Path("~/.netrc").expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(name == host or name.endswith("wandb.ai") for name in known)


class TensorBoard:
    """Event files.

    What they hold of steps that the run goes back to is cut out by whoever reads them
    (``purge_step``).
    """

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        folder = opening.place("tensorboard")
        again, self._last = bool(opening.state), opening.last
        self._known = _events(folder, self._last) if again else set[tuple[str, int]]()
        self._writer = SummaryWriter(str(folder), purge_step=self._last + 1 if again else None)
        if not again:
            self._settings(opening.config)
            opening.state["folder"] = str(folder)
            opening.keep()
        self._step = max(0, self._last)

    def _settings(self, config: Mapping[str, Any]) -> None:
        """The settings for the tab of hyperparameters, and as a table of text."""
        from torch.utils.tensorboard.summary import hparams

        plain = {
            name: value if isinstance(value, bool | float | int) else exact(value)
            for name, value in config.items()
        }
        for each in hparams(plain, {}):
            self._file.add_summary(each)
        rows = [{"setting": name, "value": exact(value)} for name, value in config.items()]
        self._writer.add_text("settings", _markdown(rows), 0)

    @property
    def _file(self) -> Any:
        # the one place that takes many numbers at once: a tenth of the time
        return self._writer._get_file_writer()

    def has(self, name: str, step: int) -> bool:
        return step <= self._last and (name, step) in self._known

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        self._step = step
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._file.add_summary(Summary(value=values), step)
        self._writer.flush()  # at once: what is in memory would be lost when the run is killed

    def table(self, name: str, step: int, rows: Rows) -> None:
        self._writer.add_text(name, _markdown(rows), step)

    def close(self, status: str) -> None:
        self._writer.add_text("status", status, self._step)
        self._writer.close()


def _events(folder: Path, last: int) -> set[tuple[str, int]]:
    """The numbers and texts up to this step that the event files of a folder hold."""
    from tensorboard.backend.event_processing.event_accumulator import (
        SCALARS,
        TENSORS,
        EventAccumulator,
    )

    events = EventAccumulator(str(folder), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    tags: Mapping[str, Any] = events.Tags()
    found = {(tag, event.step) for tag in tags[SCALARS] for event in events.Scalars(tag)}
    found |= {
        (tag.removesuffix("/text_summary"), event.step)
        for tag in tags[TENSORS]
        for event in events.Tensors(tag)
    }
    return {(tag, step) for tag, step in found if step <= last}


def _markdown(rows: Rows) -> str:
    """A table for what shows Markdown: in it, a cell is one line and has no bar."""
    head = list(rows[0])
    cells = [[_line(row[name]) for name in head] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells))


def _line(value: Any) -> str:
    if value is None:
        return ""
    written = number(value) if isinstance(value, float) else exact(value)
    return re.sub(r"\s*\n\s*", "<br>", written).replace("|", "\\|")


class Wandb:
    """A run of wandb; without a key or with mode offline, files that `wandb sync` sends later.

    Its steps must rise: what is at or before the last one is there already, or can no longer be
    added.
    """

    def __init__(self, opening: Opening) -> None:
        import wandb

        self._wandb, state = wandb, opening.state
        mode = wandb_mode(opening.settings)
        offline = mode == "offline" or not wandb_key()
        again = "id" in state
        if not again:
            state["id"] = secrets.token_hex(4)
            opening.keep()
        folder = opening.place()
        folder.mkdir(parents=True, exist_ok=True)
        # of the program that started this one: a killed run is in use there
        os.environ.pop("WANDB_SERVICE", None)
        self._run = wandb.init(
            project=opening.project,
            name=opening.name,
            id=state["id"],
            resume="allow",
            dir=str(folder),
            tags=opening.tags,
            mode="offline" if offline else "online",
            config=None if again else _nested(opening.config),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._last = -1 if offline else self._run.step - 1
        self._known = _offline_steps(folder / "wandb", state["id"]) if again else set[int]()

    def has(self, name: str, step: int) -> bool:
        return (step <= self._last or step in self._known) and not name.startswith("test/")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        once = {name: value for name, value in numbers.items() if name.startswith("test/")}
        if once:  # measured at a step that has its row already
            self._run.summary.update(once)
        if len(once) < len(numbers):
            self._run.log(
                {name: value for name, value in numbers.items() if name not in once},
                step=step,
                commit=True,
            )

    def table(self, name: str, step: int, rows: Rows) -> None:
        columns = list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        table = self._wandb.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({name: table}, step=step, commit=False)

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "done" else 1)


def _offline_steps(folder: Path, run: str) -> set[int]:
    """The steps in the offline files of a run.

    A process that is killed takes the last of them with it, up to 32 KiB.
    """
    from wandb.proto import wandb_internal_pb2

    found: set[int] = set()
    for file in folder.glob(f"offline-run-*-{run}/run-{run}.wandb"):
        for raw in records_of(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
            record.ParseFromString(raw)
            if record.HasField("history"):
                found.add(record.history.step.num)
    return found


def records_of(content: bytes) -> Iterator[bytes]:
    """The whole records of a file of LevelDB's log format, behind a header: blocks of 32 KiB that
    hold pieces, each with a checksum, its length, and its kind (1 whole, 2 first, 3 middle, 4
    last).
    """
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if not kind or at + 7 + length > len(content):
            return
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


class Trackio:
    """A project of trackio: a database in a folder, of which it knows one in each process."""

    def __init__(self, opening: Opening) -> None:
        folder = opening.place("trackio")
        self._trackio = _trackio(
            folder
            if opening.settings.get("folder")
            else Path(os.environ.get("TRACKIO_DIR") or folder)
        )
        state, again = opening.state, bool(opening.state)
        state.setdefault("name", opening.name)
        with self._quiet():
            self._run = self._trackio.init(
                project=opening.project,
                name=state["name"],
                config=_nested(opening.config),
                resume="allow" if again else "never",
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )
        opening.keep()
        self._known: set[tuple[str, int]] = set()
        if again:
            from trackio.sqlite_storage import SQLiteStorage

            rows = SQLiteStorage.get_logs(opening.project, state["name"], run_id=self._run.id)
            self._known = {(name, int(row["step"])) for row in rows for name in row}
        self._step = max(0, opening.last)

    @contextmanager
    def _quiet(self) -> Generator[None]:
        """Lets its own modules print nothing, as there is no switch for that; others print as
        ever.
        """
        modules = [vars(sys.modules[name]) for name in ("trackio", "trackio.run", "trackio.utils")]
        for names in modules:
            names["print"] = lambda *_, **__: None
        try:
            yield
        finally:
            for names in modules:
                names.pop("print", None)

    def has(self, name: str, step: int) -> bool:
        return (name, step) in self._known

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step = step
        self._run.log(dict(numbers), step=step)

    def table(self, name: str, step: int, rows: Rows) -> None:
        columns = list(rows[0])
        table = self._trackio.Table(
            columns=columns, data=[[row[column] for column in columns] for row in rows]
        )
        self._run.log({name: table}, step=step)

    def close(self, status: str) -> None:
        self._run.log({"status": self._trackio.Markdown(status)}, step=self._step)
        with self._quiet():
            self._run.finish()


def _trackio(folder: Path) -> Any:
    """The library, with its files in this folder.

    Raises UserError when it was loaded with another one.
    """
    before = os.environ.get("TRACKIO_DIR")
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        import trackio
    finally:
        if before is None:
            del os.environ["TRACKIO_DIR"]
        else:
            os.environ["TRACKIO_DIR"] = before
    used = Path(trackio.utils.TRACKIO_DIR).absolute()  # type: ignore[attr-defined]
    if used != folder.absolute():
        what = f"trackio keeps the files of one process in one folder, which is {used} by now"
        raise UserError(
            what,
            code="tracker-folder-fixed",
            where="run.sinks (trackio)",
            fix="train in a new process, or name that folder",
        )
    return trackio


class Mlflow:
    """A run of an MLflow server, database or folder.

    The same number of a step twice would be kept twice.
    """

    def __init__(self, opening: Opening) -> None:
        from mlflow import MlflowClient

        state, again = opening.state, "run" in opening.state
        state.setdefault(
            "uri",
            opening.settings.get("uri")
            or os.environ.get("MLFLOW_TRACKING_URI")
            or self._local(opening),
        )
        self._flat = state["uri"].startswith("file:") or not re.match(
            r"[\w+-]+://|databricks", state["uri"]
        )
        if self._flat:
            # else it refuses folders, and needs a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=state["uri"])
        if again:
            self._id = state["run"]
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = state["run"] = self._create(opening)
            opening.keep()
        self._known = self._held() if again else set[tuple[str, int]]()

    def _local(self, opening: Opening) -> str:
        """A database where what it needs is installed, else a folder of files."""
        folder = opening.place("mlflow")
        folder.mkdir(parents=True, exist_ok=True)
        whole = find_spec("sqlalchemy") and find_spec("alembic")
        return f"sqlite:///{folder / 'mlflow.db'}" if whole else folder.as_uri()

    def _create(self, opening: Opening) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(opening.project)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(opening.project)
        )
        tags = dict.fromkeys(opening.tags, "true")
        run = self._client.create_run(experiment, run_name=opening.name, tags=tags).info.run_id
        params = [
            Param(self._name(name), exact(value)[:6000]) for name, value in opening.config.items()
        ]
        for start in range(0, len(params), 100):  # as many as it takes at once
            self._client.log_batch(run, params=params[start : start + 100])
        return run

    def _held(self) -> set[tuple[str, int]]:
        """The numbers and tables that the run has."""
        names = self._client.get_run(self._id).data.metrics
        found = {
            (name, each.step)
            for name in names
            for each in self._client.get_metric_history(self._id, name)
        }
        files = [
            each.path
            for folder in self._client.list_artifacts(self._id)
            for each in self._client.list_artifacts(self._id, folder.path)
        ]
        matches = (re.fullmatch(r"(.+)-step-(\d+)\.json", path) for path in files)
        return found | {(self._name(match[1]), int(match[2])) for match in matches if match}

    def has(self, name: str, step: int) -> bool:
        return (self._name(name), step) in self._known

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            metrics=[Metric(self._name(n), value, now, step) for n, value in numbers.items()],
        )

    def table(self, name: str, step: int, rows: Rows) -> None:
        data = {column: [row[column] for row in rows] for column in rows[0]}
        self._client.log_table(self._id, data=data, artifact_file=f"{name}-step-{step}.json")

    def close(self, status: str) -> None:
        ends = {"done": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"))

    def _name(self, name: str) -> str:
        """As MLflow takes it.

        In a folder of files a part before a slash is a folder, and cannot be a number as well.
        """
        allowed = re.sub(r"[^\w./: -]", "_", name)
        return allowed.replace("/", ".") if self._flat else allowed


def _nested(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name as sections."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        *sections, last = name.split(".")
        inner = found
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = value
    return found


OPEN: dict[str, Callable[[Opening], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""How each kind is opened."""
