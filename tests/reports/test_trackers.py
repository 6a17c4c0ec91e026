"""Trackers with their libraries and without a network: the records that they receive, each exactly
once after a killed run resumes.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.logs import repeatable
from tests.programs import Program
from tests.reports.tracked_runs import ROOT, Killed, home, killed_twice, wandb_records
from valence.reports.sinks import SAMPLES

__all__ = ["home"]


def steps_of(points: Counter[tuple[str, int]], name: str) -> list[int]:
    return sorted(
        step for (item, step), times in points.items() for _ in range(times) if item == name
    )


def assert_complete(points: Counter[tuple[str, int]], named: Callable[[str], str] = str) -> None:
    """Every number and table of steps 0..8 once, and the test at the end once."""
    for name in ("loss", "grad_norm", "kl", "tokens/s"):
        assert steps_of(points, named(name)) == list(range(9)), name
    for name in ("eval/loss", "eval/kl", "eval/kl/raw", SAMPLES):
        assert steps_of(points, named(name)) == [0, 3, 6], name
    assert steps_of(points, named("test/loss")) == [8]


# ------------------------------------------------------------------ each library


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Killed(tmp_path)
    killed_twice(run)
    events = EventAccumulator(
        str(tmp_path / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    )
    events.Reload()
    scalars, tensors = events.Tags()["scalars"], events.Tags()["tensors"]
    points = Counter((tag, e.step) for tag in scalars for e in events.Scalars(tag))
    points += Counter(
        (tag.removesuffix("/text_summary"), e.step) for tag in tensors for e in events.Tensors(tag)
    )
    assert_complete(points)
    assert {e.step: e.value for e in events.Scalars("loss")}[3] == pytest.approx(0.25)
    assert str(events.Scalars("kl")[1].value) == "inf"
    table = events.Tensors(f"{SAMPLES}/text_summary")[0].tensor_proto.string_val[0].decode()
    assert len(table.splitlines()) == 22
    assert table.splitlines()[2] == "| eval.jsonl:0 | why \\| so?<br>x | because | true | 0.5 |"
    assert (
        b"train.learning_rate"
        in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    )
    assert "_hparams_/session_start_info" in events.PluginTagToContent("hparams")


def test_the_credentials_of_an_mlflow_server_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[str] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            created.append(tracking_uri)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: (
                SimpleNamespace(
                    info=SimpleNamespace(run_id="r1"),
                    data=SimpleNamespace(metrics={}),
                    experiment_id="e1",
                )
                if name != "list_artifacts"
                else []
            )

    monkeypatch.setattr("mlflow.MlflowClient", Client)
    address = "https://user:hunter2@mlflow.invalid"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    run = Killed(tmp_path / "first", kind="mlflow", project="mine")
    run.folder.mkdir()
    killed_twice(run)
    assert set(created) == {address}
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert run.folder / "trackers/mlflow.json" in files
    assert not any(b"hunter2" in path.read_bytes() for path in files)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*select_dtypes")  # pandas, about how mlflow writes a table
@pytest.mark.parametrize("has_database", [False, True])
def test_mlflow_without_a_server(
    has_database: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    if not has_database:
        monkeypatch.setitem(sys.modules, "alembic", None)
    elsewhere = tmp_path / "current"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = Killed(tmp_path / "first", kind="mlflow", project="mine", tags=["tiny"])
    run.folder.mkdir()
    killed_twice(run)
    state = json.loads((run.folder / "trackers/mlflow.json").read_text())
    # its small package has no other registry
    client = MlflowClient(tracking_uri=state["uri"], registry_uri=state["uri"])
    result = client.get_experiment_by_name("mine")
    (item,) = client.search_runs([result.experiment_id])
    assert (item.info.run_name, item.info.status, item.data.tags["tiny"]) == (
        "first",
        "FINISHED",
        "true",
    )
    assert item.data.params["train.learning_rate"] == "1e-05"
    points = Counter(
        (name, m.step)
        for name in item.data.metrics
        for m in client.get_metric_history(item.info.run_id, name)
    )
    tables = [file.path for file in client.list_artifacts(item.info.run_id, "eval")]
    points += Counter(
        (
            SAMPLES if has_database else "eval.samples",
            int(path.removesuffix(".json").rsplit("-", 1)[1]),
        )
        for path in tables
    )
    # in a folder, names are those of files
    assert_complete(points, str if has_database else lambda name: name.replace("/", "."))
    table = json.loads(
        Path(client.download_artifacts(item.info.run_id, f"{SAMPLES}-step-3.json")).read_text()
    )
    assert table["columns"] == ["origin", "prompt", "completion", "label", "reward"]
    assert len(table["data"]) == 20
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_trackio(tmp_path: Path) -> None:
    """In a separate process, as it has one folder in each."""
    code = (
        "import sys; from pathlib import Path; from tests.reports.tracked_runs import Killed, "
        "killed_twice\n"
        "killed_twice(Killed(Path(sys.argv[1]), kind='trackio', project='mine', name='first'))\n"
        "from trackio.sqlite_storage import SQLiteStorage as S; import json\n"
        "(run,) = S.get_run_records('mine')\n"
        "print('READ', json.dumps([S.get_logs('mine', run['name'], run_id=run['id']), "
        "S.get_run_config('mine', run['name'])]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows, config = json.loads(done.stdout.partition("READ ")[2].splitlines()[0])
    points = Counter((name, row["step"]) for row in rows for name in row)
    assert_complete(points)
    assert config["train"] == {"learning_rate": 1e-5, "betas": [0.9, 0.999]}
    (first,) = [row for row in rows if SAMPLES in row and row["step"] == 0]
    assert len(first[SAMPLES]["_value"]) == 20
    assert first[SAMPLES]["_value"][0]["completion"] == "because"
    assert (tmp_path / "trackio/mine.db").is_file()


# ------------------------------------------------------------------ all at once, on a real run


def history_of(folder: Path) -> tuple[Counter[tuple[str, int]], dict[str, Any], set[str]]:
    """Numbers by name and step, the summary, and the ids of the runs, of all wandb files below a
    folder.
    """
    from wandb.proto import wandb_internal_pb2

    points, summary, ids = Counter[tuple[str, int]](), dict[str, Any](), set[str]()
    for file in sorted(folder.rglob("*.wandb")):
        for raw in wandb_records(file.read_bytes()):
            element = wandb_internal_pb2.Record()
            element.ParseFromString(raw)
            if element.HasField("run"):
                ids.add(element.run.run_id)
            if element.HasField("history"):
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in element.history.item
                }
                points += Counter((name, row["_step"]) for name in row if not name.startswith("_"))
            if element.HasField("summary"):
                summary |= {
                    i.key or i.nested_key[0]: json.loads(i.value_json)
                    for i in element.summary.update
                }
    return points, summary, ids


def has_step(run: Path, step: int) -> bool:
    """Whether the files of wandb and trackio hold the loss of a step, which both buffer."""
    if ("loss", step) not in history_of(run / "wandb")[0]:
        return False
    with sqlite3.connect(run / "trackio/valence.db") as database:
        return bool(database.execute("select 1 from metrics where step = ?", [step]).fetchall())


TRAINS = """
import json, os, sys, time
from pathlib import Path
import torch
import valence
from tests.tiny_models import tiny
from tests.reports.test_trackers import has_step
from tests.tiny import tiny_tokenizer
place, run_dir, kill, sinks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
if not (place / "model").exists():
    tokenizer = tiny_tokenizer()
    tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    rows = [{"prompt": f"question {i} ", "completion": f"answer {i}", "label": i % 2 == 0} for i in range(16)]
    for name, some in (("train", rows[:12]), ("eval", rows[8:]), ("test", rows[10:])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in some))
def kills(run, record):
    if record["step"] == kill:
        until = time.monotonic() + 30
        while (run.log.waiting or not has_step(place / run_dir, kill)) and time.monotonic() < until:
            time.sleep(0.02)
        os.kill(os.getpid(), 9)
valence.train({
    "method": "kto", "model": {"name": str(place / "model")},
    "data": {"max_length": 64, **{name: str(place / f"{name}.jsonl") for name in ("train", "eval", "test")}},
    "train": {"batch_size": 4, "epochs": 3, "learning_rate": 1e-3}, "eval": {"every": 3, "train_examples": 0},
    "run": {"dir": str(place / run_dir), "save_every": 2, "sinks": sinks},
}, callbacks=[kills])
"""


def trains() -> None:
    exec(TRAINS, {})


def trained(place: Path, run_dir: str, kill: int, sinks: list[Any]) -> tuple[int, str]:
    """Status, and what was said."""
    words, message = (str(place), run_dir, str(kill), json.dumps(sinks)), place / "said"
    status = Program(
        *words, main=trains, output=message, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"
    ).wait(600)
    return status, message.read_text()


def logged(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [repeatable(row) for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(900)  # three programs that import all of the libraries
def test_every_tracker_of_a_killed_and_resumed_run_has_each_step_once(
    tmp_path: Path,
) -> None:
    import wandb
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # programs that are started from here are told of it, as from any that uses wandb itself
    wandb.setup().ensure_service()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["-c", str(tmp_path), "plain", "-1", "[]"])
        exec(TRAINS, {})
    kinds = [
        "tensorboard",
        {"kind": "wandb", "project": "mine", "mode": "offline"},
        "trackio",
        "mlflow",
    ]
    assert trained(tmp_path, "run", 5, kinds)[0] == -signal.SIGKILL
    status, message = trained(tmp_path, "run", -1, kinds)
    assert status == 0, message
    assert not any(kind in message.lower() for kind in ("tensorboard", "wandb", "mlflow"))
    assert "failed" not in message
    run = tmp_path / "run"
    assert logged(run) == logged(tmp_path / "plain")
    wanted = Counter((name, row["step"]) for row in logged(run) for name in row if name != "step")
    tests = {name for name, _ in wanted if name.startswith("test/")}
    assert {"loss", "grad_norm", "eval/loss"} <= {name for name, _ in wanted}
    assert tests

    def only(points: Counter[tuple[str, int]]) -> Counter[tuple[str, int]]:
        return Counter(
            {
                point: times
                for point, times in points.items()
                if point[0] in {name for name, _ in wanted}
            }
        )

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert (
        only(
            Counter((tag, e.step) for tag in events.Tags()["scalars"] for e in events.Scalars(tag))
        )
        == wanted
    )

    state = json.loads((run / "trackers/mlflow.json").read_text())
    client = MlflowClient(tracking_uri=state["uri"])
    names = {name.replace("/", "."): name for name, _ in wanted}
    held = client.get_run(state["run"]).data.metrics
    points = Counter(
        (names.get(n, n), m.step) for n in held for m in client.get_metric_history(state["run"], n)
    )
    assert only(points) == wanted

    assert history_of(run / "wandb")[2] == {
        json.loads((run / "trackers/wandb.json").read_text())["id"]
    }
    # each start writes the whole run, and replaces what earlier ones of its id sent
    points, summary, ids = history_of((run / "wandb/latest-run").resolve())
    assert ids == {json.loads((run / "trackers/wandb.json").read_text())["id"]}
    assert only(points) == Counter({point: 1 for point in wanted if point[0] not in tests})
    assert steps_of(points, SAMPLES) == [0, 3, 6, 9]
    assert tests <= summary.keys()
    assert summary["status"] == "done"

    with sqlite3.connect(run / "trackio/valence.db") as database:
        rows = database.execute("select step, metrics from metrics").fetchall()
    assert (
        only(Counter((name, step) for step, metrics in rows for name in json.loads(metrics)))
        == wanted
    )
