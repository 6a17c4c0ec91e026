"""Recipes that are wrong: each gives one error with its code, its place and a remedy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.facts import GOOD, MEANING, check_recipe_error, load_error
from valence.config.describe import settings_table
from valence.config.load import load_recipe
from valence.config.messages import ALSO_CALLED


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("feedback.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


# The file: (content, place, code, what the error quotes)

FILES: dict[str, tuple[bytes, str, str, str]] = {
    "empty": (b"", "", "recipe-empty", ""),
    "only comments": (b"# later\n\n", "", "recipe-empty", ""),
    "a list": (b"- method: kto\n", ":1", "recipe-not-a-mapping", ""),
    "a word": (b"kto\n", ":1", "recipe-not-a-mapping", ""),
    "byte order mark": (b"\xef\xbb\xbfmethod: kto\n", ":1", "file-byte-order-mark", ""),
    "utf-16": ("method: kto\n".encode("utf-16"), ":1", "file-byte-order-mark", ""),
    "latin-1": ("method: kto\n# caf\u00e9\n".encode("latin-1"), ":2", "file-encoding", "0xe9"),
    "null byte": (b"method: kto\nmodel: \x00\n", ":2", "yaml-character", "'\\x00'"),
    "tab indent": (b"model:\n\tname: x\n", ":2", "yaml-tab", ""),
    "tab after space": (b"model:\n  name: x\n \tdtype: x\n", ":3", "yaml-tab", ""),
    "two colons": (b"method: kto: dpo\n", ":1", "yaml-colon", ""),
    "open bracket": (b"method: kto\nmodel: {name: x\n\n\n", ":2", "yaml-syntax", ""),
    "open bracket before more": (
        b"method: kto\nmodel: {name: x\ndata: y\n",
        ":3",
        "yaml-syntax",
        "':'",
    ),
    "open quote": (b"method: kto\nmodel: 'x\ndata: y\n", ":2", "yaml-syntax", ""),
    "bad indent": (b"model:\n  name: x\n dtype: y\n", ":3", "yaml-syntax", ""),
    "unknown alias": (b"method: *kto\n", ":1", "yaml-special-character", "'kto'"),
    "at sign": (b"method: kto\nmodel: {name: @x}\n", ":2", "yaml-special-character", "'@'"),
    "percent": (b"method: %kto\n", ":1", "yaml-special-character", "'%'"),
    "two documents": (b"method: kto\n---\nmethod: dpo\n", ":2", "yaml-several-documents", ""),
    "tag": (b"method: !kto 3\n", ":1 (method)", "yaml-tag", "!kto"),
    "python tag": (
        b"method: !!python/object:os.system x\n",
        ":1 (method)",
        "yaml-tag",
        "python/object:os.system",
    ),
    "wrong tag": (b"method: kto\ntrain: {seed: !!int x}\n", ":2 (train.seed)", "yaml-tag", "'x'"),
    "binary": (b"method: !!binary aGk=\n", ":1 (method)", "yaml-tag", "binary"),
    "duplicate section": (b"method: kto\nmethod: dpo\n", ":2", "setting-duplicate", "r.yaml:1"),
    "duplicate name": (
        b"train:\n  seed: 1\n  seed: 1\n",
        ":3",
        "setting-duplicate",
        "train.seed",
    ),
    "duplicate in braces": (
        b"train: {seed: 1, 'seed': 2}\n",
        ":1",
        "setting-duplicate",
        "train.seed",
    ),
    "a list as a name": (b"[a, b]: 1\n", ":1", "setting-name-invalid", ""),
    "itself": (b"model: &m\n  name: *m\n", ":1", "recipe-too-deep", ""),
    "aliases": (
        b"".join(
            b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9) if n else b"x")
            for n in range(12)
        ),
        ":6",
        "recipe-too-large",
        "100,000",
    ),
    "very deep": (b"a: " + b"[" * 1100, ":1", "recipe-too-deep", ""),
    "deep": (b"a: " + b"[" * 20 + b"]" * 20, ":1", "recipe-too-deep", ""),
    "half a character": (b'method: "\\ud800"\n', ":1 (method)", "text-encoding", ""),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(name: str, folder: Path):
    content, where, code, value = FILES[name]
    (folder / "r.yaml").write_bytes(content)
    check_recipe_error(load_error("r.yaml"), "r.yaml" + where, code, value, "")


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_other_line_ends_are_no_problem(line_end: bytes, folder: Path):
    (folder / "r.yaml").write_bytes(GOOD.encode().replace(b"\n", line_end))
    assert load_recipe("r.yaml").settings["model.name"].origin == "r.yaml:3"


def test_a_missing_recipe_names_the_nearest(folder: Path):
    (folder / "first.yaml").write_text(GOOD)
    check_recipe_error(load_error("frist.yaml"), "frist.yaml", "recipe-not-found", "", "first.yaml")
    for name in ("rows.jsonl", "rows.csv.gz", "rows.parquet"):
        (folder / name).write_bytes(b"PAR1")
        check_recipe_error(load_error(name), name, "recipe-is-data", "", "valence init")
    missing = load_error("nowhere/first.yaml")
    check_recipe_error(missing, "nowhere/first.yaml", "recipe-not-found", "", "nowhere")


@pytest.mark.parametrize("name", ["x" * 300 + ".yaml", "x/" * 3000 + "r.yaml", "a\0b.yaml"])
def test_paths_that_cannot_be(name: str):
    recipe = {"method": "kto", "model": {"name": "some/model"}, "data": {"train": name}}
    for source in (name, recipe):
        error = load_error(source)
        assert error.code == ("path-invalid" if "\0" in name else "path-too-long")
        assert len(str(error)) < 500


def test_a_folder_is_no_recipe(folder: Path):
    (folder / "runs").mkdir()
    (folder / "runs" / "config.yaml").write_text(GOOD)
    check_recipe_error(load_error("runs"), "runs", "path-is-folder", "", "runs/config.yaml")


# Names, types and ranges: (text added, place, code, what the error quotes, what the fix names)

UNKNOWN = "setting-unknown"
TYPE = "setting-type"
VALUE = "setting-value"
SHAPES: dict[str, tuple[str, str, str, str, str]] = {
    "unknown setting": ("train:\n  sed: 1\n", ":8 (train.sed)", UNKNOWN, "", "train.seed?"),
    "unknown section": ("trian: {seed: 1}\n", ":7 (trian)", UNKNOWN, "", "train?"),
    "a name of other programs": ("lr: 3.0\n", ":7 (lr)", UNKNOWN, "", "train.learning_rate?"),
    "gradient accumulation": (
        "train: {gradient_accumulation_steps: 8}\n",
        ":7 (train.gradient_accumulation_steps)",
        UNKNOWN,
        "",
        "train.batch_size",
    ),
    "a batch for each device": (
        "per_device_train_batch_size: 8\n",
        ":7 (per_device_train_batch_size)",
        UNKNOWN,
        "",
        "train.batch_size",
    ),
    "part of a name, and a name of another section": (
        "train: {steps: 10}\n",
        ":7 (train.steps)",
        UNKNOWN,
        "",
        "train.max_steps",
    ),
    "another case of a name": (
        "train: {SEED: 1}\n",
        ":7 (train.SEED)",
        UNKNOWN,
        "",
        "train.seed?",
    ),
    "another case of a word": (
        "train: {schedule: COSINE}\n",
        ":7 (train.schedule)",
        TYPE,
        '"COSINE"',
        "cosine",
    ),
    "the same, inside a section": (
        "run: {dir: x, folder: y}\n",
        ":7 (run.folder)",
        UNKNOWN,
        "",
        "run.dir or rollout.folder?",
    ),
    "setting outside its section": (
        "batch_size: 3\n",
        ":7 (batch_size)",
        UNKNOWN,
        "",
        "train.batch_size?",
    ),
    "setting of the loss outside its section": (
        "beta: 0.1\n",
        ":7 (beta)",
        UNKNOWN,
        "",
        "did you mean loss.beta?",
    ),
    "setting of the loss in another section": (
        "train: {beta: 0.1}\n",
        ":7 (train.beta)",
        UNKNOWN,
        "",
        "did you mean loss.beta?",
    ),
    "slip in a short name": (
        "rollout: {tool: ['tools:add']}\n",
        ":7 (rollout.tool)",
        UNKNOWN,
        "",
        "did you mean rollout.tools",
    ),
    "text that is not a number": (
        "train: {learning_rate: nan}\n",
        ":7 (train.learning_rate)",
        TYPE,
        '"nan"',
        "set it to a number above 0",
    ),
    "unknown, like nothing": (
        "train: {zzz: 1}\n",
        ":7 (train.zzz)",
        UNKNOWN,
        "",
        "batch_size, micro_batch_tokens",
    ),
    "unknown in the loss": ("loss: {bata: 1}\n", ":7 (loss.bata)", UNKNOWN, "", "loss.beta?"),
    "merge key": ("train: {<<: {seed: 1}}\n", ":7 (train.<<)", UNKNOWN, "", "batch_size"),
    "boolean name": ("train: {true: 1}\n", ":7 (train.true)", UNKNOWN, "", "batch_size"),
    "text for a number": (
        "train: {batch_size: big}\n",
        ":7 (train.batch_size)",
        TYPE,
        '"big"',
        MEANING,
    ),
    "zero": ("train:\n\n  batch_size: 0\n", ":9 (train.batch_size)", TYPE, "0", MEANING),
    "negative": (
        "train: {learning_rate: -1e-5}\n",
        ":7 (train.learning_rate)",
        TYPE,
        "-1e-05",
        MEANING,
    ),
    "quoted number": (
        "train: {learning_rate: '1e-5'}\n",
        ":7 (train.learning_rate)",
        TYPE,
        '"1e-5"',
        "1e-5",
    ),
    "float for an integer": (
        "train: {batch_size: 16.0}\n",
        ":7 (train.batch_size)",
        TYPE,
        "16.0",
        "16",
    ),
    "infinite": ("train: {epochs: .inf}\n", ":7 (train.epochs)", TYPE, "Infinity", MEANING),
    "not a number": (
        "train: {clip_norm: .nan}\n",
        ":7 (train.clip_norm)",
        TYPE,
        "NaN",
        MEANING,
    ),
    "boolean for a number": (
        "train: {epochs: true}\n",
        ":7 (train.epochs)",
        TYPE,
        "true",
        MEANING,
    ),
    "number for a boolean": (
        "train: {drop_last: 1}\n",
        ":7 (train.drop_last)",
        TYPE,
        "1",
        MEANING,
    ),
    "yes": ("train: {drop_last: yes}\n", ":7 (train.drop_last)", TYPE, '"yes"', "true"),
    "off": ("train: {drop_last: off}\n", ":7 (train.drop_last)", TYPE, '"off"', "false"),
    "None": ("train: {max_steps: None}\n", ":7 (train.max_steps)", TYPE, '"None"', "null"),
    "null": ("train: {seed: }\n", ":7 (train.seed)", TYPE, "null", MEANING),
    "a number as a folder": ("run: {dir: 2024}\n", ":7 (run.dir)", TYPE, "2024", '"2024"'),
    "empty text": ("run: {dir: ''}\n", ":7 (run.dir)", TYPE, '""', MEANING),
    "unknown word": (
        "train: {schedule: cosin}\n",
        ":7 (train.schedule)",
        TYPE,
        '"cosin"',
        "cosine?",
    ),
    "a list for a section": ("train: [1]\n", ":7 (train)", TYPE, "[1]", "batch_size"),
    "a word for a section": ("train: fast\n", ":7 (train)", TYPE, '"fast"', "batch_size"),
    "a list for the loss": ("loss: [1]\n", ":7 (loss)", TYPE, "[1]", "valence docs"),
    "loss out of range": ("loss: {beta: 0}\n", ":7 (loss.beta)", TYPE, "0", MEANING),
    "too few": ("train: {betas: [0.9]}\n", ":7 (train.betas)", TYPE, "[0.9]", MEANING),
    "too many": (
        "train: {betas: [0.9, 0.9, 0.9]}\n",
        ":7 (train.betas)",
        TYPE,
        "[0.9, 0.9, 0.9]",
        MEANING,
    ),
    "an item out of range": (
        "train:\n  betas:\n    - 0.9\n    - 1\n",
        ":10 (train.betas.1)",
        TYPE,
        "1",
        "",
    ),
    "one of two kinds": ("run:\n  samples: 3\n", ":8 (run.samples)", TYPE, "3", "prompts"),
    "half a step": ("train: {warmup: 1.5}\n", ":7 (train.warmup)", "setting-value", "1.5", ""),
    "evaluation each half step": (
        "eval: {every: 2.5}\n",
        ":7 (eval.every)",
        "setting-value",
        "2.5",
        "",
    ),
    "no evaluation": ("eval: {every: 0}\n", ":7 (eval.every)", TYPE, "0", MEANING),
    "huge seed": (
        "train: {seed: 99999999999999999999}\n",
        ":7 (train.seed)",
        TYPE,
        "99999999999999999999",
        MEANING,
    ),
}


def test_names_of_other_programs_stand_for_settings_that_there_are():
    names = {row.name for row in settings_table()}
    assert set(ALSO_CALLED) <= names
    others = [other for aliases in ALSO_CALLED.values() for other in aliases.split()]
    assert len(others) == len(set(others))
    clash = set(others) & {name.rpartition(".")[2] for name in names if ".N." not in name}
    assert clash == {"folder"}  # of rollout, which is named too


@pytest.mark.parametrize("name", SHAPES)
def test_bad_settings(name: str, folder: Path):
    text, where, code, value, fix = SHAPES[name]
    (folder / "r.yaml").write_text(GOOD + text)
    check_recipe_error(load_error("r.yaml"), "r.yaml" + where, code, value, fix)


MISSING = "setting-missing"
NO_DATA = "train-data-missing"
NO_FILE = "file-not-found"
RECIPES: dict[str, tuple[str, str, str, str, str]] = {
    "no method": (
        "model: {name: m}\ndata: {train: feedback.jsonl}\n",
        " (method)",
        MISSING,
        "",
        MEANING,
    ),
    "no model": (
        "method: kto\ndata: {train: feedback.jsonl}\n",
        " (model)",
        MISSING,
        "",
        "owner/model",
    ),
    "empty model": (
        "method: kto\nmodel:\ndata: {train: feedback.jsonl}\n",
        ":2 (model.name)",
        MISSING,
        "",
        MEANING,
    ),
    "no data": ("method: kto\nmodel: {name: m}\n", " (data.train)", NO_DATA, "", "train:"),
    "unknown method": (
        GOOD.replace("kto", "kot"),
        ":1 (method)",
        "method-unknown",
        "'kot'",
        "kto, dpo, sft",
    ),
    "a list of methods": (
        GOOD.replace("kto", "[kto]"),
        ":1 (method)",
        TYPE,
        '["kto"]',
        MEANING,
    ),
    "no path": (
        GOOD.replace("train: feedback.jsonl", "train: [{weight: 2}]"),
        ":5 (data.train.0.path)",
        MISSING,
        "",
        MEANING,
    ),
    "a number as a path": (
        GOOD.replace("feedback.jsonl", "[3]"),
        ":5 (data.train.0)",
        TYPE,
        "3",
        "path, split",
    ),
    "data is a number": (
        GOOD[: GOOD.index("data")] + "data: 3\n",
        ":4 (data)",
        TYPE,
        "3",
        "train, eval",
    ),
    "float16": (
        GOOD.replace("some/model", "m\n  dtype: fp16"),
        ":4 (model.dtype)",
        "setting-value",
        '"fp16"',
        "bfloat16",
    ),
    "no type at all": (
        GOOD.replace("some/model", "m\n  dtype: int3"),
        ":4 (model.dtype)",
        TYPE,
        '"int3"',
        MEANING,
    ),
    "lora as a number": (
        GOOD.replace("some/model", "m\n  lora: 16"),
        ":4 (model.lora)",
        TYPE,
        "16",
        MEANING,
    ),
    "a layer that is no text": (
        GOOD.replace("some/model", "m\n  lora: {targets: [q, 3]}"),
        ":4 (model.lora.targets.1)",
        TYPE,
        "3",
        '"3"',
    ),
    "layers in one word": (
        GOOD.replace("some/model", "m\n  lora: {targets: all-liner}"),
        ":4 (model.lora.targets)",
        VALUE,
        '"all-liner"',
        "all-linear?",
    ),
    "one layer without brackets": (
        GOOD.replace("some/model", "m\n  lora: {targets: q_proj}"),
        ":4 (model.lora.targets)",
        VALUE,
        '"q_proj"',
        "[q_proj]",
    ),
    "a pattern that is none": (
        GOOD.replace("some/model", "m\n  lora: {exclude_modules: '*.q_proj'}"),
        ":4 (model.lora.exclude_modules)",
        VALUE,
        "*.q_proj",
        "list of names",
    ),
    "a field of PEFT that is refused": (
        GOOD.replace("some/model", "m\n  lora: {use_qalora: true}"),
        ":4 (model.lora.use_qalora)",
        "setting-unsupported",
        "GPTQ",
        "nf4",
    ),
    "an initialization that needs data": (
        GOOD.replace("some/model", "m\n  lora: {init_lora_weights: eva}"),
        ":4 (model.lora.init_lora_weights)",
        VALUE,
        "data",
        "pissa",
    ),
    "an initialization that there is not": (
        GOOD.replace("some/model", "m\n  lora: {init_lora_weights: pisa}"),
        ":4 (model.lora.init_lora_weights)",
        TYPE,
        "pisa",
        "pissa?",
    ),
    "an odd rank of two orthogonal halves": (
        GOOD.replace("some/model", "m\n  lora: {rank: 3, init_lora_weights: orthogonal}"),
        ":4 (model.lora.init_lora_weights)",
        VALUE,
        "even",
        "model.lora.rank",
    ),
    "a pattern for some layers": (
        GOOD.replace("some/model", "m\n  lora: {targets: '.*q_proj', layers_to_transform: [0]}"),
        ":4 (model.lora.layers_to_transform)",
        VALUE,
        "regular expression",
        "model.lora.targets",
    ),
    "a list of layers for all layers": (
        GOOD.replace("some/model", "m\n  lora: {layers_pattern: h}"),
        ":4 (model.lora.layers_pattern)",
        VALUE,
        "layers_to_transform",
        "layers_to_transform",
    ),
    "a bias of a DoRA adapter": (
        GOOD.replace("some/model", "m\n  lora: {use_dora: true, lora_bias: true}"),
        ":4 (model.lora.lora_bias)",
        VALUE,
        "use_dora",
        "lora_bias",
    ),
    "an optimizer without its module": (
        GOOD + "train: {optimizer: SDG}\n",
        ":7 (train.optimizer)",
        VALUE,
        "SDG",
        "torch.optim.SGD",
    ),
    "an optimizer that is no name": (
        GOOD + "train: {optimizer: 'torch..SGD'}\n",
        ":7 (train.optimizer)",
        VALUE,
        "torch..SGD",
        "import path",
    ),
    "nothing to train on": (
        GOOD.replace("train: feedback.jsonl", "train: []"),
        ":5 (data.train)",
        NO_DATA,
        "",
        "train: feedback.jsonl",
    ),
    "no training data": (
        GOOD.replace("  train: feedback.jsonl\n", ""),
        ":4 (data.train)",
        NO_DATA,
        "",
        "train: feedback.jsonl",
    ),
    "missing data": (
        GOOD.replace("feedback", "fedback"),
        ":5 (data.train.0.path)",
        NO_FILE,
        "fedback.jsonl",
        " feedback.jsonl?",
    ),
    "missing evaluation data": (
        GOOD.replace("held_out", "nowhere/x"),
        ":6 (data.eval.0.path)",
        NO_FILE,
        "nowhere/x.jsonl",
        " nowhere ",
    ),
    "neither file nor hub id": (
        GOOD.replace("feedback.jsonl", "feedback"),
        ":5 (data.train.0.path)",
        NO_FILE,
        "feedback",
        "feedback.jsonl?",
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_bad_recipes(name: str, folder: Path):
    text, where, code, value, fix = RECIPES[name]
    (folder / "r.yaml").write_text(text)
    check_recipe_error(load_error("r.yaml"), "r.yaml" + where, code, value, fix)


# The command line and mappings

SYNTAX = "override-syntax"
OVERRIDES: dict[str, tuple[str, str, str, str, str]] = {
    "unknown": ("train.sed=1", " (train.sed)", UNKNOWN, "", "train.seed?"),
    "wrong type": ("train.seed=x", " (train.seed)", TYPE, '"x"', MEANING),
    "no equals sign": ("train.seed", "", SYNTAX, "'train.seed'", "train.seed=1"),
    "no value": ("train.seed=", "", SYNTAX, "'train.seed='", "null"),
    "no name": ("=3", "", SYNTAX, "'=3'", "train.seed=1"),
    "a hole in the name": ("train..seed=3", "", SYNTAX, "'train..seed=3'", "train.seed=1"),
    "not YAML": ("train.betas=[1, 2", "", SYNTAX, "'train.betas=[1, 2'", ""),
    "half a byte": ("run.dir=\udcff", "", SYNTAX, "'\\udcff'", ""),
    "index too far": (
        "data.train.3.path=x",
        " (data.train.3)",
        "override-index",
        "data.train",
        "0 to 2",
    ),
    "name in a list": (
        "data.train.path=x",
        " (data.train.path)",
        "override-index",
        "data.train",
        "data.train=x to replace the list, or data.train.0.path=x",
    ),
    "unknown name in the only section of a list": (
        "data.eval.wight=2",
        " (data.eval.0.wight)",
        UNKNOWN,
        "",
        "weight?",
    ),
    "another name in a list": (
        "data.train.weight=2",
        " (data.train.weight)",
        "override-index",
        "data.train",
        "write data.train.0.weight=2",
    ),
    "inside a value": (
        "model.name.x=1",
        " (model.name.x)",
        "override-not-a-section",
        'model.name is "some/model"',
        "model.name=1",
    ),
    "new file without a path": (
        "data.test.0.weight=2",
        " (data.test.0.path)",
        MISSING,
        "",
        MEANING,
    ),
    "missing file": (
        "data.test=feedbac.jsonl",
        " (data.test.0.path)",
        NO_FILE,
        "feedbac.jsonl",
        "feedback.jsonl?",
    ),
    "duplicate": ("train={seed: 1, seed: 2}", "", "setting-duplicate", "train.seed", ""),
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_bad_overrides(name: str, folder: Path):
    word, where, code, value, fix = OVERRIDES[name]
    two_files = GOOD.replace("feedback.jsonl", "[feedback.jsonl, held_out.jsonl]")
    (folder / "r.yaml").write_text(two_files)
    check_recipe_error(load_error("r.yaml", word), "command line" + where, code, value, fix)


def endless() -> dict[str, object]:
    value: dict[str, object] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("make", "where", "code", "value"),
    [
        (lambda: {1: 2}, "recipe ()", "setting-name-invalid", "1"),
        (lambda: {"train": {"seed": object()}}, "recipe (train.seed)", TYPE, "object"),
        (lambda: {"run": {"dir": b"x"}}, "recipe (run.dir)", TYPE, "bytes"),
        (lambda: {"run": {"dir": "\ud800"}}, "recipe (run.dir)", "text-encoding", ""),
        (lambda: {"\ud800": 1}, "recipe ()", "text-encoding", ""),
        (lambda: {"train": {"epochs": math.nan}}, "recipe (train.epochs)", TYPE, "NaN"),
        (endless, "recipe", "recipe-too-deep", ""),
    ],
)
def test_bad_mappings(make: Callable[[], dict[str, object]], where: str, code: str, value: str):
    source = {"method": "kto", "model": {"name": "m"}, "data": {"train": "feedback.jsonl"}}
    error = load_error({**source, **make()})
    assert (error.code, error.where) == (code, where)
    assert value in error.message


# Several at once


def test_all_problems_come_in_one_message(folder: Path):
    text = GOOD + "train:\n  sed: 1\n  batch_size: 0\nloss: {beta: 0}\n"
    (folder / "r.yaml").write_text(text)
    error = load_error("r.yaml", "run.dri=x")
    assert (error.code, error.where) == ("settings-invalid", "r.yaml")
    assert {(problem.where, problem.code) for problem in error.problems} == {
        ("r.yaml:8 (train.sed)", UNKNOWN),
        ("r.yaml:9 (train.batch_size)", TYPE),
        ("r.yaml:10 (loss.beta)", TYPE),
        ("command line (run.dri)", UNKNOWN),
    }
    assert len(error.problems) == 4
    for problem in error.problems:
        assert f"{problem.where}: {problem.message}" in error.message
        assert str(problem.fix) in error.message


def test_senseless_settings_and_missing_files_come_together(folder: Path):
    (folder / "r.yaml").write_text(GOOD.replace("feedback", "gone"))
    words = ("data.stratify=true", "data.train_on=assistant", "data.threshold=1")
    error = load_error("r.yaml", *words)
    assert {(problem.where, problem.code) for problem in error.problems} == {
        ("r.yaml:5 (data.train.0.path)", NO_FILE),
        ("command line (data.train_on)", "setting-no-effect"),
        ("command line (data.threshold)", "setting-no-effect"),
    }


def test_one_mistake_gives_one_message(folder: Path):
    (folder / "r.yaml").write_text(GOOD.replace("eval:", "evla:") + "eval: {every: 10}\n")
    check_recipe_error(load_error("r.yaml"), "r.yaml:6 (data.evla)", UNKNOWN, "", "data.eval?")
