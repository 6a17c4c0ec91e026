"""The settings in words."""

from __future__ import annotations

import pytest

from valence.config.describe import SettingRow, settings_table
from valence.config.schema import Recipe
from valence.methods import method_of

ROWS = {row.name: row for row in settings_table()}


@pytest.mark.parametrize(
    ("name", "takes", "default"),
    [
        ("method", "text", "required"),
        (
            "run.early_stop",
            "a section (metric, mode, patience, min_delta) or null",
            "null",
        ),
        ("model.lora.rank", "a whole number above 0 and at most 65,536", "16"),
        ("model.lora.dropout", "a number of at least 0 and below 1", "0.0"),
        ("model.lora.targets", "a list (each text) or text", '"all-linear"'),
        ("data.train.N.keys", "a mapping of names to values", "{}"),
        (
            "data.eval",
            "a list (each a section (path, split, subset, format, keys, weight, limit)) or a "
            "number above 0 and below 1",
            "[]",
        ),
        ("train.learning_rate", 'a number above 0 or "auto"', '"auto"'),
        ("train.schedule", "one of linear, cosine, constant", '"linear"'),
        (
            "train.betas",
            "a list of 2 items (each a number of at least 0 and below 1)",
            "[0.9, 0.999]",
        ),
        ("train.drop_last", "true or false", "false"),
        ("data.threshold", "a number or null", "null"),
    ],
)
def test_rows(name: str, takes: str, default: str):
    assert (ROWS[name].type, ROWS[name].default) == (takes, default)


def test_every_setting_has_a_meaning_on_one_line():
    assert [row.name for row in ROWS.values() if not row.meaning or "\n" in row.meaning] == []


def test_every_section_is_there():
    assert {name.split(".")[0] for name in ROWS} == set(Recipe.model_fields)


def test_the_settings_of_a_loss():
    row = settings_table(method_of("kto").settings, "loss.")[0]
    assert row == SettingRow("loss.beta", "a number above 0", "0.1", row.meaning, row.summary)
    assert row.meaning


def test_the_summary_is_the_first_paragraph():
    row = ROWS["model.dtype"]
    assert row.summary.startswith("Compute dtype.")
    assert row.meaning.startswith(f"{row.summary} ")
