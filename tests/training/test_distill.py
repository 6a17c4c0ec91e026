"""Distillation from another model, on stored completions and on sampled ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.errors import raises_error
from tests.rollouts.vllm_server import Drop, Fake, serving
from tests.tiny import tiny_tokenizer
from tests.tiny_models import tiny
from tests.training.resuming import killed, records, train, weights
from valence.training.plan import describe, make_plan
from valence.training.reference_cache import score
from valence.training.trainer import Trainer

DEMONSTRATIONS = [
    {"prompt": f"question {i} ", "completion": f"answer {i} {7 * i}"} for i in range(12)
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny_tokenizer()
    for name, changes in {"student": {}, "teacher": {"seed": 5, "hidden_size": 48}}.items():
        model: Any = tiny(vocab_size=len(tokenizer), layers=1, dtype=torch.float32, **changes)
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    write("demonstrations.jsonl", DEMONSTRATIONS)
    write("prompts.jsonl", [{"prompt": row["prompt"]} for row in DEMONSTRATIONS])
    return tmp_path


def write(name: str, rows: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(method: str = "distill", **sections: Any) -> dict[str, Any]:
    rows = "demonstrations.jsonl" if method == "distill" else "prompts.jsonl"
    base: dict[str, Any] = {
        "method": method,
        "model": {"name": "student"},
        "teacher": {"model": "teacher"},
        "data": {"train": rows, "max_length": 128},
        "train": {"batch_size": 4, "learning_rate": 1e-2, "epochs": 3},
        "eval": {"other_text": "off"},
        "run": {"dir": "run", "save_every": 2},
    }
    if method == "online_distill":
        base["rollout"] = {"num_rollouts": 2, "max_new_tokens": 6}
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values if isinstance(values, dict) else values
    return base


@contextmanager
def served(name: str) -> Iterator[Fake]:
    """A server with the model of a folder."""
    fake = Fake()
    fake.model = AutoModelForCausalLM.from_pretrained(name)
    fake.tokenizer = AutoTokenizer.from_pretrained(name)
    with serving(fake):
        yield fake


def metrics(run: Trainer, name: str) -> list[float]:
    return [record[name] for record in run.history if name in record]


@torch.no_grad()
def divergence(student: str, teacher: str) -> float:
    """KL(student, teacher) per token of the completions, by transformers' own forward."""
    tokenizer = AutoTokenizer.from_pretrained("student")
    models: list[Any] = [AutoModelForCausalLM.from_pretrained(name) for name in (student, teacher)]
    total = num_tokens = 0.0
    for row in DEMONSTRATIONS:
        chat = [{"role": "user", "content": row["prompt"]}]
        options = {"add_generation_prompt": True, "return_dict": False}
        prompt = tokenizer.apply_chat_template(chat, **options)
        answer = {"role": "assistant", "content": row["completion"]}
        ids = tokenizer.apply_chat_template([*chat, answer], return_dict=False)
        end = max(i for i, token in enumerate(ids) if token == tokenizer.eos_token_id) + 1
        q, p = (
            torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)[
                len(prompt) - 1 : end - 1
            ]
            for model in models
        )
        total += float((q.exp() * (q - p)).sum())
        num_tokens += len(q)
    return total / num_tokens


def test_the_student_moves_towards_its_teacher(place: Path) -> None:
    run, _ = train(recipe(data={"eval": "demonstrations.jsonl"}, train={"epochs": 8}))
    before, after = divergence("student", "teacher"), divergence("run/model", "teacher")
    assert after < 0.5 * before
    evaluated = [record["eval/loss"] for record in run.history if "eval/loss" in record]
    assert evaluated[-1] == pytest.approx(after, rel=1e-4)
    assert metrics(run, "entropy")


@pytest.mark.parametrize("method", ["distill", "online_distill"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_killed_run_ends_as_an_undisturbed_one(place: Path, method: str, lora: Any) -> None:
    runs: list[Trainer] = []
    for name in ("undisturbed", "killed"):
        settings = recipe(method, model={"lora": lora}, run={"dir": name})
        if name == "killed":
            killed(settings, 5)
        runs.append(train(settings)[0])
    undisturbed, resumed = runs
    assert undisturbed.step == resumed.step == 9
    for name, p in weights(undisturbed).items():
        assert torch.equal(p, weights(resumed)[name]), name
    assert records(undisturbed.directory) == records(resumed.directory)


def test_sampled_completions_need_no_reward(place: Path) -> None:
    run, shown = train(recipe("online_distill", train={"epochs": 8}))
    losses = metrics(run, "loss")
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert "kl" not in run.history[-1]  # the reference of the run is its teacher
    assert "highest reward" not in shown
    [teacher] = [line for line in describe(make_plan(run.prepared)) if "teacher:" in line]
    assert teacher == f"teacher: teacher; its tokens match ({len(tiny_tokenizer())} are shared)"


def test_a_reward_and_a_teacher_train_together(place: Path) -> None:
    """grpo with a reference that is the teacher: its KL is a term of the loss."""

    def trained(kl_weight: float) -> Trainer:
        settings = recipe(
            "grpo",
            reward="length",
            loss={"kl_weight": kl_weight},
            train={"epochs": 8},
            rollout={"num_rollouts": 4, "max_new_tokens": 6},
            run={"dir": f"run_{kl_weight}"},
        )
        if kl_weight:
            settings["reference"] = {"model": "teacher"}
        else:
            del settings["loss"]
        del settings["teacher"]
        return train(settings)[0]

    both, reward_alone = trained(1.0), trained(0.0)
    distances = [
        divergence(str(run.directory / "model"), "teacher") for run in (both, reward_alone)
    ]
    assert distances[0] < 0.8 * distances[1]
    assert metrics(both, "kl")[-1] < metrics(both, "kl")[0]


def test_held_out_prompts_show_the_distance_to_the_teacher(place: Path) -> None:
    """As rewards would, the signals of both evaluations are compared by prompt."""
    write("held_out.jsonl", [{"prompt": f"question {i} "} for i in range(20, 45)])
    run, shown = train(
        recipe("online_distill", data={"eval": "held_out.jsonl"}, train={"epochs": 8})
    )
    signals = metrics(run, "eval/signal/mean")
    assert signals[0] < signals[-1] < 0
    assert not metrics(run, "eval/reward/mean")
    evaluation = run.evaluate()
    assert [row["reward"] for row in evaluation.rows] != [0.0] * len(evaluation.rows)
    means = sum(row["reward"] * row["tokens"] for row in evaluation.rows)
    num_tokens = sum(row["tokens"] for row in evaluation.rows)
    assert evaluation.metrics["signal/mean"] == pytest.approx(means / num_tokens)
    assert "Closer to the teacher" in shown


def test_stored_and_sampled_completions_in_one_step(place: Path) -> None:
    part = {"method": "distill", "train": "demonstrations.jsonl", "weight": 0.4}
    run, _ = train(recipe("online_distill", mix=[part]))
    assert metrics(run, "distill/signal/mean")
    assert metrics(run, "rollout/length")


def test_feedback_and_another_model_as_teacher(place: Path) -> None:
    write("feedback.jsonl", [row | {"feedback": "too long"} for row in DEMONSTRATIONS])
    run, _ = train(recipe("hindsight", data={"train": "feedback.jsonl", "max_length": 400}))
    assert metrics(run, "signal/size")[0] > 0.1


def test_the_values_of_stored_tokens_are_cached(place: Path) -> None:
    run, _ = train(recipe(loss={"target": "token"}))
    assert (run.reference.misses, run.reference.hits) == (12, 36)  # type: ignore[union-attr]


def test_the_cache_of_another_run(place: Path) -> None:
    settings = recipe(loss={"target": "token"}, reference={"cache": "cached"})
    scored = score(settings)  # type: ignore[arg-type]
    assert (scored.misses, scored.hits) == (12, 36)
    run, _ = train(settings)
    assert (run.reference.misses, run.reference.hits) == (0, 48)  # type: ignore[union-attr]


def test_distributions_are_not_cached(place: Path) -> None:
    with raises_error("nothing-to-score", where="loss.target"):
        score(recipe())  # type: ignore[arg-type]
    with raises_error("setting-no-effect", where="reference.cache"):
        train(recipe(reference={"cache": "cached"}))
    train(recipe(train={"epochs": 1}))
    assert not Path("run/reference").exists()


@pytest.mark.parametrize("loss", [{}, {"beta": 0.3}, {"top_k": 7}, {"target": "token"}])
def test_tokens_that_only_one_model_has_do_not_count(place: Path, loss: dict[str, Any]) -> None:
    """An embedding that is padded to a round size, or has added tokens, gives the same loss."""
    model: Any = AutoModelForCausalLM.from_pretrained("teacher")
    tokenizer = AutoTokenizer.from_pretrained("teacher")
    model.resize_token_embeddings(len(tokenizer) + 40, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[-40:] = 0
    model.save_pretrained("padded")
    tokenizer.add_tokens(["<added>"])
    tokenizer.save_pretrained("padded")
    losses: list[list[float]] = []
    for name in ("teacher", "padded"):
        run, _ = train(recipe(loss=loss, teacher={"model": name}, run={"dir": f"{name}-run"}))
        losses.append(metrics(run, "loss"))
    if loss == {"target": "token"}:  # whose log-probabilities are those of the entire vocabulary
        assert losses[0] != losses[1]
    else:
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_tokenizers_are_compared_by_content(place: Path) -> None:
    path = Path("teacher/tokenizer.json")
    settings = json.loads(path.read_text())
    vocabulary = settings["model"]["vocab"]
    one, other = list(vocabulary)[30:32]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(settings))
    fix = "--data demonstrations.jsonl"
    with raises_error("vocabulary-mismatch", where="teacher.model", fix=fix):
        train(recipe())


def test_a_row_with_a_token_that_the_teacher_does_not_have(place: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained("student")
    tokenizer = AutoTokenizer.from_pretrained("student")
    tokenizer.add_tokens(["<added>"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained("student")
    tokenizer.save_pretrained("student")
    train(recipe())
    write("demonstrations.jsonl", [*DEMONSTRATIONS, {"prompt": "a", "completion": "b <added>"}])
    with raises_error("vocabulary-mismatch", where="demonstrations.jsonl:13"):
        train(recipe(run={"dir": "other"}))


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"teacher": {"model": "self"}}, "setting-conflict", "teacher.model"),
        ({"teacher": {"weights": "live"}}, "setting-no-effect", "teacher.weights"),
        ({"teacher": {"context": "demonstration"}}, "setting-no-effect", "teacher.context"),
        ({"reference": {"model": "student"}}, "setting-no-effect", "reference"),
        ({"loss": {"clip": 2.0}}, "setting-no-effect", "loss.clip"),
        ({"loss": {"target": "token", "top_k": 3}}, "setting-no-effect", "loss.top_k"),
        ({"teacher": {"model": "missing"}}, "model-not-found", "teacher.model"),
        ({"parallel": {"tensor": 2}}, "setting-conflict", "loss.target"),
        (
            {"method": "online_distill", "rollout": {"measure_kl": True}},
            "setting-conflict",
            "rollout.measure_kl",
        ),
    ],
)
def test_mistakes(place: Path, changes: dict[str, Any], code: str, where: str) -> None:
    with raises_error(code, where=where):
        train(recipe(**changes))


def test_a_teacher_takes_the_place_of_the_reference(place: Path) -> None:
    write("labels.jsonl", [row | {"label": i % 2} for i, row in enumerate(DEMONSTRATIONS)])
    with raises_error("setting-conflict", where="teacher.model"):
        train(recipe(mix=[{"method": "kto", "train": "labels.jsonl"}]))


@pytest.mark.parametrize("loss", [{"target": "token"}, {"top_k": 7}, {"top_k": 7, "beta": 0.3}])
@pytest.mark.parametrize("method", ["distill", "online_distill"])
def test_a_teacher_on_a_server(place: Path, method: str, loss: dict[str, Any]) -> None:
    """It gives the losses of the same model in this process."""
    expected = metrics(train(recipe(method, loss=loss, run={"dir": "local"}))[0], "loss")
    with served("teacher") as fake:
        teacher = {"model": fake.url}
        run, _ = train(recipe(method, loss=loss, teacher=teacher, run={"dir": "remote"}))
        assert metrics(run, "loss") == pytest.approx(expected, rel=1e-4)
        num_requests = fake.paths().count("/inference/v1/generate")
    if loss == {"target": "token"} and method == "distill":
        assert num_requests == len(DEMONSTRATIONS)  # later epochs read the cache


def test_a_server_that_is_lost_is_asked_again(place: Path) -> None:
    with served("teacher") as fake:
        lost = iter([True, False, True])

        def sometimes(body: Any) -> None:
            if next(lost, False):
                raise Drop

        fake.on["/inference/v1/generate"] = sometimes
        train(recipe(loss={"target": "token"}, teacher={"model": fake.url}))


def test_mistakes_with_a_server(place: Path) -> None:
    with served("teacher") as fake:
        teacher = {"model": fake.url}
        with raises_error("setting-conflict", where="loss.top_k"):
            train(recipe(teacher=teacher))
        rollout = {"temperature": 0.7}
        with raises_error("setting-conflict", where="rollout.temperature"):
            train(recipe("online_distill", teacher=teacher, rollout=rollout, loss={"top_k": 3}))
        fake.tokenizer.decode = lambda ids: "something else"  # type: ignore[method-assign]
        with raises_error("vocabulary-mismatch", where="teacher.model"):
            train(recipe(teacher=teacher, loss={"top_k": 3}))
