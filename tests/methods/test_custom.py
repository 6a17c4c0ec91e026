"""Losses and advantages from outside of the package: equal to the built-in ones, in every way."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import valence
from tests.command import ROWS, command, command_error, place
from tests.contract.test_contract import SEVERAL, gradient, same_however_cut
from tests.errors import check_error, raises_error
from tests.methods import user_losses
from tests.units import models_for, objective, sampled, units_for
from valence.methods import method_of
from valence.user_code.sources import code_digest

__all__ = ["place"]

MODULE = "tests.methods.user_losses"
EQUAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dpo": ("dpo", {"beta": 0.3}, {"beta": 0.3}),
    "simpo": ("simpo", {"gap": 0.5}, {"beta": 2.5, "gamma_beta_ratio": 0.2}),
    "thumbs": ("apo_zero_unpaired", {}, {}),
    "imitate": ("sft", {}, {}),
    "bradley_terry": ("bradley_terry", {}, {}),
    "clip": ("dapo", {"eps": 0.1}, {"eps_low": 0.1, "eps_high": 0.1}),
    "per_sequence": ("grpo", {}, {}),
}
"""The method that each equals, with both settings."""
PAIRS = [
    {"prompt": row["prompt"], "chosen": f"good {i}", "rejected": f"bad {i * 7}"}
    for i, row in enumerate(ROWS)
]
SETTINGS: dict[str, Any] = {
    "model": "./model",
    "data": {"max_length": 128},
    "train.batch_size": 5,
    "run.samples.prompts": 0,
    "quiet": True,
}


def without_margins(name: str) -> list[Any]:
    """Rows without what only built-in losses read."""
    return [replace(unit, margin=0.0, soft=None) for unit in units_for(name)]


@pytest.mark.parametrize("name", EQUAL)
def test_loss_and_gradient_equal_those_of_the_built_in_method(name: str) -> None:
    target, (builtin, settings, other) = f"{MODULE}:{name}", EQUAL[name]
    models = models_for(builtin)
    _, numbers, grad = gradient(objective(target, *models, **settings), without_margins(target))
    _, expected, same = gradient(objective(builtin, *models, **other), without_margins(builtin))
    assert grad.norm() > 1e-6
    torch.testing.assert_close(grad, same, rtol=1e-9, atol=1e-12)
    assert numbers["loss"] == pytest.approx(expected["loss"], rel=1e-9)
    has_same_reward = name != "simpo"  # whose implicit reward is per token
    for key in (key for key in numbers if has_same_reward or not key.startswith("rewards/")):
        assert numbers[key] == pytest.approx(expected[key], rel=1e-9, abs=1e-12), key
    assert len(numbers) > 1


@pytest.mark.parametrize("name", [*EQUAL, "imitate_sums", "margins"])
def test_a_loss_does_not_depend_on_micro_batches_or_order(name: str) -> None:
    target = f"{MODULE}:{name}"
    builtin, settings = EQUAL[name][:2] if name in EQUAL else ("dpo", {})
    models = models_for(builtin)
    same_however_cut(target, settings, models, units_for(target), (SEVERAL, 24))
    if method_of(target).loss.data == "ranking":
        same_however_cut(target, settings, models, sampled(), (SEVERAL,))


def test_what_follows_from_the_inputs() -> None:
    rows = {
        name: (loss.view, loss.data, loss.average)
        for name in EQUAL
        for loss in [method_of(f"{MODULE}:{name}").loss]
    }
    assert rows == {
        "dpo": ("pair", "preference", "pair_mean"),
        "simpo": ("pair", "preference", "pair_mean"),
        "thumbs": ("seq", "judgement", "seq_mean"),
        "imitate": ("token", "demonstration", "token_mean"),
        "bradley_terry": ("score_pair", "preference", "pair_mean"),
        "clip": ("token", "ranking", "token_mean"),
        "per_sequence": ("token", "ranking", "seq_mean_token_mean"),
    }
    method = method_of(f"{MODULE}:imitate_sums")
    assert (method.loss.view, method.kind) == ("seq", "demonstration")
    assert "nll_weight" in method_of(f"{MODULE}:margins").settings.model_fields
    builders = {"dpo": "preference_pairs", "thumbs": "binary_labels", "imitate": "best_of_n"}
    for name, builder in builders.items():
        sample_builder = method_of(f"{MODULE}:{name}", online=True).sample_builder
        assert sample_builder is not None
        assert sample_builder.fn.__name__ == builder


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("mean_of_pairs", "loss-shape"),
        ("a_number", "loss-shape"),
        ("centred", "loss-couples"),
        ("misspelled", "loss-input-unknown"),
        ("without_gradient", "loss-value"),
        ("infinite", "loss-value"),
        ("raises", "loss-failed"),
        ("far_maximum", "loss-couples"),
        ("coupled_gradient", "loss-couples"),
        ("by_size", "loss-couples"),
        ("dropped", "loss-random"),
        ("nan_gradient", "loss-value"),
        ("softly", "loss-input-unknown"),
        ("with_z0", "loss-input-unknown"),
        ("wrong_average", "loss-field"),
        ("wrong_view", "loss-input-unknown"),
        ("wrong_modifier", "loss-field"),
        ("coupled_tokens", "loss-field"),
        ("coupled_scores", "loss-field"),
        ("unhashable_setting", "loss-signature"),
        ("NotALoss", "method-not-callable"),
        ("constant", "method-not-callable"),
        ("nowhere", "method-not-found"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_an_error(name: str, code: str) -> None:
    with raises_error(code, where="method"):
        method = method_of(f"{MODULE}:{name}")
        method.check(method.resolve({}))


def test_a_misspelled_input_is_named_and_the_place_of_an_exception() -> None:
    with raises_error("loss-input-unknown", fix="logp_l"):
        method_of(f"{MODULE}:misspelled")
    method = method_of(f"{MODULE}:raises")
    with raises_error("loss-failed") as raised:
        method.check({})
    line = user_losses.raises.__code__.co_firstlineno
    assert f"user_losses.py:{line + 1}" in raised.error.message


def test_a_loss_of_the_of_a_step_may_couple_its_rows() -> None:
    method = method_of(f"{MODULE}:of_a_step")
    method.check({})
    target = f"{MODULE}:of_a_step"
    same_however_cut(target, {}, models_for("aot"), units_for(target), (SEVERAL, 24))


def test_settings_are_checked_as_those_of_built_in_losses(place: Path) -> None:
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    recipe = place / "own.yaml"
    recipe.write_text(
        f"method: {MODULE}:simpo\nmodel: {{name: ./model}}\ndata: {{train: pairs.jsonl, "
        "max_length: 128}\nloss: {gap: 0.5}\nrun: {dir: runs/own}\n"
    )
    assert command("check", "own.yaml") == 0
    check_error(command_error("check", "own.yaml", "loss.gap=null"), "setting-type", where="gap")
    check_error(command_error("check", "own.yaml", "loss.gamma=1"), "setting-unknown")
    check_error(command_error("check", "own.yaml", f"method={MODULE}:a_number"), "setting-unknown")
    error = command_error("check", "own.yaml", f"method={MODULE}:a_number", "loss=null")
    check_error(error, "loss-shape", where="command line (method)")
    assert command("docs", f"{MODULE}:simpo") == 0
    assert command("docs", f"{MODULE}:group_mean") == 0


def test_a_run_equals_that_of_the_built_in_method(place: Path) -> None:
    runs = [
        valence.train(
            method=method, train=PAIRS, **SETTINGS, **{"run.dir": f"runs/{i}", "loss.beta": 0.3}
        )
        for i, method in enumerate(("dpo", f"{MODULE}:dpo", user_losses.dpo))
    ]
    first, *others = ([record["loss"] for record in run.history] for run in runs)
    assert len(first) == 2
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-6)
    states = [run.policy.state_dict() for run in runs]
    for state in states[1:]:
        for key, value in states[0].items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-7)


def test_an_edited_loss_is_not_resumed_without_permission(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    code = "def loss(logp_w, logp_l):\n    return logp_l - {}logp_w\n"
    (place / "edited_loss.py").write_text(code.format(""))
    options = {**SETTINGS, "run.dir": "runs/edited", "train.max_steps": 2}

    def train(**changes: Any) -> Any:
        sys.modules.pop("edited_loss", None)
        importlib.invalidate_caches()
        return valence.train(method="edited_loss:loss", train=PAIRS, **{**options, **changes})

    train()
    train(**{"train.max_steps": 3})
    (place / "edited_loss.py").write_text(code.format("2 * "))
    with raises_error("run-differs") as raised:
        train(**{"train.max_steps": 4})
    assert "method.source" in raised.error.message
    run = train(**{"train.max_steps": 4}, allow=["method.source"])
    assert run.step == 4
    sys.modules.pop("edited_loss", None)


def test_objects_that_no_import_finds(place: Path) -> None:
    """A local function, as in a notebook; the same one resumes, another one does not."""

    def loss(logp_w: Any, logp_l: Any, *, beta: float = 1.0) -> Any:
        return -torch.nn.functional.logsigmoid(beta * (logp_w - logp_l))

    options = {**SETTINGS, "run.dir": "runs/local"}
    run = valence.train(method=loss, train=PAIRS, **options, **{"train.max_steps": 1})
    assert run.recipe.method.startswith("python:")
    run = valence.train(method=loss, train=PAIRS, **options, **{"train.max_steps": 2})
    assert run.step == 2
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    words = "data.train=pairs.jsonl", "method=python:other"
    error = command_error("check", "runs/local/config.yaml", *words)
    check_error(error, "method-not-found", where="command line (method)", fix="pass it again")


def test_commands_that_need_no_loss_do_not_execute_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "gone_loss.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\n"
        "def loss(logp_w, logp_l):\n    return logp_l - logp_w\n"
    )
    valence.train(method="gone_loss:loss", train=PAIRS, **SETTINGS, **{"run.dir": "runs/gone"})
    (place / "executed").unlink()
    sys.modules.pop("gone_loss")
    assert command("sample", "runs/gone", "--prompt", "a", "--max-new-tokens", "2") == 0
    assert command("export", "runs/gone", "out", "--no-verify") == 0
    assert "gone_loss:loss" in (place / "out" / "README.md").read_text()
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    rows = "data.eval=[{path: pairs.jsonl}]"
    error = command_error("evaluate", "runs/gone", rows)
    check_error(error, "code-not-trusted", fix="method=gone_loss:loss")
    words = "--data", "pairs.jsonl", "--out", "scores.jsonl"
    check_error(command_error("score", "runs/gone", *words), "code-not-trusted")
    assert not (place / "executed").exists()
    assert command("evaluate", "runs/gone", rows, "method=gone_loss:loss") == 0
    assert (place / "executed").exists()
    # a folder whose record names code is not believed either
    facts = place / "runs/gone/run.json"
    facts.write_text(
        facts.read_text().replace('"stand_in": "slic"', '"stand_in": "gone_loss:loss"')
    )
    sys.modules.pop("gone_loss")
    (place / "executed").unlink()
    command("sample", "runs/gone", "--prompt", "a", "--max-new-tokens", "2")
    assert not (place / "executed").exists()


def test_the_model_card_of_a_reopened_run_names_all_losses_and_their_settings(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "mixed_losses.py").write_text(
        "def pairs(logp_w, logp_l, *, lead=0.5):\n    return logp_l - logp_w + lead\n"
        "def texts(logp_t, *, power=1.0):\n    return -power * logp_t\n"
    )
    texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    (place / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    part = {"method": "mixed_losses:texts", "train": "texts.jsonl", "loss": {"power": 2.0}}
    options = {**SETTINGS, "run.dir": "runs/mixed", "loss": {"lead": 0.25}}
    run = valence.train(method="mixed_losses:pairs", train=PAIRS, mix=[part], **options)
    sys.modules.pop("mixed_losses")
    assert command("export", "runs/mixed", "out", "--no-verify") == 0
    cards = [(folder / "README.md").read_text() for folder in (run.model_dir, place / "out")]
    for card in cards:
        assert "**mixed_losses:pairs + mixed_losses:texts**" in card
        assert card.count("| loss.") == 1
        assert "| loss.lead" in card
    assert "mixed_losses" not in sys.modules


def test_a_row_format_that_only_a_run_folder_names_is_not_executed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "gone_format.py").write_text(
        "from pathlib import Path\nPath('executed').touch()\n\ndef read(row):\n    return row\n"
    )
    words = "data.train=rows.jsonl", 'data.eval=[{path: rows.jsonl, format: "gone_format:read"}]'
    assert command("train", "recipe.yaml", *words) == 0
    (place / "executed").unlink()
    sys.modules.pop("gone_format")
    error = command_error("evaluate", "runs/first")
    check_error(error, "code-not-trusted", fix="data.eval=")
    assert command("sample", "runs/first", "--prompt", "a", "--max-new-tokens", "2") == 0
    assert not (place / "executed").exists()
    assert command("evaluate", "runs/first", words[1]) == 0
    assert (place / "executed").exists()
    sys.modules.pop("gone_format")


PROMPTS = [{"prompt": row["prompt"]} for row in ROWS[:4]]
ONLINE: dict[str, Any] = {
    **SETTINGS,
    "rollout": {"num_rollouts": 3, "max_new_tokens": 6, "steps": 1},
    "train.batch_size": 2,
    "train.max_steps": 2,
}


def test_own_advantages_and_rewards_online(place: Path) -> None:
    """An advantage function is GRPO with that advantage; also in a loss of Valence."""
    runs = [
        valence.train(method=method, reward=user_losses.length, train=PROMPTS, **ONLINE,
                      **{"run.dir": f"runs/{i}"})
        for i, method in enumerate(("dr_grpo", user_losses.with_group_mean))
    ]  # fmt: skip
    assert runs[1].recipe.reward[0].reward == f"{MODULE}:length"
    first, second = (run.policy.state_dict() for run in runs)
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-5, atol=1e-7)
    run = valence.train(
        method=user_losses.group_mean,
        reward=[
            user_losses.length,
            {"reward": lambda answers: [0.5] * len(answers), "name": "half"},
        ],
        train=PROMPTS,
        **ONLINE,
        **{"run.dir": "runs/advantage", "loss.scale": 0.5},
    )
    assert run.step == 2
    assert {"reward/length", "reward/half"} <= run.history[-1].keys()
    with raises_error("method-needs-reward"):
        valence.train(
            method=user_losses.group_mean, train=PROMPTS, **SETTINGS, **{"run.dir": "runs/no"}
        )


def test_an_advantage_of_the_wrong_shape_is_an_error() -> None:
    method = method_of(f"{MODULE}:bare_reward", online=True)
    with raises_error("loss-shape", where="method", fix="owner"):
        method.check(method.resolve({}))


@pytest.mark.parametrize("name", ["thumbs_without_reference", "squared"])
def test_further_losses_train_and_measure(place: Path, name: str) -> None:
    rows = [dict(row) for row in ROWS]
    if name == "squared":
        rows = [{**row, "score": float(i % 3)} for i, row in enumerate(rows)]
        rows = [{k: v for k, v in row.items() if k != "label"} for row in rows]
    run = valence.train(
        method=f"{MODULE}:{name}", train=rows, **SETTINGS, **{"run.dir": "runs/further"}
    )
    assert any(key.startswith("rewards/") for key in run.history[-1])


def test_the_digest_of_a_function_has_the_values_that_it_keeps() -> None:
    def loss(factor: float) -> Any:
        def inner(logp_w: Any, logp_l: Any) -> Any:
            return factor * (logp_l - logp_w)

        return inner

    digests = [code_digest([loss(factor)]) for factor in (1.0, 1.0, 2.0)]
    assert digests[0] == digests[1] != digests[2]
    bound = [code_digest([partial(user_losses.dpo, beta=beta)]) for beta in (0.1, 0.1, 0.2)]
    assert bound[0] == bound[1] != bound[2]
    same, equal = 0.5, float("0.5")  # two objects with one value
    assert same is not equal
    partials = [partial(user_losses.dpo, beta=a, scale=b) for a, b in ((same, same), (same, equal))]
    assert code_digest(partials[:1]) == code_digest(partials[1:])
    assert code_digest([loss(1.0)], "seq_mean") != code_digest([loss(1.0)], "token_mean")


def test_the_table_of_losses_is_read_only() -> None:
    with pytest.raises(TypeError):
        valence.LOSSES["mine"] = valence.LOSSES["dpo"]  # type: ignore[index]
