"""Recipes that are wrong: each gives one clear message with the place and the remedy, and never a traceback."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.facts import method_of
from valence.config.describe import settings_table
from valence.config.load import load_recipe
from valence.config.messages import ALSO_CALLED
from valence.errors import UserError

GOOD = """\
method: kto
model:
  name: some/model
data:
  train: feedback.jsonl
  eval: held_out.jsonl
"""


GOOD_WITH_TRAIN = {"method": "kto", "model": {"name": "some/model"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("feedback.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("")
    return tmp_path


def complaint(source: object, *words: str, training: bool = True) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(source, words, method_of=method_of, training=training)  # type: ignore[arg-type]
    assert caught.value.fix or "to fix it" in caught.value.what
    return caught.value


# The file

FILES: dict[str, tuple[bytes, str, str, str]] = {
    "empty": (b"", "", "empty", "method, model and data"),
    "only comments": (b"# later\n\n", "", "empty", "method, model and data"),
    "a list": (b"- method: kto\n", ":1", "a list, not a mapping", "at the left edge"),
    "a word": (b"kto\n", ":1", "a single value", "at the left edge"),
    "byte order mark": (b"\xef\xbb\xbfmethod: kto\n", ":1", "byte order mark", "without BOM"),
    "utf-16": ("method: kto\n".encode("utf-16"), ":1", "byte order mark", "UTF-8"),
    "latin-1": ("method: kto\n# caf\u00e9\n".encode("latin-1"), ":2", "0xe9 is not UTF-8", "UTF-8"),
    "null byte": (b"method: kto\nmodel: \x00\n", ":2", "'\\x00' is not allowed", "remove it"),
    "tab indent": (b"model:\n\tname: x\n", ":2", "not valid YAML", "never with tabs"),
    "tab after space": (b"model:\n  name: x\n \tdtype: x\n", ":3", "not valid YAML", "never with tabs"),
    "two colons": (b"method: kto: dpo\n", ":1", "mapping values", "in quotes"),
    "open bracket": (b"method: kto\nmodel: {name: x\n\n\n", ":2", "flow mapping", "close every bracket"),
    "open bracket before more": (b"method: kto\nmodel: {name: x\ndata: y\n", ":3", "flow mapping", "close every"),
    "open quote": (b"method: kto\nmodel: 'x\ndata: y\n", ":2", "quoted scalar", "close every bracket"),
    "bad indent": (b"model:\n  name: x\n dtype: y\n", ":3", "not valid YAML", "alike"),
    "unknown alias": (b"method: *kto\n", ":1", "undefined alias", "special character"),
    "at sign": (b"method: kto\nmodel: {name: @x}\n", ":2", "'@'", "special character"),
    "percent": (b"method: %kto\n", ":1", "'%'", "special character"),
    "two documents": (b"method: kto\n---\nmethod: dpo\n", ":2", "another document", "one recipe per file"),
    "tag": (b"method: !kto 3\n", ":1 (method)", "!kto means nothing", "in quotes"),
    "python tag": (b"method: !!python/object:os.system x\n", ":1 (method)", "means nothing", "remove it"),
    "wrong tag": (b"method: kto\ntrain: {seed: !!int x}\n", ":2 (train.seed)", "'x' is no int", "remove the tag"),
    "binary": (b"method: !!binary aGk=\n", ":1 (method)", "binary means nothing", "remove it"),
    "duplicate section": (b"method: kto\nmethod: dpo\n", ":2", "method is given twice, first at r.yaml:1", "remove one"),
    "duplicate name": (b"train:\n  seed: 1\n  seed: 1\n", ":3", "train.seed is given twice", "remove one"),
    "duplicate in braces": (b"train: {seed: 1, 'seed': 2}\n", ":1", "train.seed is given twice", "remove one"),
    "a list as a name": (b"[a, b]: 1\n", ":1", "a list or a mapping", "one word"),
    "itself": (b"model: &m\n  name: *m\n", ":1", "contains itself", "levels at most"),
    "aliases": (
        b"".join(b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9) if n else b"x") for n in range(12)),
        ":6",
        "more than 100,000 values",
        "instead of repeating",
    ),
    "very deep": (b"a: " + b"[" * 1100, ":1", "nested too deeply", "close every bracket"),
    "deep": (b"a: " + b"[" * 20 + b"]" * 20, ":1", "nested too deeply", "levels at most"),
    "half a character": (b'method: "\\ud800"\n', ":1 (method)", "half of a surrogate pair", "whole character"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files(name: str, folder: Path):
    content, where, what, fix = FILES[name]
    (folder / "r.yaml").write_bytes(content)
    error = complaint("r.yaml")
    assert error.where == "r.yaml" + where
    assert what in error.what
    assert fix in (error.fix or "")


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_other_line_ends_are_no_problem(line_end: bytes, folder: Path):
    (folder / "r.yaml").write_bytes(GOOD.encode().replace(b"\n", line_end))
    assert load_recipe("r.yaml", method_of=method_of).settings["model.name"].origin == "r.yaml:3"


def test_a_missing_recipe_names_the_nearest(folder: Path):
    (folder / "first.yaml").write_text(GOOD)
    assert "first.yaml?" in str(complaint("frist.yaml"))
    assert "does not exist" in str(complaint("nowhere/first.yaml"))


@pytest.mark.parametrize("name", ["x" * 300 + ".yaml", "x/" * 3000 + "r.yaml", "a\0b.yaml"])
def test_paths_that_cannot_be(name: str):
    for error in (complaint(name), complaint(GOOD_WITH_TRAIN | {"data": {"train": name}})):
        assert re.search("file systems allow|NUL", str(error))
        assert len(str(error)) < 500


def test_a_folder_is_no_recipe(folder: Path):
    (folder / "runs").mkdir()
    (folder / "runs" / "config.yaml").write_text(GOOD)
    error = complaint("runs")
    assert (error.where, error.fix) == ("runs", "name a file in it: runs/config.yaml")


# Names, types and ranges: (text added, place, what, remedy)

SHAPES: dict[str, tuple[str, str, str, str]] = {
    "unknown setting": ("train:\n  sed: 1\n", ":8 (train.sed)", "no such setting", "did you mean train.seed?"),
    "unknown section": ("trian: {seed: 1}\n", ":7 (trian)", "no such setting", "did you mean train?"),
    "a name of other programs": ("lr: 3.0\n", ":7 (lr)", "no such setting", "did you mean train.learning_rate?"),
    "gradient accumulation": (
        "train: {gradient_accumulation_steps: 8}\n",
        ":7 (train.gradient_accumulation_steps)",
        "no such setting",
        "train.batch_size counts",
    ),
    "a batch for each device": (
        "per_device_train_batch_size: 8\n",
        ":7 (per_device_train_batch_size)",
        "no such setting",
        "set train.batch_size instead",
    ),
    "another case of a name": ("train: {SEED: 1}\n", ":7 (train.SEED)", "no such setting", "did you mean train.seed?"),
    "another case of a word": ("train: {schedule: COSINE}\n", ":7 (train.schedule)", "is not one of", "did you mean cosine?"),
    "the same, inside a section": ("run: {dir: x, folder: y}\n", ":7 (run.folder)", "no such", "mean run.dir or rollout.folder?"),
    "setting outside its section": ("batch_size: 3\n", ":7 (batch_size)", "no such", "did you mean train.batch_size?"),
    "unknown, like nothing": ("train: {zzz: 1}\n", ":7 (train.zzz)", "no such", "train has batch_size, micro_batch"),
    "unknown in the loss": ("loss: {bata: 1}\n", ":7 (loss.bata)", "no such setting", "did you mean loss.beta?"),
    "merge key": ("train: {<<: {seed: 1}}\n", ":7 (train.<<)", "no such setting", "train has"),
    "boolean name": ("train: {true: 1}\n", ":7 (train.true)", "no such setting", "train has"),
    "text for a number": (
        "train: {batch_size: big}\n",
        ":7 (train.batch_size)",
        '"big" is not a whole number above 0',
        "Examples (judgements, pairs",
    ),
    "zero": ("train:\n\n  batch_size: 0\n", ":9 (train.batch_size)", "0 is not a whole number above 0", "a whole number"),
    "negative": ("train: {learning_rate: -1e-5}\n", ":7 (train.learning_rate)", "-1e-05 is not a number above 0", ""),
    "quoted number": ("train: {learning_rate: '1e-5'}\n", ":7 (train.learning_rate)", '"1e-5" is not', "without quotes"),
    "float for an integer": ("train: {batch_size: 16.0}\n", ":7 (train.batch_size)", "16.0 is not", "write 16"),
    "infinite": ("train: {epochs: .inf}\n", ":7 (train.epochs)", "Infinity is not a number", "Passes"),
    "not a number": ("train: {clip_norm: .nan}\n", ":7 (train.clip_norm)", "NaN is not a number", "null: no clipping"),
    "boolean for a number": ("train: {epochs: true}\n", ":7 (train.epochs)", "true is not a number above 0", "Passes"),
    "number for a boolean": ("train: {drop_last: 1}\n", ":7 (train.drop_last)", "1 is not true or false", "true or false"),
    "yes": ("train: {drop_last: yes}\n", ":7 (train.drop_last)", '"yes" is not true or false', "write true"),
    "off": ("train: {drop_last: off}\n", ":7 (train.drop_last)", '"off" is not true or false', "write false"),
    "None": ("train: {max_steps: None}\n", ":7 (train.max_steps)", '"None" is not', "write null"),
    "null": ("train: {seed: }\n", ":7 (train.seed)", "null is not a whole number", "Fixes the order"),
    "a number as a folder": ("run: {dir: 2024}\n", ":7 (run.dir)", "2024 is not text", 'in quotes: "2024"'),
    "empty text": ("run: {dir: ''}\n", ":7 (run.dir)", '"" is not text', "Folder of the run"),
    "unknown word": (
        "train: {schedule: cosin}\n",
        ":7 (train.schedule)",
        '"cosin" is not one of linear, cosine',
        "did you mean cosine?",
    ),
    "a list for a section": ("train: [1]\n", ":7 (train)", "[1] is not a section (batch_size", "The optimizer"),
    "a word for a section": ("train: fast\n", ":7 (train)", '"fast" is not a section', "The optimizer"),
    "a list for the loss": ("loss: [1]\n", ":7 (loss)", "[1] is not names with a value each", "valence losses"),
    "loss out of range": ("loss: {beta: 0}\n", ":7 (loss.beta)", "0 is not a number above 0", "Sharpness"),
    "too few": ("train: {betas: [0.9]}\n", ":7 (train.betas)", "[0.9] is not a list of 2", "moment"),
    "too many": ("train: {betas: [0.9, 0.9, 0.9]}\n", ":7 (train.betas)", "is not a list of 2", "moment"),
    "an item out of range": ("train:\n  betas:\n    - 0.9\n    - 1\n", ":10 (train.betas.1)", "1 is not a number", ""),
    "one of two kinds": ("run:\n  samples: 3\n", ":8 (run.samples)", "3 is not a section (prompts", "Answers"),
    "half a step": ("train: {warmup: 1.5}\n", ":7 (train.warmup)", "1.5 is neither a fraction below 1 nor a whole", ""),
    "evaluation each half step": ("eval: {every: 2.5}\n", ":7 (eval.every)", "2.5 is neither a fraction", ""),
    "no evaluation": ("eval: {every: 0}\n", ":7 (eval.every)", "0 is not a number above 0", ""),
    "huge seed": ("train: {seed: 99999999999999999999}\n", ":7 (train.seed)", "is not a whole number", ""),
}


def test_names_of_other_programs_stand_for_settings_that_there_are():
    own = {row.name for row in settings_table()}
    assert set(ALSO_CALLED) <= own
    others = [name for names in ALSO_CALLED.values() for name in names.split()]
    assert len(others) == len(set(others))
    clash = set(others) & {name.rpartition(".")[2] for name in own if ".N." not in name}
    assert clash == {"folder"}  # of rollout, which is named too


@pytest.mark.parametrize("name", SHAPES)
def test_bad_settings(name: str, folder: Path):
    text, where, what, fix = SHAPES[name]
    (folder / "r.yaml").write_text(GOOD + text)
    error = complaint("r.yaml")
    assert error.where == "r.yaml" + where
    assert what in error.what
    assert fix in (error.fix or "")


WHOLE: dict[str, tuple[str, str, str, str]] = {
    "no method": ("model: {name: m}\ndata: {train: feedback.jsonl}\n", " (method)", "is missing", "Name of a method"),
    "no model": ("method: kto\ndata: {train: feedback.jsonl}\n", " (model)", "is missing", "called the policy"),
    "empty model": ("method: kto\nmodel:\ndata: {train: feedback.jsonl}\n", ":2 (model.name)", "is missing", "A folder"),
    "no data": ("method: kto\nmodel: {name: m}\n", " (data.train)", "nothing to train on", "name a file"),
    "unknown method": (GOOD.replace("kto", "kot"), ":1 (method)", "no method 'kot'", "kto, dpo, sft"),
    "a list of methods": (GOOD.replace("kto", "[kto]"), ":1 (method)", '["kto"] is not text', "Name of a method"),
    "no path": (
        GOOD.replace("train: feedback.jsonl", "train: [{weight: 2}]"),
        ":5 (data.train.0.path)",
        "is missing",
        "A .jsonl",
    ),
    "a number as a path": (
        GOOD.replace("feedback.jsonl", "[3]"),
        ":5 (data.train.0)",
        "3 is not a section",
        "set it to a section",
    ),
    "data is a number": (GOOD[: GOOD.index("data")] + "data: 3\n", ":4 (data)", "is not a section", "Rows"),
    "float16": (GOOD.replace("some/model", "m\n  dtype: fp16"), ":4 (model.dtype)", "not supported", "write bfloat16"),
    "no type at all": (GOOD.replace("some/model", "m\n  dtype: int3"), ":4 (model.dtype)", "is not one of auto", "set it to"),
    "lora as a number": (
        GOOD.replace("some/model", "m\n  lora: 16"),
        ":4 (model.lora)",
        "16 is not a section (rank, alpha, dropout, targets) or null",
        "low-rank",
    ),
    "a layer that is no text": (
        GOOD.replace("some/model", "m\n  lora: {targets: [q, 3]}"),
        ":4 (model.lora.targets.1)",
        "3 is not text",
        'in quotes: "3"',
    ),
    "layers in one word": (
        GOOD.replace("some/model", "m\n  lora: {targets: all-liner}"),
        ":4 (model.lora.targets)",
        '"all-liner" is not a list (each text) or "all-linear"',
        "did you mean all-linear?",
    ),
    "nothing to train on": (
        GOOD.replace("train: feedback.jsonl", "train: []"),
        ":5 (data.train)",
        "nothing to train on",
        "train: feedback.jsonl",
    ),
    "no training data": (GOOD.replace("  train: feedback.jsonl\n", ""), ":4 (data.train)", "nothing to train on", "name a"),
    "missing data": (
        GOOD.replace("feedback", "fedback"),
        ":5 (data.train.0.path)",
        "no file fedback.jsonl",
        "did you mean feedback.jsonl?",
    ),
    "missing evaluation data": (
        GOOD.replace("held_out", "nowhere/x"),
        ":6 (data.eval.0.path)",
        "no file nowhere/x.jsonl",
        "folder nowhere does not exist",
    ),
    "neither file nor hub id": (
        GOOD.replace("feedback.jsonl", "feedback"),
        ":5 (data.train.0.path)",
        "no file feedback",
        "did you mean feedback.jsonl?",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_bad_recipes(name: str, folder: Path):
    text, where, what, fix = WHOLE[name]
    (folder / "r.yaml").write_text(text)
    error = complaint("r.yaml")
    assert error.where == "r.yaml" + where
    assert what in error.what
    assert fix in (error.fix or "")


# Settings that have no effect, or contradict others

SENSELESS: dict[str, tuple[list[str], str, str, str]] = {
    "evaluation without data": (["data.eval=[]", "eval.every=7"], "eval.every", "nothing is evaluated", "give data.eval"),
    "first evaluation without data": (["data.eval=[]", "eval.at_start=false"], "eval.at_start", "nothing is evaluated", "give"),
    "examples of nothing": (["data.eval=[]", "eval.max_examples=3"], "eval.max_examples", "nothing is evaluated", "data.eval"),
    "examples of the test": (
        ["data.eval=[]", "data.test=held_out.jsonl", "eval.max_examples=3"],
        "eval.max_examples",
        "nothing is evaluated",
        "data.eval",
    ),
    "reference model unread": (["method=sft", "reference.model=m"], "reference.model", "sft reads no reference", "remove it"),
    "reference cache unread": (["method=sft", "reference.cache=off"], "reference.cache", "sft reads no reference", "remove it"),
    "number of the best of none": (["data.top_n=2"], "data.top_n", "best_to_demonstrations reads it", "set data.convert"),
    "threshold without scores": (["data.threshold=1"], "data.threshold", "scores_to_judgements and scores_to_pairs", "convert"),
    "threshold of pairs": (
        ["method=dpo", "data.convert=judgements_to_pairs", "data.threshold=1"],
        "data.threshold",
        "has no effect",
        "set data.convert",
    ),
    "threshold of rankings": (
        ["method=grpo", "data.convert=scores_to_rankings", "data.threshold=1"],
        "data.threshold",
        "scores_to_all_pairs",
        "set data.convert",
    ),
    "converted to scores for labels": (
        ["data.convert=rankings_to_scored"],
        "data.convert",
        "rankings_to_scored does not make what kto reads: judgements",
        "another method",
    ),
    "converted to pairs for scores": (
        ["method=pointwise", "data.convert=scores_to_pairs"],
        "data.convert",
        "does not make what pointwise reads: scored answers",
        "another method",
    ),
    "turns of a judgement": (["data.train_on=assistant"], "data.train_on", "kto reads judgements", "a method like sft"),
    "strata of pairs": (["method=dpo", "data.stratify=true"], "data.stratify", "dpo reads preferences", "a method like kto"),
    "export without adapter": (["run.export=adapter"], "run.export", "no adapter", "set model.lora"),
    "length of no samples": (["run.samples.max_new_tokens=9"], "run.samples.max_new_tokens", "no answers", "samples.prompts"),
    "heat of no samples": (["run.samples.temperature=0"], "run.samples.temperature", "no answers", "samples.prompts"),
    "samples of no prompts": (["data.eval=[]", "run.samples.prompts=3"], "run.samples.prompts", "both empty", "data.eval"),
    "split of a file": (["data.train.0.split=test"], "data.train.0.split", "a file has no splits", "of the hub"),
    "converted to another kind": (
        ["data.convert=judgements_to_pairs"],
        "data.convert",
        "judgements_to_pairs does not make what kto reads: judgements",
        "another method",
    ),
    "scores without threshold": (
        ["data.convert=scores_to_judgements"],
        "data.threshold",
        "needs the score",
        "set data.threshold",
    ),
    "two adapters": (["model.lora.rank=4", "model.adapter=folder"], "model.lora", "already says the rank", "remove model.lora"),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_settings(name: str, folder: Path):
    words, setting, what, fix = SENSELESS[name]
    (folder / "r.yaml").write_text(GOOD)
    error = complaint("r.yaml", *words)
    assert (error.where or "").endswith(f"({setting})")
    assert what in error.what
    assert fix in (error.fix or "")


EFFECTIVE: dict[str, list[str]] = {
    "defaults are harmless": ["data.eval=[]", "eval.every=50", "run.export=auto", "data.threshold=null", "data.stratify=false"],
    "reference defaults": ["method=sft", "reference.cache=auto", "reference.model=null"],
    "evaluation": ["eval.every=7", "eval.at_start=false"],
    "a reference": ["reference.model=m", "reference.cache=folder"],
    "turns": ["method=sft", "data.train_on=assistant"],
    "strata": ["data.stratify=true"],
    "export of an adapter": ["model.lora={}", "run.export=adapter"],
    "export of a continued adapter": ["model.adapter=folder", "run.export=adapter"],
    "samples": ["run.samples.prompts=3", "run.samples.temperature=0"],
    "samples of the test": ["data.eval=[]", "data.test=held_out.jsonl", "run.samples.prompts=3"],
    "threshold": ["data.convert=scores_to_judgements", "data.threshold=3"],
    "the best ones": ["method=sft", "data.convert=best_to_demonstrations", "data.top_n=3"],
    "difference": ["method=dpo", "data.convert=scores_to_pairs", "data.threshold=0.5"],
    "any difference": ["method=dpo", "data.convert=scores_to_pairs"],
    "difference of all pairs": ["method=dpo", "data.convert=scores_to_all_pairs", "data.threshold=0.5"],
    "rankings": ["method=grpo", "data.convert=scores_to_rankings"],
    "judgements as verdicts": ["method=pointwise", "data.convert=pairs_to_judgements"],
    "scores as verdicts": ["method=pointwise", "data.convert=rankings_to_scored"],
    "strata of verdicts": ["method=pointwise", "data.stratify=true"],
    "chosen": ["method=sft", "data.convert=chosen_to_demonstrations"],
}


@pytest.mark.parametrize("name", EFFECTIVE)
def test_settings_that_make_sense(name: str, folder: Path):
    (folder / "r.yaml").write_text(GOOD)
    load_recipe("r.yaml", EFFECTIVE[name], method_of=method_of)


# The command line and mappings

WORDS: dict[str, tuple[str, str, str, str]] = {
    "unknown": ("train.sed=1", "command line (train.sed)", "no such setting", "did you mean train.seed?"),
    "wrong type": ("train.seed=x", "command line (train.seed)", '"x" is not a whole number', "Fixes the order"),
    "no equals sign": ("train.seed", "command line", "'train.seed'", "write setting=value"),
    "no value": ("train.seed=", "command line", "'train.seed='", "null for nothing"),
    "no name": ("=3", "command line", "'=3'", "write setting=value"),
    "a hole in the name": ("train..seed=3", "command line", "'train..seed=3'", "write setting=value"),
    "not YAML": ("train.betas=[1, 2", "command line", "flow sequence", "close every bracket"),
    "half a byte": ("run.dir=\udcff", "command line", "is not allowed", "remove it"),
    "index too far": (
        "data.train.3.path=x",
        "command line (data.train.3)",
        "data.train is a list of 1 and has no 3",
        "from 0 to 1",
    ),
    "name in a list": ("data.train.path=x", "command line (data.train.path)", "is a list of 1", "an index from 0"),
    "inside a value": ("model.name.x=1", "command line (model.name.x)", 'model.name is "some/model"', "set model.name itself"),
    "new file without a path": ("data.test.0.weight=2", "command line (data.test.0.path)", "is missing", "A .jsonl"),
    "missing file": ("data.test=feedbac.jsonl", "command line (data.test.0.path)", "no file", "did you mean feedback.jsonl?"),
    "duplicate": ("train={seed: 1, seed: 2}", "command line", "train.seed is given twice", "remove one"),
}


@pytest.mark.parametrize("name", WORDS)
def test_bad_overrides(name: str, folder: Path):
    word, where, what, fix = WORDS[name]
    (folder / "r.yaml").write_text(GOOD)
    error = complaint("r.yaml", word)
    assert error.where == where
    assert what in error.what
    assert fix in (error.fix or "")


def endless() -> dict[str, object]:
    value: dict[str, object] = {}
    value["again"] = value
    return value


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: {1: 2}, "the name 1 is not text"),
        (lambda: {"train": {"seed": object()}}, "a object cannot be a setting"),
        (lambda: {"run": {"dir": b"x"}}, "a bytes cannot be a setting"),
        (lambda: {"run": {"dir": "\ud800"}}, "half of a surrogate pair"),
        (lambda: {"\ud800": 1}, "half of a surrogate pair"),
        (lambda: {"train": {"epochs": math.nan}}, "NaN is not a number"),
        (endless, "contains itself"),
    ],
)
def test_bad_mappings(make: Callable[[], dict[str, object]], what: str):
    source = {"method": "kto", "model": {"name": "m"}, "data": {"train": "feedback.jsonl"}}
    assert what in str(complaint({**source, **make()}))


# Several at once


def test_all_problems_come_in_one_message(folder: Path):
    (folder / "r.yaml").write_text(GOOD + "train:\n  sed: 1\n  batch_size: 0\nloss: {beta: 0}\n")
    error = complaint("r.yaml", "run.dri=x")
    assert error.where == "r.yaml"
    assert error.what.startswith("4 settings are wrong")
    for place in (":8 (train.sed)", ":9 (train.batch_size)", ":10 (loss.beta)"):
        assert f"r.yaml{place}: " in error.what
    assert "command line (run.dri): " in error.what
    assert error.what.count("to fix it") == 4


def test_senseless_settings_and_missing_files_come_together(folder: Path):
    (folder / "r.yaml").write_text(GOOD.replace("feedback", "gone"))
    error = complaint("r.yaml", "data.stratify=true", "data.train_on=assistant", "data.threshold=1")
    assert error.what.startswith("3 settings are wrong")
    assert "stratify" not in error.what


def test_one_mistake_gives_one_message(folder: Path):
    (folder / "r.yaml").write_text(GOOD.replace("eval:", "evla:") + "eval: {every: 10}\n")
    assert complaint("r.yaml").where == "r.yaml:6 (data.evla)"
