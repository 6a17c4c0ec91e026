"""Memory is predicted from the weights of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_models import tiny
from valence.errors import out_of_memory
from valence.models import memory
from valence.models.memory import (
    MOMENTS,
    Memory,
    Split,
    add_value_model,
    free_memory,
    predict,
    sampling_bytes,
)
from valence.models.shape import decoder_layers, shape_of

SHAPE = shape_of(tiny())
ADAPTED = replace(SHAPE, trained=1000, adapted=500)


def predicted(shape: Any = SHAPE, **changes: Any) -> Memory:
    return predict(shape, **({"width": 4, "frozen_copy": False} | changes))


def test_masters_and_their_copy_are_float32_whatever_the_computation() -> None:
    head = SHAPE.vocabulary * SHAPE.hidden
    result = predicted(width=2, frozen_copy=True)
    assert result.weights == 6 * SHAPE.parameters  # and copies in the type of the products
    assert result.reference == predicted().weights == 4 * SHAPE.parameters
    assert result.gradient == 4 * SHAPE.parameters
    # where that of a matrix of the vocabulary is not written in place
    elsewhere = predicted(width=2, device=torch.device("mps"))
    assert elsewhere.gradient == 4 * (SHAPE.parameters + head)
    assert predicted(width=8).weights == 8 * SHAPE.parameters


def test_compiled_layers_keep_less() -> None:
    assert predicted(compiled=True).per_token < 0.7 * predicted().per_token


def test_a_second_pass_reads_the_keys_and_values_of_all_layers() -> None:
    stored = 2 * SHAPE.layers * SHAPE.keys * 4
    assert predicted(has_second_pass=True).per_token == predicted().per_token + stored


def test_with_an_adapter_only_trained_weights_have_gradients() -> None:
    result = predicted(ADAPTED, width=2, frozen_copy=True)
    assert result.weights == 2 * SHAPE.parameters + 4 * 1000
    assert result.reference == 2 * SHAPE.parameters
    assert (result.gradient, result.optimizer) == (4000, 8000)


def test_moments_of_8_bits_take_a_quarter() -> None:
    assert predicted(moments=MOMENTS["adamw_8bit"]).optimizer == pytest.approx(
        predicted().optimizer / 4, rel=0.05
    )


def test_matrices_may_have_a_separate_optimizer() -> None:
    shape = replace(SHAPE, matrices=SHAPE.trained - 100)
    result = predicted(shape, moments=8.0, moments_of_matrices=0.0)
    assert (predicted(shape).optimizer, result.optimizer) == (8 * SHAPE.trained, 800)
    assert predicted(shape, width=8, moments_of_matrices=4.0).optimizer == 8 * shape.matrices + 1600


def test_the_more_is_computed_again_the_less_a_token_takes() -> None:
    modes = ("off", "selective", "full", "offloaded")
    deep = replace(SHAPE, layers=8, operands=4 * SHAPE.operands)
    results = [predicted(deep, checkpointing=options).per_token for options in modes]
    assert results == sorted(results, reverse=True)
    assert results[2] < 0.3 * results[0]


def test_memory_grows_linearly_with_tokens() -> None:
    result = predicted()
    assert result.total(100) - result.total(99) == result.per_token
    assert result.total(0) > result.program + result.weights + result.gradient + result.optimizer


def test_sharded_weights_are_divided_and_running_layers_are_gathered() -> None:
    """In bfloat16 over masters: the layer that runs and the next one, and embedding and head with
    their copies.
    """
    large = replace(SHAPE, layers=8)
    full, quarter = (
        predicted(large, width=2, frozen_copy=True, split=split) for split in (Split(), Split(4))
    )
    assert quarter.weights == quarter.reference == SHAPE.parameters  # 4 bytes each, for 4 processes
    assert (quarter.optimizer, full.gathered) == (full.optimizer // 4, 0)
    assert quarter.gathered == 2 * 2 * SHAPE.largest + 6 * SHAPE.outside
    head = 4 * SHAPE.vocabulary * SHAPE.hidden
    assert quarter.gradient == SHAPE.parameters + 4 * (2 * SHAPE.largest + SHAPE.outside) + head
    assert quarter.per_token == full.per_token
    assert quarter.total(0) - full.total(0) == quarter.gathered + sum(
        getattr(quarter, part) - getattr(full, part)
        for part in ("weights", "reference", "gradient", "optimizer")
    )


def test_a_background_save_copies_weights_moments_and_a_saved_reference() -> None:
    plain, copied = predicted(), predicted(copies_state=True)
    assert (plain.checkpoint, copied.checkpoint) == (0, 12 * SHAPE.parameters)
    assert copied.total(10) - plain.total(10) == copied.checkpoint
    both = predicted(frozen_copy=True, copies_state=True, saves_reference=True)
    assert both.checkpoint == 16 * SHAPE.parameters
    assert predicted(ADAPTED, copies_state=True).checkpoint == 12 * 1000
    assert predicted(copies_state=True, split=Split(4)).checkpoint == 3 * SHAPE.parameters
    assert add_value_model(copied, copied, SHAPE, 4).checkpoint > 1.5 * copied.checkpoint


def test_on_a_gpu_the_copy_for_a_checkpoint_is_in_host_memory() -> None:
    plain, copied = (
        predicted(copies_state=copies, device=torch.device("cuda"), split=Split(2, offload=True))
        for copies in (False, True)
    )
    assert (copied.checkpoint, copied.host) == (0, 6 * SHAPE.parameters)
    assert copied.total(10) == plain.total(10)


def test_memory_of_the_settings_of_sharding() -> None:
    base = predicted(split=Split(4))
    changes = {"reshard": False}, {"sync_every_micro_batch": False}, {"offload": True}
    remaining, once, away = (predicted(split=Split(4, **change)) for change in changes)
    assert remaining.gathered - base.gathered == 4 * (
        SHAPE.parameters - SHAPE.outside - 2 * SHAPE.largest
    )
    assert once.gradient == base.gradient + 4 * (
        SHAPE.parameters - min(SHAPE.parameters, SHAPE.outside + 2 * SHAPE.largest)
    )
    assert (away.weights, away.reference, away.optimizer, away.gathered) == (0, 0, 0, base.gathered)
    assert away.gradient == base.gradient - SHAPE.parameters


def test_processes_that_share_each_layer_have_a_part_of_it() -> None:
    full, half, quarter = (
        predicted(split=split, device=torch.device("mps"))
        for split in (Split(), Split(1, 2), Split(2, 2))
    )
    assert (2 * half.weights, 2 * half.gradient, 2 * half.optimizer) == (
        full.weights,
        full.gradient,
        full.optimizer,
    )
    assert half.per_token < full.per_token
    assert half.gathered == 0 < quarter.gathered
    assert quarter.weights == half.weights // 2


def test_processes_that_share_tokens_have_a_part_of_their_activations_and_all_keys() -> None:
    for mode, num_layers in (("off", SHAPE.layers), ("full", 1)):
        shape = replace(SHAPE, keys=64)
        full = predicted(shape, width=2, checkpointing=mode)
        shared = predicted(shape, width=2, checkpointing=mode, split=Split(context=4))
        assert shared.per_token == full.per_token // 4 + num_layers * 2 * 64 * 2
        assert shared.total(0) == full.total(0)


def test_a_value_model_is_a_policy_without_a_head() -> None:
    full = predicted(width=2)
    result = add_value_model(full, full, SHAPE, 2)
    decoder = SHAPE.parameters - SHAPE.vocabulary * SHAPE.hidden
    assert result.value == pytest.approx((6 + 4 + 8) * decoder, abs=1)
    assert result.per_token == 2 * full.per_token
    tied = replace(SHAPE, outside=SHAPE.vocabulary * SHAPE.hidden)
    assert add_value_model(full, full, tied, 2).value == (6 + 4 + 8) * SHAPE.parameters


def test_a_value_model_under_an_adapter_is_another_adapter() -> None:
    result = predicted(ADAPTED, width=2)
    assert add_value_model(result, result, ADAPTED, 2).value == (4 + 4 + 8) * ADAPTED.trained


def test_sampling_and_training_take_turns() -> None:
    """Two layers with 2 heads of 8 for keys and values."""
    selected = sampling_bytes(SHAPE, rows=3, tokens=50, width=2)
    assert selected == 3 * (2 * 2 * 16 * 50 * 2 + 4 * 4 * SHAPE.vocabulary)
    result = predicted()
    training = result.head + 100 * result.per_token
    assert replace(result, sampling=training - 1).total(100) == result.total(100)
    assert replace(result, sampling=training + 7).total(100) == result.total(100) + 7
    assert replace(result, reward_models=5, value=6).total(100) == result.total(100) + 11


def test_layers_and_what_is_outside_them_are_all_weights() -> None:
    for kind in ("llama", "gpt2", "opt", "qwen3_moe"):
        model = tiny(kind)
        result = shape_of(model)
        assert result.largest == sum(p.numel() for p in decoder_layers(model)[0].parameters())
        assert result.parameters == 2 * result.largest + result.outside


def test_free_memory_is_the_available_memory_of_the_machine() -> None:
    result = free_memory(torch.device("cpu"))
    if not Path("/proc/meminfo").exists():
        pytest.skip("nothing tells")
    assert result is not None
    assert 2**27 < result < 2**50


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (
            {"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 2\n"},
            None,
        ),
        (
            {
                "memory.max": "100\n",
                "memory.current": "50\n",
                "memory.stat": "anon 9\ninactive_file 20\n",
            },
            70,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "90\n",
                "memory/memory.usage_in_bytes": "50\n",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
            },
            60,
        ),
    ],
)
def test_free_memory_respects_the_limit_of_a_container(
    files: dict[str, str], left: int | None, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert memory.container_memory(tmp_path) == left


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
            ),
            True,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_errors_of_missing_memory(error: Exception, expected: bool) -> None:
    assert out_of_memory(error) is expected
