"""Reading ``--over``, and the configurations that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.arch.source import ROOT
from tests.errors import raises_error
from valence.apps.sweep.grid import Grid, ValueRange, folder_name, label_of
from valence.cli.sweep import repeat_over
from valence.config.grids import LEARNING_RATE_FACTORS, RECOMMENDED_GRIDS, recommended_grid
from valence.errors import UserError
from valence.methods import METHODS, ONLINE


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "method: kto\nmodel: {name: tiny, lora: {rank: 2}}\n"
        "data: {train: rows.jsonl, eval: rows.jsonl}\n"
    )
    return path


def test_values_have_types_and_are_combined(recipe: Path) -> None:
    over = ["loss.beta=0.03,1", "train.betas=[0.9,0.95],[0.9,0.999]", "data.as_chat=true,auto"]
    configurations = Grid(recipe, [], over).expand()
    assert len(configurations) == 8
    assert dict(configurations[1].values) == {
        "loss.beta": 0.03,
        "train.betas": (0.9, 0.95),
        "data.as_chat": "auto",
    }
    assert [c.values["loss.beta"] for c in configurations[:5]] == [0.03] * 4 + [1.0]
    assert configurations[0].overrides[1] == "train.betas=[0.9, 0.95]"


def test_the_configuration_of_the_recipe_is_recognized(recipe: Path) -> None:
    """By the values that the recipe resolves to, here the default of beta and of the rate."""
    over = ["loss.beta=0.1,0.3", "train.learning_rate=1e-4,0.0003"]
    grid = Grid(recipe, [], over)
    assert [c.is_default for c in grid.expand()] == [True, False, False, False]
    assert grid.default.label == "beta=0.1,lr=0.0001"
    grid = Grid(recipe, ["loss.beta=0.3"], over)
    assert [c.is_default for c in grid.expand()] == [False, False, True, False]


def test_only_runs_that_can_share_the_cache_do(recipe: Path) -> None:
    over = ["train.epochs=1,2"]
    assert all(c.shares_cache for c in Grid(recipe, [], over).expand())
    for overrides in (
        ["reference.cache=off"],
        ["reference.cache=kept"],
        ["reference.sync_every=2"],
    ):
        assert not any(c.shares_cache for c in Grid(recipe, overrides, over).expand())
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    pairs = ["data.train=pairs.jsonl", "data.eval=pairs.jsonl", "method=dpo"]
    methods = Grid(recipe, pairs, ["method=dpo,simpo"]).expand()
    assert [c.shares_cache for c in methods] == [True, False]


MISTAKES = {
    "sweep-empty": [],
    "sweep-over-syntax": ["loss.beta"],
    "sweep-values-empty": ["loss.beta="],
    "sweep-setting-duplicate": ["loss.beta=1,2", "loss.beta=3"],
    "sweep-value-duplicate": ["loss.beta=0.1,1e-1"],
    "setting-unknown": ["loss.betta=1,2"],
    "setting-type": ["loss.beta=x,2"],
    "sweep-range": ["loss.beta=0.1:1:log"],
    "sweep-setting-fixed": ["run.dir=a,b"],
}


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes(recipe: Path, code: str) -> None:
    with pytest.raises(UserError) as caught:
        Grid(recipe, [], MISTAKES[code]).expand()
    assert caught.value.code == code
    assert caught.value.fix


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("loss.beta=1,,2", "sweep-over-syntax"),
        ("loss.beta=[1,2", "sweep-over-syntax"),
        ("loss.beta=2:1", "sweep-range"),
        ("loss.beta=0:1:log", "sweep-range"),
        ("loss.beta=1:2:square", "sweep-range"),
        ("train.seed=0,1", "sweep-setting-fixed"),
        ("data.eval=a,b", "sweep-setting-fixed"),
        ("eval.max_examples=1,2", "sweep-setting-fixed"),
    ],
)
def test_other_mistakes(recipe: Path, word: str, code: str) -> None:
    with pytest.raises(UserError) as caught:
        Grid(recipe, [], [word]).expand()
    assert caught.value.code == code


def test_ranges(recipe: Path) -> None:
    grid = Grid(recipe, [], ["train.learning_rate=1e-7:1e-5:log", "train.batch_size=8:64"])
    assert grid.axes["train.learning_rate"] == ValueRange(1e-7, 1e-5, True, False)
    assert grid.axes["train.batch_size"] == ValueRange(8, 64, False, True)


def test_the_page_shows_the_recommended_grids() -> None:
    page = (ROOT / "docs/train/runs.md").read_text(encoding="utf-8")
    rows = [
        f"| {', '.join(f'`{name}`' for name in grid.methods)} | `{setting}` | "
        f"{', '.join(f'{value:g}' for value in values)} |"
        for grid in RECOMMENDED_GRIDS
        for setting, values in grid.settings.items()
    ]
    table = page.split("| Methods | Setting |")[1].partition("\n\n")[0].splitlines()[2:]
    assert table == rows


def test_names_distinguish_settings_and_are_files() -> None:
    assert label_of({"train.learning_rate": 1e-6, "loss.beta": 0.1}) == "lr=1e-06,beta=0.1"
    both = {"train.batch_size": 4, "mix.0.batch_size": 8}
    assert label_of(both) == "train.batch_size=4,mix.0.batch_size=8"
    assert folder_name("beta=0.1,lr=1e-06") == "beta=0.1,lr=1e-06"
    names = [folder_name(label) for label in ("name=a/b", "name=a\\b", "x" * 400, "\u4f60" * 140)]
    assert len(set(names)) == 4
    assert all("/" not in name and len(name.encode()) < 200 for name in names)


def test_several_words_follow_over() -> None:
    words = ["r.yaml", "train.epochs=2", "--over", "a=1,2", "b=3", "--out", "f", "c=4"]
    repeated = repeat_over(words)
    assert repeated == [
        *("r.yaml", "train.epochs=2", "--over", "a=1,2", "--over", "b=3", "--out", "f", "c=4")
    ]
    assert repeat_over(["--over", "recommended", "a=1", "r.yaml", "b=2"]) == [
        *("--over", "recommended", "--over", "a=1", "r.yaml", "b=2")
    ]


def test_every_recommended_grid_is_valid_and_around_the_default(recipe: Path) -> None:
    listed = [name for grid in RECOMMENDED_GRIDS for name in grid.methods]
    assert len(set(listed)) == len(listed)
    assert set(listed) <= {*METHODS, *ONLINE}
    for name, method in (METHODS | ONLINE).items():
        grid = recommended_grid(name, method.online, method.learning_rates, False)
        assert len(grid["train.learning_rate"]) == len(LEARNING_RATE_FACTORS)
        assert method.learning_rates.full in grid["train.learning_rate"]
        defaults = method.settings.model_fields
        for setting, values in grid.items():
            section, _, key = setting.partition(".")
            assert len(set(values)) == len(values) > 1
            if section == "loss":
                assert method.settings.model_validate({key: values[0]})
                default = defaults[key].get_default()
                assert min(values) <= default <= max(values), (name, setting)
    assert len(Grid(recipe, [], ["recommended"]).expand()) == 9


@pytest.mark.parametrize("word", ["data.train.0.limit=1,2", "data.limit=1,2", "data.eval_seed=1,2"])
def test_the_rows_of_which_a_share_is_held_out_are_fixed(recipe: Path, word: str) -> None:
    with raises_error("sweep-setting-fixed", where=word.split("=")[0]):
        Grid(recipe, ["data.eval=0.1"], [word])
    assert Grid(recipe, ["data.eval=0.1"], ["loss.beta=0.1,0.3"]).expand()


def test_rows_may_vary_with_a_file_to_evaluate_on(recipe: Path) -> None:
    assert len(Grid(recipe, [], ["data.train.0.limit=1,2"]).expand()) == 2


def test_epochs_are_not_varied_when_max_steps_overrides_them(recipe: Path) -> None:
    """The recommended grid of sft varies the epochs."""
    rows = '{"prompt": "a", "completion": "b"}\n'
    Path("rows.jsonl").write_text(rows)
    overrides = ["method=sft"]
    assert "train.epochs" in Grid(recipe, overrides, ["recommended"]).axes
    overrides.append("train.max_steps=5")
    assert list(Grid(recipe, overrides, ["recommended"]).axes) == ["train.learning_rate"]
    with pytest.raises(UserError) as caught:
        Grid(recipe, overrides, ["train.epochs=1,2"])
    assert caught.value.code == "setting-no-effect"
