"""`valence doctor`: checks of the machine, and of the needs of a recipe."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import torch

from tests.command import command as valence
from valence import network
from valence.cli import doctor_recipe
from valence.cli.doctor_checks import EXTRAS, Check, check_writable, examine
from valence.models import loading

RECIPE = """
method: kto
model: {name: ./model, dtype: float32}
data: {train: [rows.jsonl]}
run: {dir: runs/first}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of_recipe(*overrides: str) -> dict[str, Check]:
    return {
        item.name: item for item in doctor_recipe.examine_recipe(Path("recipe.yaml"), overrides)
    }


def test_everything_is_looked_at_and_every_problem_has_a_remedy(place: Path) -> None:
    result = list(examine())
    assert [
        about for about in dict.fromkeys(item.section for item in result) if about != "environment"
    ] == [
        "machine",
        "libraries",
        "devices",
        "tools",
        "folders",
        "network",
    ]
    assert {
        "python",
        "cores",
        "disk free",
        "torch",
        "transformers",
        "peft",
        "cpu",
        "gloo",
        "runs",
    } <= {e.name for e in result}
    assert all(item.detail for item in result)
    assert all(item.fix for item in result if item.state == "problem")
    assert not any(item.needed for item in result if item.state == "problem")
    assert sorted(path.name for path in place.iterdir()) == ["model", "recipe.yaml", "rows.jsonl"]


def test_the_extras_are_those_of_the_installation() -> None:
    project = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    declared = project["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"dev", "docs"}
    for name, (modules, _) in EXTRAS.items():
        packages = [
            re.split(r"[\[<>=]", item)[0].replace("-", "_").removesuffix("_skinny")
            for item in declared[name]
        ]
        assert list(modules) == packages


def test_a_library_that_is_missing_is_named_with_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    results = {item.name: item for item in examine()}
    assert (results["serve"].state, results["serve"].fix) == (
        "missing",
        "pip install 'valence-align[serve]'",
    )
    assert "valence serve" in results["serve"].detail
    assert "serve" not in results["extras"].detail


def test_a_cpu_that_does_not_know_bfloat16_is_told_and_no_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_slow in (True, False):
        name = "_is_mkldnn_bf16_supported"
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda is_slow=is_slow: not is_slow)
        (cpu,) = (item for item in examine() if item.name == "cpu")
        assert (cpu.state, cpu.fix) == ("ok", "")
        assert cpu.detail.endswith("set model.dtype: float32") == is_slow


def test_a_folder_is_really_written_to(tmp_path: Path) -> None:
    assert check_writable("a", "b", tmp_path / "x" / "y", "c").state == "ok"
    (tmp_path / "file").write_text("")
    result = check_writable("a", "b", tmp_path / "file" / "y", "the remedy", needed=True)
    assert (result.state, result.fix, result.needed) == ("problem", "the remedy", True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("name", "value", "odd"),
    [
        ("OMP_NUM_THREADS", "1", False),
        ("OMP_NUM_THREADS", "100000", True),
        ("OMP_NUM_THREADS", "many", True),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("CUDA_VISIBLE_DEVICES", "0", False),
        ("VALENCE_NATIVE", "0", True),
    ],
)
def test_variables_that_do_harm_are_told(
    name: str, value: str, odd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    (result,) = (item for item in examine() if (item.section, item.name) == ("environment", name))
    assert (result.state == "problem") == odd
    assert value in result.detail


def hub() -> Check:
    (result,) = (item for item in examine(network=True) if item.name == "hub")
    return result


def test_a_hub_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from huggingface_hub import constants

    over = threading.Event()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(network, "DEADLINE", 0.2)
    monkeypatch.setattr(httpx, "head", lambda *_, **__: over.wait() and httpx.Response(200))
    result = hub()
    over.set()
    assert (result.state, result.needed) == ("problem", False)
    assert "0.2" in result.detail

    def refused(*_: object, **__: object) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "head", refused)
    assert "refused" in hub().detail
    monkeypatch.setattr(httpx, "head", lambda *_, **__: httpx.Response(200))
    assert hub().state == "ok"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in hub().detail


@pytest.mark.usefixtures("place")
def test_a_recipe_that_has_all_it_needs() -> None:
    result = of_recipe()
    assert {value.state for value in result.values()} == {"ok"}
    assert "./model" in result["model.name"].detail


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("override", "name", "message"), [
    ("train.sed=1", "settings", "train.sed"),
    ("model.name=./mdoel", "model.name", "./mdoel"),
    ("model.name=a b", "model.name", "a b"),
    ("model.name=nobody/nothing", "model.name", "nobody/nothing"),
    ("run.dir=rows.jsonl/x", "run.dir", "rows.jsonl/x"),
    ("train.optimizer=adamw_8bit", "train.optimizer", "bitsandbytes"),
])  # fmt: skip
def test_what_a_recipe_lacks(
    override: str, name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    result = of_recipe(override)[name]
    assert message in result.detail
    assert (result.state, result.needed) == ("problem", True)
    assert result.fix


@pytest.mark.usefixtures("place")
def test_access_to_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub import constants, errors

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "hub_problem", lambda: "")

    def model_check() -> Check:
        return of_recipe("model.name=nobody/nothing")["model.name"]

    monkeypatch.setattr(huggingface_hub, "auth_check", lambda _: None)
    assert (model_check().state, model_check().needed) == ("ok", False)
    for error in (errors.GatedRepoError, errors.RepositoryNotFoundError):

        def refuse(_: str, error: type[errors.HfHubHTTPError] = error) -> None:
            raise error(
                "no",
                response=httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid")),
            )

        monkeypatch.setattr(huggingface_hub, "auth_check", refuse)
        assert (model_check().state, model_check().needed) == ("problem", True)

    def lose(_: str) -> None:
        raise RuntimeError("the connection was reset")

    monkeypatch.setattr(huggingface_hub, "auth_check", lose)
    assert "was reset" in model_check().detail
    monkeypatch.setattr(loading, "hub_problem", lambda: "no answer")
    assert (model_check().state, model_check().needed) == ("problem", True)
    assert "HF_ENDPOINT" in model_check().fix


@pytest.mark.usefixtures("place")
def test_the_command_prints_a_table_or_json_and_its_status_says_whether_something_is_needed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert valence("doctor") == 0
    shown = capsys.readouterr().out
    assert "transformers" in shown
    assert torch.__version__ in shown
    assert valence("doctor", "recipe.yaml", "model.name=./mdoel", "--json") == 2
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {frozenset(item) for item in results} == {
        frozenset(("about", "name", "state", "said", "fix", "needed"))
    }
    assert [item["name"] for item in results if item["needed"]] == ["model.name"]
    assert valence("doctor", "recipe.yaml", "model.name=./mdoel") == 2
    fix = of_recipe("model.name=./mdoel")["model.name"].fix
    assert fix in " ".join(capsys.readouterr().out.split())


def test_no_secret_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setitem(os.environ, name, "a-secret")
    assert valence("doctor", "--json") == 0
    assert "a-secret" not in capsys.readouterr().out
