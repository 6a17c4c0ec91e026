"""The libraries of experiment trackers, each opened for one run: tensorboard, wandb, trackio and
mlflow.

dev/decisions/0043-resuming-trackers.md explains how each of them resumes.
"""

from __future__ import annotations

import json
import netrc
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from valence.errors import UserError
from valence.files import refuse_links
from valence.network import has_credentials
from valence.reports.formatting import exact, number, visible
from valence.reports.sinks import SAMPLES
from valence.storage import add_checksum, atomic_write, make_folder

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker's library needs it.

    settings: of the sink, from the recipe. config: every setting of the run, as plain JSON values.
    state: what this tracker stored about the run, written by ``save_state``. last_step: the last
    step in the log of a resumed run, else -1.
    """

    settings: Mapping[str, Any]
    config: Mapping[str, Any]
    folder: Path
    state: dict[str, Any]
    last_step: int

    def save_state(self) -> None:
        path = self.folder / "trackers" / f"{self.settings['kind']}.json"
        make_folder(path.parent, self.folder)
        atomic_write(path, json.dumps(add_checksum(self.state)), self.folder)

    @property
    def name(self) -> str:
        """The name of the run in the tracker."""
        return visible(self.settings.get("name") or self.folder.resolve().name)

    @property
    def project(self) -> str:
        return self.settings.get("project") or "valence"

    @property
    def tags(self) -> list[str]:
        return list(self.settings.get("tags") or ())

    def directory(self, default: str = "") -> Path:
        """The folder for the tracker's files."""
        if self.settings.get("folder"):
            return Path(self.settings["folder"]).absolute()
        refuse_links(self.folder / default, self.folder)
        return (self.folder / default).absolute()

    def nested_config(self) -> dict[str, Any]:
        """The settings as sections."""
        config: dict[str, Any] = {}
        for name, value in self.config.items():
            *sections, last = name.split(".")
            inner = config
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[last] = value
        return config


class Backend(Protocol):
    """One library, opened for one run. All methods are called on one thread."""

    def has(self, name: str, step: int) -> bool:
        """Whether the tracker already holds this number or table."""
        ...

    def log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        """Log numbers and tables that the tracker does not hold."""
        ...

    def finish(self, status: str) -> None: ...


def wandb_mode(settings: Mapping[str, Any]) -> str:
    """online, offline, or auto if neither the recipe nor the environment decides."""
    mode = settings.get("mode") or "auto"
    if mode == "auto" and os.environ.get("WANDB_MODE") in ("offline", "dryrun", "disabled"):
        return "offline"
    return str(mode)


def has_wandb_key() -> bool:
    """Whether wandb can log in without asking: with a key from the environment or `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    try:
        hosts = netrc.netrc(os.environ.get("NETRC") or Path("~/.netrc").expanduser()).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return any(name == host or name.endswith("wandb.ai") for name in hosts)


class TensorBoard:
    """Event files. TensorBoard drops numbers from ``purge_step`` on when it reads them.

    The state holds the last step that was flushed. A resumed run purges from this step on, or from
    the end of its log if that is earlier, and writes it again. Tables are not purged by every
    reader, so they are never written again.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        self._run, resumed = run, bool(run.state)
        self._step = max(0, min(run.state.get("step", 0), run.last_step))
        self._first_step = self._step
        self._table_step = run.state.get("table_step", -1)
        folder = str(run.directory("tensorboard"))
        run.state.update(folder=folder, step=self._first_step)
        run.save_state()  # before the purge: what it drops must not count as written
        self._writer = SummaryWriter(folder, purge_step=self._first_step if resumed else None)
        if self._first_step == 0:
            plain = {n: v if isinstance(v, bool | float | int) else exact(v)
                     for n, v in run.config.items()}  # fmt: skip
            for summary in hparams(plain, {}):
                self._writer.file_writer.add_summary(summary)  # pyright: ignore[reportOptionalMemberAccess]
            rows = [{"setting": n, "value": exact(value)} for n, value in run.config.items()]
            self._writer.add_text("settings", _markdown_table(rows), 0)

    def has(self, name: str, step: int) -> bool:
        return step <= self._table_step if name == SAMPLES else step < self._first_step

    def log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        for name, rows in tables.items():
            self._writer.add_text(name, _markdown_table(rows), step)
            self._run.state["table_step"] = step
        self._writer.flush()
        self._step = self._run.state["step"] = step
        self._run.save_state()

    def finish(self, status: str) -> None:
        self._writer.add_text("status", status, self._step)
        self._writer.close()


def _markdown_table(rows: Rows) -> str:
    """A table for TensorBoard, whose cells are one line without bars."""
    head = list(rows[0])
    cells = [[_markdown_cell(row[name]) for name in head] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *cells))


def _markdown_cell(value: Any) -> str:
    if value is None:
        return ""
    line = number(value) if isinstance(value, float) else exact(value)
    return re.sub(r"\s*\n\s*", "<br>", line).replace("|", "\\|")


class Wandb:
    """A run of wandb. Offline, it writes files for `wandb sync`.

    Online, wandb resumes the run by its id and tells the next step. Offline it cannot resume: each
    start writes the run from its first step, and the last files replace earlier ones of the same
    id.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        offline = wandb_mode(run.settings) == "offline" or not has_wandb_key()
        resumed = "id" in run.state
        if not resumed:
            run.state["id"] = secrets.token_hex(4)
            run.save_state()
        folder = run.directory()
        folder.mkdir(parents=True, exist_ok=True)
        # inherited from a program that uses wandb itself; the service of a killed run is gone
        os.environ.pop("WANDB_SERVICE", None)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.state["id"],
            resume=None if offline else "allow",
            dir=str(folder),
            tags=run.tags,
            mode="offline" if offline else "online",
            config=None if resumed and not offline else run.nested_config(),
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._first_step = 0 if offline else self._run.step

    def has(self, name: str, step: int) -> bool:
        return step < self._first_step and not name.startswith("test/")

    def log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        summary = {name: value for name, value in numbers.items() if name.startswith("test/")}
        if summary:  # test rows are measured after the last step, whose row is complete
            self._run.summary.update(summary)
        row: dict[str, Any] = {n: value for n, value in numbers.items() if n not in summary}
        for name, rows in tables.items():
            row[name] = self._wandb.Table(**_cells(rows), allow_mixed_types=True)
        if row:
            self._run.log(row, step=step, commit=True)

    def finish(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "done" else 1)


def _cells(rows: Rows) -> dict[str, Any]:
    """A table for wandb and trackio."""
    columns = list(rows[0])
    return {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}


class Trackio:
    """A project of trackio: a database in a folder, of which it has one per process."""

    def __init__(self, run: TrackedRun) -> None:
        folder = run.directory("trackio")
        if not run.settings.get("folder") and os.environ.get("TRACKIO_DIR"):
            folder = Path(os.environ["TRACKIO_DIR"])
        self._trackio = _import_trackio(folder)
        from trackio.sqlite_storage import SQLiteStorage

        resumed = bool(run.state)
        name = run.state.setdefault("name", run.name)
        self._run = self._trackio.init(
            project=run.project,
            name=name,
            config=run.nested_config(),
            resume="allow" if resumed else "never",
            auto_log_gpu=False,
            auto_log_cpu=False,
            embed=False,
        )
        run.save_state()
        rows = SQLiteStorage.get_logs(run.project, name, run_id=self._run.id) if resumed else []
        self._points = {(metric, int(row["step"])) for row in rows for metric in row}
        self._step = max(0, run.last_step)

    def has(self, name: str, step: int) -> bool:
        return (name, step) in self._points

    def log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        self._step = step
        cells = {name: self._trackio.Table(**_cells(rows)) for name, rows in tables.items()}
        self._run.log({**numbers, **cells}, step=step)

    def finish(self, status: str) -> None:
        self._run.log({"status": self._trackio.Markdown(status)}, step=self._step)
        self._run.finish()


def _import_trackio(folder: Path) -> Any:
    """Import trackio with its files in this folder.

    Raises UserError if it was imported with another one.
    """
    previous = os.environ.get("TRACKIO_DIR")
    os.environ["TRACKIO_DIR"] = str(folder)
    try:
        import trackio
    finally:
        if previous is None:
            del os.environ["TRACKIO_DIR"]
        else:
            os.environ["TRACKIO_DIR"] = previous
    used = Path(trackio.utils.TRACKIO_DIR).absolute()  # type: ignore[attr-defined]
    if used != folder.absolute():
        raise UserError(
            f"trackio can use only one folder per process, and already uses {used}",
            code="tracker-folder-fixed",
            where="run.sinks (trackio)",
            fix="start this run in a new process",
        )
    return trackio


class Mlflow:
    """A run of an MLflow server, database or folder, resumed by its run id.

    MLflow keeps a number twice that it receives twice, so a resumed run asks for those it has.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        state, resumed = run.state, "run" in run.state
        uri = run.settings.get("uri") or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_in_run_folder = not uri
        uri = state.get("uri") or uri or _mlflow_uri(run)
        if not has_credentials(uri):  # those of the environment are read again on resume
            state["uri"] = uri
        self._is_folder = uri.startswith("file:") or not re.match(r"[\w+-]+://|databricks", uri)
        if self._is_folder:  # which MLflow otherwise refuses in favour of a database
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(tracking_uri=uri)
        if not resumed:
            state["run"] = self._create(run)
            run.save_state()
        self._id = state["run"]
        self._points = self._read_points() if resumed else set[tuple[str, int]]()
        if resumed:
            self._client.update_run(self._id, status="RUNNING")

    def _create(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name(run.project)
        # A database's own default is `mlruns` in the current directory.
        artifacts = run.directory("mlflow") / "artifacts" if self._is_in_run_folder else None
        experiment = (
            known.experiment_id
            if known
            else self._client.create_experiment(
                run.project, artifact_location=artifacts.as_uri() if artifacts else None
            )
        )
        tags = dict.fromkeys(run.tags, "true")
        created = self._client.create_run(experiment, run_name=run.name, tags=tags)
        params = [Param(self._name(n), exact(value)[:6000]) for n, value in run.config.items()]
        for start in range(0, len(params), 100):  # MLflow's limit for one request
            self._client.log_batch(created.info.run_id, params=params[start : start + 100])
        return created.info.run_id

    def _read_points(self) -> set[tuple[str, int]]:
        """The numbers and tables that the run has."""
        names = self._client.get_run(self._id).data.metrics
        points = {
            (name, metric.step)
            for name in names
            for metric in self._client.get_metric_history(self._id, name)
        }
        paths = [
            file.path
            for folder in self._client.list_artifacts(self._id)
            for file in self._client.list_artifacts(self._id, folder.path)
        ]
        matches = (re.fullmatch(r"(.+)-step-(\d+)\.json", path) for path in paths)
        return points | {(self._name(match[1]), int(match[2])) for match in matches if match}

    def has(self, name: str, step: int) -> bool:
        return (self._name(name), step) in self._points

    def log(self, step: int, numbers: Mapping[str, float], tables: Mapping[str, Rows]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(self._name(name), value, now, step) for name, value in numbers.items()]
        if metrics:
            self._client.log_batch(self._id, metrics=metrics)
        for name, rows in tables.items():
            data = {column: [row[column] for row in rows] for column in rows[0]}
            self._client.log_table(self._id, data=data, artifact_file=f"{name}-step-{step}.json")

    def finish(self, status: str) -> None:
        statuses = {"done": "FINISHED", "interrupted": "KILLED"}
        self._client.set_terminated(self._id, statuses.get(status, "FAILED"))

    def _name(self, name: str) -> str:
        """The name in MLflow. In a folder of files, a slash would make the name a subfolder."""
        allowed = re.sub(r"[^\w./: -]", "_", name)
        return allowed.replace("/", ".") if self._is_folder else allowed


def _mlflow_uri(run: TrackedRun) -> str:
    """A database if its libraries are installed, else a folder of files."""
    folder = run.directory("mlflow")
    folder.mkdir(parents=True, exist_ok=True)
    has_database = find_spec("sqlalchemy") and find_spec("alembic")
    return f"sqlite:///{folder / 'mlflow.db'}" if has_database else folder.as_uri()


BACKENDS: dict[str, Callable[[TrackedRun], Backend]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": Mlflow,
}
"""The backend of each kind of tracker."""
