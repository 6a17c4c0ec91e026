"""Reference values kept in a folder: found by content, never by accident."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import tiny
from tests.units import objective, policy_and_reference, units
from valence.engine.cache import Cached
from valence.engine.logprobs import Engine
from valence.engine.models import build_policy, build_reference, load_model
from valence.engine.reference import Frozen
from valence.errors import UserError


def test_a_second_run_with_other_settings_computes_nothing(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    rows = units("preference")
    first = Cached(reference, tmp_path)
    loss = objective("dpo", policy, first, budget=40).run(rows, backward=False).loss
    assert (first.hits, first.misses) == (0, 18)
    second = Cached(reference, tmp_path)
    again = objective("dpo", policy, second, budget=77).run(rows[::-1], backward=False).loss
    assert (second.hits, second.misses) == (18, 0)
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=1e-12)
    plain = objective("dpo", policy, reference, budget=40).run(rows, backward=False).loss
    assert torch.equal(plain, loss)


def test_another_reference_or_another_precision_finds_nothing(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    cached = Cached(reference, tmp_path)
    other = Frozen(Engine(tiny(seed=9)))
    coarse = Frozen(Engine(tiny(seed=5), compute=torch.bfloat16))
    assert len({cached.digest(), other.digest(), coarse.digest()}) == 3


def test_an_adapter_switched_off_and_the_bare_model_are_the_same_reference() -> None:
    lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    policy = build_policy(tiny(), dtype=torch.float64, lora=lora)
    off = build_reference(policy, fresh_adapter=True)
    assert off.digest() == Frozen(Engine(tiny())).digest()


def test_another_configuration_of_the_same_weights_is_another_reference() -> None:
    plain, same = (Frozen(Engine(tiny("gemma2"))).digest() for _ in range(2))
    bent = Frozen(Engine(tiny("gemma2", final_logit_softcapping=2.5))).digest()
    turned = Frozen(Engine(tiny("gemma2", rope_parameters={"rope_theta": 50.0, "rope_type": "default"}))).digest()
    assert plain == same
    assert len({plain, bent, turned}) == 3


def test_a_copy_of_a_model_is_the_same_reference(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert Frozen(Engine(loaded)).digest() == Frozen(Engine(model)).digest()


def test_another_scale_of_the_same_adapter_is_another_reference() -> None:
    def digest(alpha: float | None) -> str:
        lora = type("Lora", (), {"rank": 3, "alpha": alpha, "dropout": 0.0, "targets": ["q_proj", "v_proj"]})
        torch.manual_seed(0)
        return build_reference(build_policy(tiny(), dtype=torch.float64, lora=lora), fresh_adapter=False).digest()

    assert digest(6) == digest(None)
    assert digest(6) != digest(12)


def test_the_same_answer_behind_another_prompt_is_another_entry(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    cached = Cached(reference, tmp_path)
    made = objective("apo_zero_unpaired", policy, cached)
    rows = units("judgement", 2)
    from dataclasses import replace

    made.run([rows[0]], backward=False)
    made.run([replace(rows[0], prompt_ids=rows[1].prompt_ids, prompt_mask=rows[1].prompt_mask)], backward=False)
    assert cached.hits == 0


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    objective("dpo", policy, Cached(reference, tmp_path)).run(units("preference", 2), backward=False)
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match="cannot be read"):
        Cached(reference, tmp_path)
