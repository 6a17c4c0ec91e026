"""Valid recipes: values, origins, overrides, short forms, paths, and the resolved
recipe.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.errors import raises_error
from valence.config.load import LoadedRecipe, load_recipe, load_reward
from valence.data.split import PromptSplit
from valence.errors import UserError

GOOD = """\
method: kto
model:
  name: some/model
  lora: {rank: 8}
data:
  train:
    - path: feedback.jsonl
      keys: {prompt: question}
  eval: [{path: held_out.jsonl}]
loss: {beta: 0.2}
train:
  learning_rate: 1e-4
  batch_size: 1_000
  betas: [0.9, 0.95]
  epochs: 2
reference: {cache: off}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("feedback.jsonl", "held_out.jsonl", "more.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "recipe.yaml").write_text(GOOD)
    return tmp_path


def load(*overrides: str, source: object = "recipe.yaml", training: bool = True) -> LoadedRecipe:
    return load_recipe(source, overrides, training=training)  # type: ignore[arg-type]


def minimal(**sections: object) -> dict[str, object]:
    return {
        "method": "kto",
        "model": {"name": "m"},
        "data": {"train": "feedback.jsonl"},
        **sections,
    }


def test_values():
    recipe = load().recipe
    assert recipe.train.learning_rate == 1e-4
    assert recipe.train.batch_size == 1000
    assert recipe.train.betas == (0.9, 0.95)
    assert recipe.train.epochs == 2.0
    assert isinstance(recipe.train.epochs, float)
    assert recipe.reference.cache == "off"
    assert recipe.data.train[0].keys == {"prompt": "question"}
    assert recipe.model.lora is not None
    assert recipe.loss == {
        "beta": 0.2,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "z0_scope": "step",
        "class_weights": "given",
        "humanline": None,
    }


@pytest.mark.parametrize(
    ("name", "value", "origin"),
    [
        ("method", "kto", "recipe.yaml:1"),
        ("model.lora.rank", 8, "recipe.yaml:4"),
        ("model.lora.alpha", None, "default"),
        ("data.train.0.path", "feedback.jsonl", "recipe.yaml:7"),
        ("data.train.0.keys", {"prompt": "question"}, "recipe.yaml:8"),
        ("data.train.0.weight", 1.0, "default"),
        ("data.test", [], "default"),
        ("loss.beta", 0.2, "recipe.yaml:10"),
        ("loss.z0_scope", "step", "default"),
        ("train.betas", (0.9, 0.95), "recipe.yaml:14"),
        ("train.seed", 7, "command line"),
        ("run.samples.prompts", 0, "default"),
    ],
)
def test_origins(name: str, value: object, origin: str):
    setting = load("train.seed=7").settings[name]
    assert (setting.value, setting.origin) == (value, origin)


def test_a_setting_knows_whether_it_differs_from_its_default():
    settings = load("train.seed=0", "train.epochs=1").settings
    assert settings["train.seed"].is_default
    assert settings["train.epochs"].is_default
    assert not settings["loss.beta"].is_default


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["train.seed=1"], "train.seed", 1),
        (["train.seed=1", "train.seed=2"], "train.seed", 2),
        (["train.learning_rate=1e-5"], "train.learning_rate", 1e-5),
        (["train.clip_norm=null"], "train.clip_norm", None),
        (["data.train.0.path=more.jsonl"], "data.train.0.path", "more.jsonl"),
        (["data.train.1.path=more.jsonl"], "data.train.1.path", "more.jsonl"),
        (["data.train.path=more.jsonl"], "data.train.0.path", "more.jsonl"),
        (
            ["data.test=feedback.jsonl", "data.test.path=more.jsonl"],
            "data.test.0.path",
            "more.jsonl",
        ),
        (["run.sinks=tensorboard", "run.sinks.folder=logs"], "run.sinks.0.folder", "logs"),
        (["data.train=more.jsonl"], "data.train.0.path", "more.jsonl"),
        (["data.train=[feedback.jsonl, more.jsonl]"], "data.train.1.path", "more.jsonl"),
        (["data.test.0.path=more.jsonl"], "data.test.0.path", "more.jsonl"),
        (["data.test=more.jsonl", "data.test.0.weight=2"], "data.test.0.weight", 2.0),
        (["model.lora=null"], "model.lora", None),
        (["model.lora=null", "model.lora.rank=4"], "model.lora.rank", 4),
        (["loss.beta=0.5"], "loss.beta", 0.5),
        (["run.samples.prompts=3"], "run.samples.prompts", 3),
        (["run.dir='a=b'"], "run.dir", "a=b"),
        (["run.dir=a=b"], "run.dir", "a=b"),
        (["train={seed: 3}"], "train.seed", 3),
        (["reference={cache: auto}"], "reference.cache", "auto"),
    ],
)
def test_overrides(words: list[str], name: str, value: object):
    setting = load(*words).settings[name]
    assert setting.value == value
    assert setting.origin == "command line"


def test_an_override_of_a_section_replaces_it():
    assert load("train={seed: 3}").recipe.train.batch_size == 16
    assert "model.lora.rank" not in load("model.lora=null").settings


def test_an_override_leaves_the_origins_of_its_neighbours():
    settings = load("data.train.0.weight=2").settings
    assert settings["data.train.0.path"].origin == "recipe.yaml:7"
    assert settings["data.train.0.weight"].origin == "command line"


@pytest.mark.parametrize(
    "train",
    [
        "feedback.jsonl",
        ["feedback.jsonl"],
        {"path": "feedback.jsonl"},
        [{"path": "feedback.jsonl"}],
    ],
)
def test_short_forms_of_data(train: object):
    assert [s.path for s in load(source=minimal(data={"train": train})).recipe.data.train] == [
        "feedback.jsonl"
    ]


def test_a_mistake_in_a_file_without_a_list_has_its_line(folder: Path):
    (folder / "recipe.yaml").write_text(
        "method: kto\nmodel: m\ndata:\n  train:\n    path: feedback.jsonl\n    kys: {}\n"
    )
    with raises_error(
        "setting-unknown", where="recipe.yaml:6 (data.train.0.kys)", fix="data.train.0.keys"
    ):
        load()


def test_empty_sections_and_lists_are_as_good_as_none(folder: Path):
    (folder / "recipe.yaml").write_text(
        "method: kto\nmodel: {name: m}\ndata:\n  train: feedback.jsonl\n  eval:\nloss:\ntrain:\n "
        " # seed: 1\n"
    )
    assert load().recipe == load(source=minimal()).recipe


def test_a_mapping_may_hold_what_python_has(folder: Path):
    source = minimal(train={"betas": (0.8, 0.9), "epochs": 3}, run={"dir": Path("runs/a")})
    loaded = load(source=source)
    assert loaded.recipe.train.betas == (0.8, 0.9)
    assert loaded.recipe.run.dir == "runs/a"
    assert loaded.settings["train.epochs"].origin == "recipe"
    assert source["train"] == {"betas": (0.8, 0.9), "epochs": 3}


def test_anchors():
    text = GOOD.replace(
        "eval: [{path: held_out.jsonl}]", "eval: &rows [held_out.jsonl]\n  test: *rows"
    )
    Path("recipe.yaml").write_text(text)
    assert load().recipe.data.test == load().recipe.data.eval


# Data paths


def test_data_is_found_in_the_current_folder_first(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "here").mkdir()
    (folder / "here" / "feedback.jsonl").write_text("")
    monkeypatch.chdir(folder / "here")
    data = load(source=folder / "recipe.yaml").recipe.data
    assert data.train[0].path == "feedback.jsonl"
    assert data.eval[0].path == str(folder / "held_out.jsonl")


def test_a_recipe_in_another_folder_brings_its_data(folder: Path):
    (folder / "deep").mkdir()
    (folder / "deep" / "recipe.yaml").write_text(GOOD.replace("feedback", "only_there"))
    (folder / "deep" / "only_there.jsonl").write_text("")
    assert load(source="deep/recipe.yaml").recipe.data.train[0].path == "deep/only_there.jsonl"


@pytest.mark.parametrize("path", ["owner/data", "owner/data-v1.5", "Owner_1/x.y"])
def test_hub_ids_stay(path: str):
    source = load(
        "data.train=[]", f"data.train.0.path={path}", "data.train.0.split=train"
    ).recipe.data.train[0]
    assert (source.path, source.split) == (path, "train")


def test_without_training_data_may_be_absent():
    recipe = load("data.train=gone.jsonl", training=False).recipe
    assert recipe.data.train[0].path == "gone.jsonl"
    assert load("data.train=[]", training=False).recipe.data.train == []


def test_without_training_settings_may_have_no_effect_but_not_contradict():
    words = ["data.eval=[]", "eval.every=3", "eval.max_examples=2", "run.samples.prompts=2"]
    with raises_error("settings-invalid") as raised:
        load(*words)
    assert {(problem.code, problem.where) for problem in raised.error.problems} == {
        ("setting-no-effect", f"command line ({name})")
        for name in ("eval.every", "eval.max_examples", "run.samples.prompts")
    }
    assert load(*words, training=False).recipe.eval.every == 3
    with raises_error("setting-conflict", where="(data.convert)"):
        load("data.convert=scores_to_pairs", training=False)


@pytest.mark.parametrize(
    "word",
    [
        "train.epochs=1e308",
        "model.lora.rank=1000000000",
        "run.samples.max_new_tokens=99999999999",
        f"data.limit={10**30}",
    ],
)
def test_numbers_beyond_all_use_are_refused(word: str):
    with raises_error("setting-type", where=f"({word.partition('=')[0]})", fix="at most"):
        load(word)


def test_rows_in_memory_take_the_place_of_files():
    source: dict[str, object] = {"method": "kto", "model": {"name": "m"}, "eval": {"every": 3}}
    inputs = load_recipe(source, in_memory=("train", "eval"))
    assert inputs.recipe.eval.every == 3
    load_recipe({**source, "data": {"eval": "gone.jsonl"}}, in_memory=("train", "eval"))
    with raises_error("setting-no-effect", where="(eval.every)", fix="data.eval"):
        load_recipe(source, in_memory=("train",))
    with raises_error("file-not-found", where="(data.eval.0.path)"):
        load_recipe({**source, "data": {"eval": "gone.jsonl"}}, in_memory=("train",))


# The resolved recipe


def resolved_again(loaded: LoadedRecipe) -> LoadedRecipe:
    Path("config.yaml").write_text(loaded.to_yaml(), encoding="utf-8")
    return load(source="config.yaml", training=False)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.lora=null", "data.eval=[]"],
        ["method=sft", "loss=null", "reference=null", "data.train_on=assistant"],
        ["data.convert=scores_to_judgements", "data.threshold=0.5"],
        ["train.max_steps=3", "train.warmup=10", "data.train.0.limit=3", "eval.every=0.25"],
        ["loss.z0_scope={group: 4, pairing: next}", "loss.humanline=[-0.3, 0.4]"],
    ],
)
def test_the_resolved_recipe_loads_as_the_same(words: list[str]):
    loaded = load(*words)
    again = resolved_again(loaded)
    assert again.recipe == loaded.recipe
    assert {n: s.value for n, s in again.settings.items()} == {
        n: s.value for n, s in loaded.settings.items()
    }
    assert all(s.origin.startswith("config.yaml:") for s in again.settings.values())


NASTY = [
    "off",
    "1e-5",
    "null",
    "~",
    "true",
    "2024-01-01",
    "0x1f",
    "010",
    " x ",
    "a: b",
    "# no",
    "*a",
    "é漢🙂",
    "a\nb",
    "-",
    "a\x85b",
    "a\u2028b",
    "\u200b",
    "\x1b[0m",
    '"',
    "'",
    "{x}",
    "=",
    "<<",
    "1_000",
    ".5",
    "!x",
    "%",
    "@",
    "`",
]


@pytest.mark.parametrize("text", NASTY)
def test_any_text_survives(text: str):
    loaded = load(
        source=minimal(run={"dir": text}, model={"name": "m", "lora": {"targets": [text]}})
    )
    assert resolved_again(loaded).recipe == loaded.recipe


@settings(deadline=None)
@given(st.text(min_size=1), st.floats(min_value=1e-300, max_value=1e300))
def test_any_text_and_number_survive(text: str, number: float):
    try:
        source = minimal(
            model={"name": "m", "lora": {"targets": [text]}}, train={"learning_rate": number}
        )
        loaded = load(source=source, training=False)
    except UserError as error:
        assert error.code == "text-encoding"  # noqa: PT017
        return
    assert resolved_again(loaded).recipe == loaded.recipe


def test_loading_imports_no_torch():
    code = (
        "import sys, valence.config.load as l; print('torch' in sys.modules, 'transformers' "
        "in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert out.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    "data", ["feedback.jsonl", ["feedback.jsonl"], {"train": ["feedback.jsonl"]}], ids=str
)
def test_a_model_and_data_may_be_given_by_their_names_alone(data: object):
    full = load(source=minimal())
    assert load(source={"method": "kto", "model": "m", "data": data}).recipe == full.recipe
    changed = load(
        "model.lora={rank: 4}", source={"method": "kto", "model": "m", "data": data}
    ).recipe
    assert (changed.model.name, changed.model.lora.rank if changed.model.lora else None) == ("m", 4)
    assert load("model=other", source=minimal()).recipe.model.name == "other"


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("bf16", "bfloat16"),
        ("BF16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("fp32", "float32"),
        ("float", "float32"),
        ("double", "float64"),
        ("float32", "float32"),
        ("auto", "auto"),
    ],
)
def test_types_have_short_names(written: str, dtype: str):
    assert load(f"model.dtype={written}", source=minimal()).settings["model.dtype"].value == dtype


def test_a_share_of_the_rows_may_be_held_out() -> None:
    loaded = load("data.eval=0.1", "data.eval_seed=3", "eval.every=5", source=minimal())
    data = loaded.recipe.data
    assert data.split == PromptSplit(0.1, 3)
    assert (data.files("train"), data.files("eval")) == (data.train, [])
    assert resolved_again(loaded).recipe == loaded.recipe
    assert loaded.settings["data.eval"].value == 0.1
    assert load("data.eval=held_out.jsonl", source=minimal()).recipe.data.split is None


@pytest.mark.parametrize(
    ("overrides", "code", "where"),
    [
        (["data.eval=0"], "setting-value", "data.eval"),
        (["data.eval=1"], "setting-value", "data.eval"),
        (["data.eval=10"], "setting-value", "data.eval"),
        (["data.eval=-0.1"], "setting-value", "data.eval"),
        (["data.eval=true"], "setting-value", "data.eval"),
        (["data.eval_seed=1"], "setting-no-effect", "data.eval_seed"),
        (["data.eval=0.1", "data.eval_seed=-1"], "setting-type", "data.eval_seed"),
        (["data.eval=[{path: held_out.jsonl, pth: 1}]"], "setting-unknown", "data.eval.0.pth"),
        (["data.eval=[{split: x}]"], "setting-missing", "data.eval.0.path"),
    ],
)
def test_a_share_that_is_none(overrides: list[str], code: str, where: str) -> None:
    with raises_error(code, where=where):
        load(*overrides, source=minimal())


ADDRESS = "http://user:hunter2@host.invalid/score"


@pytest.mark.parametrize(
    ("sections", "where", "fix"),
    [
        ({"reward": ADDRESS}, "reward.0.reward", "token_env"),
        ({"reward": f"http://a/x, {ADDRESS}"}, "reward.0.reward", "token_env"),
        ({"reward": {"judge": ADDRESS}}, "reward.0", "token_env"),
        ({"reward": {"reward": "m:f", "settings": {"a": [ADDRESS]}}}, "reward.0.settings", ""),
        ({"rollout": {"url": ADDRESS}}, "rollout.url", "OPENAI_API_KEY"),
        ({"rollout": {"url": ["http://a", ADDRESS]}}, "rollout.url.1", "VLLM_API_KEY"),
        (
            {"run": {"sinks": {"kind": "mlflow", "uri": "postgresql://hunter2@db/x"}}},
            "run.sinks.0.uri",
            "MLFLOW_TRACKING_URI",
        ),
        ({"model": {"name": "https://user:hunter2@hub/model"}}, "model.name", ""),
    ],
)
def test_addresses_with_credentials_are_refused(
    sections: dict[str, object], where: str, fix: str
) -> None:
    with raises_error("address-credentials", where=where, fix=fix) as raised:
        load(source=minimal(**sections))
    assert "hunter2" not in str(raised.error)


def test_credentials_in_an_override_are_refused() -> None:
    for training in (True, False):
        with raises_error("address-credentials", where="reward.0.reward") as raised:
            load(f"reward={ADDRESS}", source=minimal(), training=training)
        assert "hunter2" not in str(raised.error)
    with raises_error("address-credentials", where="reward") as raised:
        load_reward(ADDRESS)
    assert "hunter2" not in str(raised.error)


@pytest.mark.parametrize(
    "text", ["http://host/x@2", "see http://user@host", "a@b", "http://host/?to=me@b"]
)
def test_an_at_sign_elsewhere_is_no_user_name(text: str) -> None:
    rows = {"reward": "m:f", "settings": {"text": text}}
    recipe = load(source=minimal(reward=rows, method="rejection"), training=False).recipe
    assert recipe.reward[0].settings == {"text": text}
