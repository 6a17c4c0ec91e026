"""Cached reference values: looked up by content, without false matches."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.errors import raises_error
from tests.tiny_models import tiny
from tests.units import objective, policy_and_reference, units
from valence.batching.micro_batches import make_micro_batch
from valence.models.build import build_policy, build_reference, load_model
from valence.models.cache import CachedReference
from valence.models.digest import Digests
from valence.models.policy_model import PolicyModel
from valence.models.reference import FrozenReference, LazyReference, Reference
from valence.types import MicroBatch, TokenizedExample


class Counted:
    """A reference that counts the micro-batches it is asked for, and adds something to each
    value.
    """

    def __init__(self, inner: Reference, plus: float = 0.0) -> None:
        self.inner, self.plus, self.num_batches = inner, plus, 0
        self.name, self.precision = inner.name, inner.precision

    def digests(self) -> Digests:
        return self.inner.digests()

    def __call__(self, batch: MicroBatch) -> Tensor:
        self.num_batches += 1
        return self.inner(batch) + self.plus * batch.loss_mask


def batch_of(rows: Sequence[TokenizedExample]) -> MicroBatch:
    return make_micro_batch(rows)


def test_a_second_run_with_other_settings_computes_nothing(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    rows = units("preference")
    first = CachedReference(reference, tmp_path)
    loss = objective("dpo", policy, first, budget=40).run(rows, backward=False).loss
    assert (first.hits, first.misses) == (0, 18)
    second = CachedReference(reference, tmp_path)
    again = objective("dpo", policy, second, budget=77).run(rows[::-1], backward=False).loss
    assert (second.hits, second.misses) == (18, 0)
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=1e-12)
    plain = objective("dpo", policy, reference, budget=40).run(rows, backward=False).loss
    assert torch.equal(plain, loss)


def test_another_reference_or_precision_has_no_cache_hits(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    cached = CachedReference(reference, tmp_path)
    other = FrozenReference(PolicyModel(tiny(seed=9)))
    coarse = FrozenReference(PolicyModel(tiny(seed=5), compute=torch.bfloat16))
    assert len({cached.digests().model, other.digests().model, coarse.digests().model}) == 3


def test_an_adapter_switched_off_and_the_bare_model_are_the_same_reference() -> None:
    lora = type("Lora", (), {"rank": 3, "alpha": None, "dropout": 0.0, "targets": "all-linear"})
    policy = build_policy(tiny(), dtype=torch.float64, lora=lora)
    off = build_reference(policy, fresh_adapter=True)
    assert off.digests().model == FrozenReference(PolicyModel(tiny())).digests().model


def test_another_configuration_of_the_same_weights_is_another_reference() -> None:
    plain, same = (FrozenReference(PolicyModel(tiny("gemma2"))).digests().model for _ in range(2))
    bent = FrozenReference(PolicyModel(tiny("gemma2", final_logit_softcapping=2.5))).digests().model
    turned = (
        FrozenReference(
            PolicyModel(
                tiny("gemma2", rope_parameters={"rope_theta": 50.0, "rope_type": "default"})
            )
        )
        .digests()
        .model
    )
    assert plain == same
    assert len({plain, bent, turned}) == 3


def test_a_copy_of_a_model_is_the_same_reference(tmp_path: Path) -> None:
    model = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = load_model(str(tmp_path), dtype=torch.float32)
    assert (
        FrozenReference(PolicyModel(loaded)).digests().model
        == FrozenReference(PolicyModel(model)).digests().model
    )


def test_another_scale_of_the_same_adapter_is_another_reference() -> None:
    def digest(alpha: float | None) -> str:
        lora = type(
            "Lora", (), {"rank": 3, "alpha": alpha, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
        )
        torch.manual_seed(0)
        return (
            build_reference(
                build_policy(tiny(), dtype=torch.float64, lora=lora), fresh_adapter=False
            )
            .digests()
            .model
        )

    assert digest(6) == digest(None)
    assert digest(6) != digest(12)


def test_the_same_answer_behind_another_prompt_is_another_entry(tmp_path: Path) -> None:
    policy, reference = policy_and_reference()
    cached = CachedReference(reference, tmp_path)
    actual = objective("apo_zero_unpaired", policy, cached)
    rows = units("judgement", 2)
    actual.run([rows[0]], backward=False)
    actual.run(
        [replace(rows[0], prompt_ids=rows[1].prompt_ids, prompt_mask=rows[1].prompt_mask)],
        backward=False,
    )
    assert cached.hits == 0


def test_sequences_are_found_in_whatever_company_and_layout(tmp_path: Path) -> None:
    """Alone or with others that share their prompt; on either side; with the same prompt and
    another answer.
    """
    _, reference = policy_and_reference()
    pairs = [
        replace(row, prompt_ids=tuple(range(3, 23)), prompt_mask=(False,) * 20)
        for row in units("preference", 4)
    ]
    CachedReference(reference, tmp_path)(batch_of(pairs))
    again = CachedReference(Counted(reference), tmp_path)
    for row in (*pairs, *(replace(row, answers=row.answers[::-1]) for row in pairs)):
        batch = batch_of([row])
        torch.testing.assert_close(again(batch), reference(batch), rtol=1e-12, atol=1e-12)
    assert (again.hits, again.misses) == (16, 0)
    new = replace(pairs[0].answers[0], ids=(9, 9), mask=(True, True))
    again(batch_of([replace(pairs[0], answers=(pairs[1].answers[0], new))]))
    assert (again.hits, again.misses) == (17, 1)


def test_a_turn_is_the_same_with_and_without_the_next_one_in_the_same_tree(tmp_path: Path) -> None:
    """The tokens that the first turn measures are context of the second."""
    _, reference = policy_and_reference()
    first, other = (
        replace(row, prompt_ids=tuple(range(3, 23)), prompt_mask=(False,) * 20)
        for row in units("judgement", 2)
    )
    context = first.prompt_ids + first.answers[0].ids
    second = replace(other, prompt_ids=context, prompt_mask=(False,) * len(context))
    both = batch_of([first, second])
    assert len(both.tokens) < first.tokens + second.tokens
    cached = CachedReference(reference, tmp_path)
    for batch in (both, batch_of([first]), batch_of([second])):
        torch.testing.assert_close(cached(batch), reference(batch), rtol=1e-12, atol=1e-12)
    assert (cached.hits, cached.misses) == (2, 2)


def test_concurrent_runs_share_computed_values(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    one, two = CachedReference(reference, tmp_path), CachedReference(reference, tmp_path)
    rows = units("judgement", 6)
    one(batch_of(rows[:3]))
    two(batch_of(rows[:3]))
    two(batch_of(rows[3:]))
    one(batch_of(rows[3:]))
    assert (one.hits, one.misses) == (two.hits, two.misses) == (3, 3)


def test_the_mask_of_a_sequence_is_part_of_its_cache_key(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    (row,) = units("judgement", 1)
    cached = CachedReference(reference, tmp_path)
    cached(batch_of([row]))
    answer = row.answers[0]
    cached(batch_of([replace(row, answers=(replace(answer, mask=(False, *answer.mask[1:])),))]))
    assert cached.hits == 0


def test_a_micro_batch_partly_known_is_computed_whole_and_the_known_part_stays(
    tmp_path: Path,
) -> None:
    _, reference = policy_and_reference()
    rows = units("judgement", 4)
    first = CachedReference(reference, tmp_path)(batch_of(rows[:2]))
    moved = Counted(reference, plus=1.0)
    mixed = CachedReference(moved, tmp_path)
    batch = batch_of(rows)
    result = mixed(batch)
    assert (mixed.hits, mixed.misses, moved.num_batches) == (2, 2, 1)
    known = batch.sequence_ids < 2
    torch.testing.assert_close(result[known], first, rtol=0, atol=0)
    torch.testing.assert_close(
        result[~known], (reference(batch) + batch.loss_mask)[~known], rtol=0, atol=0
    )
    assert torch.equal(CachedReference(moved, tmp_path)(batch), result)


def test_a_killed_run_reuses_stored_values(tmp_path: Path) -> None:
    """Bit for bit, though the cache holds more by then than it held when those micro-batches came
    first.
    """
    reference = FrozenReference(PolicyModel(tiny(dtype=torch.float32)))
    rows = units("judgement", 12)
    steps = [batch_of(part) for part in (rows[:5], rows[3:9], rows[::2], rows[6:], rows)]
    full = CachedReference(reference, tmp_path / "cache")
    values = [full(batch) for batch in steps]
    for done in range(len(steps)):
        again = CachedReference(reference, tmp_path / "cache")
        assert all(
            torch.equal(again(batch), result)
            for batch, result in zip(steps[done:], values[done:], strict=True)
        )
    (index,) = (tmp_path / "cache").rglob("*.index")
    raw = index.read_bytes()
    for rows_left in range(9):  # killed between any two entries
        index.write_bytes(raw[: 1024 + 36 * rows_left])
        shutil.copytree(tmp_path / "cache", tmp_path / f"cache{rows_left}")
        again = CachedReference(reference, tmp_path / f"cache{rows_left}")
        assert all(
            torch.equal(again(batch), result) for batch, result in zip(steps, values, strict=True)
        )


def test_a_flipped_byte_is_named_and_computed_again(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    batch = batch_of(units("judgement", 3))
    expected = CachedReference(reference, tmp_path)(batch)
    (path,) = tmp_path.rglob("*.values")
    raw = bytearray(path.read_bytes())
    raw[9] ^= 1
    path.write_bytes(raw)
    cached = CachedReference(reference, tmp_path)
    with pytest.warns(UserWarning, match=path.name) as warned:
        assert torch.equal(cached(batch), expected)
    assert len(warned) == 1
    assert (cached.hits, cached.misses) == (2, 1)
    assert cached.store.damaged == 1
    again = CachedReference(reference, tmp_path)  # what was computed again is found from now on
    again(batch)
    assert (again.hits, again.misses) == (3, 0)


def test_values_of_another_reference_are_refused_wherever_they_turn_up(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    other = FrozenReference(PolicyModel(tiny(seed=9)))
    batch = batch_of(units("judgement", 3))
    CachedReference(other, tmp_path, about="another model")(batch)
    cached = CachedReference(reference, tmp_path)
    assert "3 sequences of another model" in cached.note
    cached(batch)
    assert (cached.hits, cached.note) == (0, "")
    for path in (tmp_path / other.digests().model).iterdir():
        shutil.copy(path, tmp_path / reference.digests().model)
    with raises_error("reference-cache-foreign", where=str(tmp_path / reference.digests().model)):
        CachedReference(reference, tmp_path)(batch)


def test_an_empty_cache_folder_has_no_note(tmp_path: Path) -> None:
    assert CachedReference(policy_and_reference()[1], tmp_path / "new").note == ""


@pytest.mark.parametrize("plus", [0.0, 1e-9, 0.1, float("nan")])
def test_values_of_another_version_are_tried_first(
    plus: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reference = policy_and_reference()
    batch = batch_of(units("judgement", 3))
    remaining = CachedReference(reference, tmp_path)(batch)
    monkeypatch.setattr(transformers, "__version__", "99.0")
    live = Counted(reference, plus)
    cached = CachedReference(live, tmp_path)
    if not plus < 1e-6:
        with raises_error("reference-cache-stale", where="reference.cache"):
            cached(batch)
        return
    for _ in range(3):
        assert torch.equal(cached(batch), remaining)
    assert live.num_batches == 1


def test_values_can_be_checked(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    batch = batch_of(units("judgement", 4))
    CachedReference(reference, tmp_path)(batch_of(units("judgement", 3)))
    assert CachedReference(reference, tmp_path).check(batch) == (3, pytest.approx(0, abs=1e-12))
    with raises_error("reference-cache-stale", where="reference.cache") as raised:
        CachedReference(Counted(reference, plus=0.01), tmp_path).check(batch)
    assert {"0.01", "3"} <= set(raised.error.message.split())


def test_a_value_that_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    batch = batch_of(units("judgement", 3))
    CachedReference(Counted(reference, plus=float("inf")), tmp_path)(batch)
    cached = CachedReference(reference, tmp_path)
    assert torch.equal(cached(batch), reference(batch))
    assert cached.hits == 0


def test_a_reference_that_was_let_go_of_is_loaded_when_it_is_needed(tmp_path: Path) -> None:
    _, reference = policy_and_reference()
    rows = units("judgement", 4)
    loaded: list[Reference] = []

    def again(model: Reference = reference) -> Reference:
        loaded.append(model)
        return model

    CachedReference(reference, tmp_path)(batch_of(rows[:3]))
    cached = CachedReference(reference, tmp_path, reload=again)
    assert cached.has_all(rows[:3])
    assert not cached.has_all(rows)
    cached.unload()
    assert isinstance(cached.inner, LazyReference)
    cached(batch_of(rows[:2]))
    assert not loaded
    for _ in range(2):
        torch.testing.assert_close(cached(batch_of(rows)), reference(batch_of(rows)))
    assert len(loaded) == 1
    changed = LazyReference(
        reference, reference.digests(), lambda: FrozenReference(PolicyModel(tiny(seed=9)))
    )
    with raises_error("reference-changed"):
        changed(batch_of(rows))


def test_an_adapter_that_is_switched_off_is_never_let_go_of(tmp_path: Path) -> None:
    reference: Any = policy_and_reference()[1]
    cached = CachedReference(reference, tmp_path)
    cached.unload()
    assert cached.inner is reference
