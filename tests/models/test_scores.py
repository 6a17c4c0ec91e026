"""Reward models: scores compared with transformers one sequence at a time, also after saving and
loading.
"""

from __future__ import annotations

import copy
import json
import shutil
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from tests.errors import raises_error
from tests.models.test_check import Leaky, codes
from tests.models.test_oracle import PATTERNS, ROUGH, gradients, named, prefix_tree_batch, sequences
from tests.prefix_trees import conversations
from tests.tiny import CHATML, tiny_tokenizer
from tests.tiny_models import ARCHITECTURES, OTHERS, SMALL, tiny
from valence.models.build import build_policy, load_model
from valence.models.check import PackingWarning, plain_batch
from valence.models.compiling import compile_layers
from valence.models.digest import model_digest
from valence.models.scores import Scorer, with_padding
from valence.reports.card import usage
from valence.training.model_files import export
from valence.types import MicroBatch

KINDS = ARCHITECTURES | {
    "llama-dynamic": OTHERS["llama-dynamic"],
    "phi": ("phi", {}),
    "gpt_neo": (
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
}
WITHOUT_SCORES = ("llama-tied", "llama-dynamic", "cohere", "granite")
"""Architectures with a special head for tokens, or without support for a score head."""
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
LORA = SimpleNamespace(rank=3, alpha=None, dropout=0.0, targets="all-linear")


def reward_model(
    name: str = "llama", *, dtype: torch.dtype = F64, attributes: int = 2, **changes: Any
) -> nn.Module:
    """A random model with a head for attributes, of weights large enough for a leak to show."""
    kind, settings = KINDS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SMALL | settings | {"num_labels": attributes} | changes))
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.mul_(5)
    return model.to(dtype).eval()


def scorer(
    name: str = "llama", mode: str = "full", *, dtype: torch.dtype = F64, **more: Any
) -> Scorer:
    model = reward_model(name, dtype=F32 if dtype == BF16 else dtype)
    checkpointing: Any = "full" if mode == "checkpointed" else "off"
    engine = build_policy(
        model,
        dtype=dtype,
        lora=LORA if mode == "lora" else None,
        checkpointing=checkpointing,
        **more,
    )
    assert isinstance(engine, Scorer)
    for key, p in engine.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(2))
    return engine


def stock_scores(engine: Scorer, batch: MicroBatch) -> Tensor:
    """[S, A] of the Hugging Face model's own forward, each sequence by itself; inside
    ``engine.stock()``.
    """
    return torch.cat(
        [
            engine.model(input_ids=batch.tokens[batch.rows(s)][None]).logits
            for s in range(batch.sequences)
        ]
    )


@pytest.mark.parametrize(
    "mode", ["full", "lora", pytest.param("checkpointed", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    named([kind for kind in KINDS if kind not in WITHOUT_SCORES], ["llama", "gpt2", "gpt_neo"]),
)
def test_scores_of_a_prefix_tree_equal_those_of_the_stock_model(name: str, mode: str) -> None:
    rough = name in ROUGH or name == "gpt_neo"  # whose attention is in float32
    engine = scorer(name, mode, dtype=F32 if name == "qwen3_moe" else F64)
    assert engine.packs is (name != "gpt_neo")
    for trains in PATTERNS:
        batch = prefix_tree_batch(conversations(), trains)
        slopes = torch.randn(
            batch.sequences, 2, generator=torch.Generator().manual_seed(3), dtype=F64
        )
        ours = torch.tensor(trains)
        with engine.stock():
            wanted = stock_scores(engine, batch)
            theirs = gradients(engine.model, (wanted * slopes)[ours].sum())
        out = engine(batch)
        assert out.score is not None
        assert out.score.shape == (batch.sequences, 2)
        assert not out.logp.any()
        torch.testing.assert_close(
            out.score, wanted, rtol=1e-4 if rough else 1e-10, atol=1e-4 if rough else 1e-10
        )
        result = gradients(engine.model, (out.score * slopes).sum())
        assert result.keys() == theirs.keys()
        assert any("score" in key for key in result)
        for key in result:
            torch.testing.assert_close(
                result[key], theirs[key], rtol=1e-3 if rough else 1e-6, atol=1e-4 if rough else 1e-6
            )


def test_one_by_one_is_the_same() -> None:
    engine = scorer()
    engine.lay_out(packed=False)
    for trains in PATTERNS:
        batch = prefix_tree_batch(conversations(), trains)
        out = engine(batch).score
        assert out is not None
        with engine.stock():
            torch.testing.assert_close(out, stock_scores(engine, batch))
        assert out.requires_grad


def test_the_length_of_one_sequence_does_not_stay_with_the_next() -> None:
    model = reward_model("llama-dynamic")
    untouched = copy.deepcopy(model)
    with pytest.warns(PackingWarning) as warned:
        engine = build_policy(model, dtype=F64).eval()
    assert codes(warned) == ["rotary-by-length"]
    rows = sorted(sequences(), key=len, reverse=True)
    wanted = torch.cat([copy.deepcopy(untouched)(input_ids=row[None]).logits for row in rows])
    torch.testing.assert_close(engine(plain_batch(rows)).score, wanted)


def test_a_leak_is_seen_and_layers_run_one_by_one() -> None:
    model: Any = reward_model(dtype=F32)
    model.model.layers[0].mlp = Leaky(model.model.layers[0].mlp, 1e-4)
    with pytest.warns(PackingWarning) as warned:
        engine = build_policy(model, dtype=F32)
    assert codes(warned) == ["sequences-leak"]
    assert not engine.packs


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_the_head_is_float32_over_bfloat16(mode: str) -> None:
    engine, exact = scorer(mode=mode, dtype=BF16), scorer(mode=mode, dtype=F32)
    batch = prefix_tree_batch(conversations())
    result, wanted = engine(batch).score, exact(batch).score
    assert result is not None
    assert wanted is not None
    assert result.dtype == F32
    assert {p.dtype for p in engine.parameters() if p.requires_grad} == {F32}
    assert 0 < (result - wanted).abs().max() < 0.2 * wanted.abs().max()


def test_the_base_of_an_adapter_stays_the_same_while_the_head_trains() -> None:
    engine = scorer(mode="lora")
    before = [model_digest(engine, adapter=flag) for flag in (False, True)]
    head = next(p for name, p in engine.named_parameters() if "score" in name and p.requires_grad)
    with torch.no_grad():
        head.add_(1)
    after = [model_digest(engine, adapter=flag) for flag in (False, True)]
    assert before[0] == after[0]
    assert before[1] != after[1]


# ------------------------------------------------------------------ loading and saving


def saved(folder: Path, name: str = "llama", **changes: Any) -> str:
    """A causal language model's folder."""
    tiny(name, dtype=F32, **changes).save_pretrained(folder)  # type: ignore[operator]
    return str(folder)


def test_a_fresh_head_is_zero_and_a_saved_one_is_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name = saved(tmp_path / "causal")
    model: Any = load_model(name, dtype=F32, attributes=("helpful", "honest"))
    assert model.score.weight.shape == (2, 32)
    assert (model.score.weight == 0).all()
    assert model.config.id2label == {0: "helpful", 1: "honest"}
    torch.nn.init.normal_(model.score.weight)
    head = model.score.weight.detach().clone()
    model.save_pretrained(tmp_path / "reward")
    again: Any = load_model(str(tmp_path / "reward"), dtype=F32, attributes=("helpful", "honest"))
    assert torch.equal(again.score.weight, head)
    assert "score" not in capfd.readouterr().err
    for other in (("honest", "helpful"), ("helpful",)):
        with raises_error("reward-attributes-differ", where=str(tmp_path / "reward")):
            load_model(str(tmp_path / "reward"), dtype=F32, attributes=other)


def test_models_that_cannot_be_reward_models_are_errors(tmp_path: Path) -> None:
    with raises_error("reward-head-unsupported", where=str(tmp_path / "granite")):
        load_model(saved(tmp_path / "granite", "granite"), dtype=F32, attributes=("reward",))
    with raises_error("reward-head-unsupported", where=str(tmp_path / "bert")):
        load_model(saved(tmp_path / "bert", "bert"), dtype=F32, attributes=("reward",))
    config = AutoConfig.from_pretrained(saved(tmp_path / "less"))
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path / "less")
    with raises_error("model-incomplete", where=str(tmp_path / "less")) as raised:
        load_model(str(tmp_path / "less"), dtype=F32, attributes=("reward",))
    assert "model.layers.2" in raised.error.message


def test_an_adapter_of_a_language_model_would_freeze_the_head(tmp_path: Path) -> None:
    name = saved(tmp_path / "base")
    build_policy(load_model(name, dtype=F32), dtype=F32, lora=LORA).model.save_pretrained(
        tmp_path / "sft"
    )  # type: ignore[operator]
    with raises_error("adapter-kind", where="model.adapter"):
        build_policy(
            load_model(name, dtype=F32, attributes=("reward",)),
            dtype=F32,
            adapter=str(tmp_path / "sft"),
        )


def batch_of(rows: list[tuple[int, ...]]) -> MicroBatch:
    return plain_batch([torch.tensor(row) for row in rows])


def write(engine: Scorer, folder: Path, tokenizer: PreTrainedTokenizerBase, scores: Tensor) -> None:
    """Saves the reward model as a run does."""
    config = engine.description(scores) | {"pad_token_id": tokenizer.pad_token_id}
    with engine.stock():
        export(engine.model, tokenizer, folder, kind="auto", card="", config=config)


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("name", named(["llama", "gemma2", "gpt2", "gpt_neox"], ["llama", "gpt2"]))
def test_the_saved_folder_scores_the_same_in_padded_batches(
    name: str, mode: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a tokenizer that pads with the end of a turn, which sequences end with."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    end: Any = tokenizer.eos_token_id
    vocabulary = {"vocab_size": len(tokenizer), "pad_token_id": end, "eos_token_id": end}
    path = saved(tmp_path / "causal", name, **vocabulary)
    torch.manual_seed(0)
    model = load_model(path, dtype=F32, attributes=("helpful", "honest"))
    engine: Any = build_policy(model, dtype=F32, lora=LORA if mode == "lora" else None)
    for key, p in engine.named_parameters():
        if "lora_B" in key or "score" in key:
            torch.nn.init.normal_(p, std=0.3)
    rows = [
        (5, 300, 17, end),
        (9, 12, 44, 60, 61, end, 33, 80, end),
        (7, end),
        (30, 31, 32, 33, 34),
    ]
    wanted = engine(batch_of(rows)).score.detach()
    write(engine, tmp_path / "reward", with_padding(tokenizer, {end}, len(tokenizer)), wanted)
    capfd.readouterr()
    exact = {"attn_implementation": "eager"} if name == "gemma2" else {}  # SDPA has no soft-capping
    again: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", **exact)
    assert "score" not in capfd.readouterr().err  # nothing is fresh, missing or left over
    padded = AutoTokenizer.from_pretrained(tmp_path / "reward").pad(
        {"input_ids": [list(row) for row in rows]}, padding=True, return_tensors="pt"
    )
    assert (padded["input_ids"][2, 2:] != end).all()
    with torch.no_grad():
        result = again(**padded).logits
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    assert result.std() > 0.05
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    assert config["id2label"] == {"0": "helpful", "1": "honest"}
    assert config["reward_mean"] == pytest.approx(wanted.mean(0).tolist(), rel=1e-5)
    assert config["reward_std"] == pytest.approx(wanted.std(0, correction=0).tolist(), rel=1e-5)
    assert config["architectures"] == [type(again).__name__]
    assert config.get("reward_thresholds") is None


@pytest.mark.parametrize("chat", [True, False])
def test_the_code_of_the_model_card_returns_the_trained_scores(chat: bool, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(CHATML if chat else None)
    end: Any = tokenizer.eos_token_id
    path = saved(tmp_path / "causal", vocab_size=len(tokenizer))
    engine: Any = build_policy(load_model(path, dtype=F32, attributes=("helpful",)), dtype=F32)
    torch.nn.init.normal_(engine.causal.score.weight, std=0.3)
    user, answer = "What is the capital of France?", "Paris."
    chat_text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{answer}"
    text = chat_text if chat else "The capital of France is Paris."
    wanted = engine(
        batch_of([(*tokenizer(text, add_special_tokens=False)["input_ids"], end)])
    ).score.item()
    write(
        engine,
        tmp_path / "reward",
        with_padding(tokenizer, {end}, len(tokenizer)),
        torch.tensor([[1.0], [2.0]]),
    )
    message: list[Any] = []
    code = usage(chat, reward_model=True)
    exec(code.replace("path/to/this/folder", str(tmp_path / "reward")), {"print": message.append})
    assert message[0] == {"helpful": pytest.approx((wanted - 1.5) / 0.5, rel=1e-3, abs=1e-3)}


def test_levels_are_saved_with_the_model(tmp_path: Path) -> None:
    path = saved(tmp_path / "causal")

    def build(name: str, levels: int = 4) -> Any:
        return build_policy(
            load_model(name, dtype=F32, attributes=("stars",)), dtype=F32, levels=levels
        )

    engine = build(path)
    assert torch.sigmoid(engine.thresholds).tolist() == pytest.approx([0.25, 0.5, 0.75])
    with torch.no_grad():
        engine.cuts.copy_(torch.tensor([0.3, -5.0, 2.0]))
    assert (engine.thresholds.diff() > 0).all()
    write(engine, tmp_path / "reward", with_padding(tiny_tokenizer(), set(), 97), torch.zeros(3, 1))
    again = build(str(tmp_path / "reward"))
    torch.testing.assert_close(again.thresholds, engine.thresholds)
    with raises_error("levels-mismatch", where="loss.levels", fix="4"):
        build(str(tmp_path / "reward"), levels=5)


def test_padding_is_no_token_that_sequences_end_with() -> None:
    actual = tiny_tokenizer()
    ids = actual.added_tokens_decoder
    assert with_padding(actual, {4}, 400).pad_token == "<pad>"
    end: Any = actual.convert_tokens_to_ids("<pad>")
    assert with_padding(actual, {end}, 400).pad_token not in ("<pad>", actual.bos_token)
    full = with_padding(actual, set(ids), len(actual))
    assert full.pad_token_id is None
    room = with_padding(actual, set(ids), len(actual) + 1)
    assert (room.pad_token, room.pad_token_id) == ("<|pad|>", len(actual))
    assert actual.pad_token == "<pad>"
    assert len(actual) == len(tiny_tokenizer())
    assert room.padding_side == "right"


@pytest.mark.slow
def test_compiled_layers_score_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As graphs; the code that is made of these is looked at in test_oracle."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    engine = scorer(levels=3)
    batch = prefix_tree_batch(conversations())
    wanted = engine(batch).score
    assert compile_layers(engine)
    torch.testing.assert_close(engine(batch).score, wanted)
