"""All backends of attention over a prefix tree against its formula."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests import simulated_cuda
from tests.prefix_trees import Segments, dense_attention, path, prefix_trees, visible_mask
from tests.simulated_cuda import CUDA, simulated_device, varlen_attention
from valence.models import attention, flex, layout, native
from valence.models.attention import (
    KeyValueMemory,
    Layout,
    attend,
    attend_by_flash,
    attend_by_flex,
    attend_by_sdpa,
    attend_on_cpu,
    flash_unsupported,
    key_value_memory,
    layout_inputs,
)
from valence.models.flex import BLOCK, Visible
from valence.models.layout import segment_table, segments_of, split_by_gradient
from valence.models.policy_model import padded_size
from valence.training.plan import MAX_TOKENS

BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Layout], Tensor]] = {
    "cpu": attend_on_cpu,
    "flex": attend_by_flex,
    "flash": attend_by_flash,
    "sdpa": attend_by_sdpa,
}
WAYS = ("cpu", "sdpa", "flash")
"""Backends with gradients in float64, FlashAttention by a stand-in."""
SCALE = 0.3
few = settings(max_examples=25)


@contextmanager
def plain_products() -> Iterator[None]:
    """Inside the block, the kernel for CPUs is not used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VALENCE_NATIVE", "0")
        native.unavailable.cache_clear()
        try:
            yield
        finally:
            native.unavailable.cache_clear()


def attend_by(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix_tree: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    scale: float = SCALE,
) -> Tensor:
    """Attention [1, T, H, D_v] by this backend; without a GPU, ``flash`` calls a stand-in for
    PyTorch's FlashAttention.
    """
    inputs = layout_inputs(prefix_tree, (window,), q.device, backend)
    layout = Layout(prefix_tree, inputs.get("visible"), scale, window, softcap, inputs.get("runs"))
    with pytest.MonkeyPatch.context() as patch:
        if backend == "flash" and not q.is_cuda:
            patch.setattr(attention, "varlen_attn", varlen_attention)
            patch.setattr(attention, "flash_unsupported", lambda *_: None)
        return BACKENDS[backend](q, k, v, layout)


def heads(
    rows: int,
    number: int = 4,
    shared: int = 2,
    d: int = 6,
    d_v: int = 10,
    dtype: Any = torch.float64,
) -> list[Tensor]:
    """Random q, k, v [1, H, T, D] with the strides of a model: heads of a token are adjacent."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((number, d), (shared, d), (shared, d_v))
    drawn = [
        torch.randn(1, rows, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]
    return [x.transpose(1, 2).requires_grad_() for x in drawn]


def with_gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The result and its gradients with respect to the inputs."""
    generator = torch.Generator().manual_seed(7)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def varlen_attention_of_211(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
) -> Tensor:
    """With the signature of PyTorch 2.11, which has no grouped heads."""
    options: dict[str, Any] = {"scale": scale, "window_size": window_size}
    return simulated_cuda.varlen_attention(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options
    )


@pytest.mark.parametrize("window", [0, 40])
def test_flash_attention_of_an_old_pytorch_has_grouped_heads_too(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = heads(420, d=16, d_v=16)
    expected = with_gradients(attend_by("sdpa", *inputs, segment_table(TREE), window), inputs)
    monkeypatch.setattr(f"{__name__}.varlen_attention", varlen_attention_of_211)
    results = with_gradients(attend_by("flash", *inputs, segment_table(TREE), window), inputs)
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-9, atol=1e-9)


TREE = [(0, 90, -1), (90, 100, 0), (100, 230, 0), (230, 231, 2), (231, 300, 2), (300, 420, -1)]
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-6, torch.bfloat16: 1e-2}
"""Largest error relative to the norm."""


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("window", "softcap"),
    [(0, 0.0), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((40, 0.0), (0, 0.8)))],
)
@pytest.mark.parametrize(
    ("backend", "kernels"),
    [("cpu", plain_products), *((backend, nullcontext) for backend in BACKENDS)],
)
@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
def test_each_backend_computes_the_formula(
    backend: str,
    kernels: Callable[[], AbstractContextManager[None]],
    window: int,
    softcap: float,
    dtype: torch.dtype,
) -> None:
    """Values, and gradients where the backend has them here; on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() and backend != "cpu" else "cpu"
    inputs = [x.detach().to(device).requires_grad_() for x in heads(420, d=64, d_v=64, dtype=dtype)]
    if backend == "flex" and device == "cpu":  # it has gradients only on CUDA
        inputs = [x.detach() for x in inputs]
    if backend == "flash" and flash_unsupported(inputs[0], inputs[2], softcap):
        return  # ``test_random_trees`` calls a stand-in
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    expected = dense_attention(*exact, visible_mask(TREE, window), 0.125, softcap)
    with kernels():
        out = attend_by(backend, *inputs, segment_table(TREE), window, softcap, 0.125)
        results, references = [out], [expected]
        if inputs[0].requires_grad:
            results, references = with_gradients(out, inputs), with_gradients(expected, exact)
    for result, reference in zip(results, references, strict=True):
        assert result.dtype == dtype
        error = (result.double().cpu() - reference).norm() / reference.norm()
        assert error < TOLERANCES[dtype]


def test_inputs_that_flash_attention_cannot_compute() -> None:
    def reason(dtype: torch.dtype, d: int = 64, d_v: int = 64, softcap: float = 0.0) -> str:
        q, _, v = (x.detach().to(CUDA) for x in heads(4, d=d, d_v=d_v, dtype=dtype))
        return flash_unsupported(q, v, softcap) or ""

    q, _, v = heads(4, d=64, d_v=64, dtype=torch.bfloat16)
    assert "CUDA" in (flash_unsupported(q, v, 0.0) or "")
    with simulated_device():
        assert reason(torch.bfloat16) == reason(torch.float16) == ""
        assert reason(torch.bfloat16, 256, 256) == ""
        assert "bfloat16" in reason(torch.float32)
        assert "256" in reason(torch.bfloat16, 264, 264)
        assert "same size" in reason(torch.bfloat16, 64, 32)
        assert "soft-cap" in reason(torch.bfloat16, softcap=2.0)


def test_the_choice_on_a_cpu() -> None:
    def unsupported(dtype: torch.dtype, d: int = 16, softcap: float = 0.0) -> bool:
        q, _, v = heads(4, d=d, d_v=16, dtype=dtype)
        return native.attention_unsupported(q, v, softcap) is not None

    assert unsupported(torch.bfloat16) == (native.unavailable() is not None)
    assert unsupported(torch.float32)
    assert unsupported(torch.float64)
    assert unsupported(torch.bfloat16, d=24)
    assert unsupported(torch.bfloat16, softcap=2.0)


@pytest.mark.parametrize("way", WAYS)
@few
@given(prefix_trees(), st.sampled_from([0, 1, 3, 20]), st.sampled_from([0.0, 0.8]), st.just(4))
@example([(0, 300, -1), (300, 340, 0)], 20, 0.8, 40)  # more than ``MAX_SCORES``
def test_random_trees(
    way: str, segments: Segments, window: int, softcap: float, number: int
) -> None:
    inputs = heads(segments[-1][1], number)
    softcap = 0.0 if way == "flash" else softcap
    out = attend_by(way, *inputs, segment_table(segments), window, softcap)
    results = with_gradients(out, inputs)
    expected = dense_attention(*inputs, visible_mask(segments, window), SCALE, softcap)
    for result, reference in zip(results, with_gradients(expected, inputs), strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("length", [23, 200])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [0, 4])
def test_nan_stays_in_its_sequence(way: str, window: int, length: int) -> None:
    """Values and gradients of other sequences are unchanged, whether runs share a block or not."""
    end = 20 + length
    segments = [(0, 20, -1), (20, end, -1)]
    segments += [(end, end + 7, -1), (end + 7, end + 10, 2), (end + 10, end + 14, 2)]
    blocks = layout.make_blocks(segments_of(segment_table(segments)), torch.device("cpu"))
    assert len(blocks) == (1 if length == 23 else 2)
    is_other = torch.tensor([r < 20 or r >= end for r in range(end + 14)])
    inputs = heads(end + 14)
    expected = with_gradients(attend_by(way, *inputs, segment_table(segments), window), inputs)
    with torch.no_grad():
        for x in inputs:
            x[:, :, 20:end] = torch.nan
    results = with_gradients(attend_by(way, *inputs, segment_table(segments), window), inputs)
    torch.testing.assert_close(results[0][:, is_other], expected[0][:, is_other])
    assert results[0][:, ~is_other].isnan().all()
    for result, reference in zip(results[1:], expected[1:], strict=True):
        torch.testing.assert_close(result[:, :, is_other], reference[:, :, is_other])


FILLS = {"not padded": int, "padded": partial(padded_size, device="cpu")}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("way", WAYS)
@few
@given(prefix_trees(segments=6, longest=20), st.sampled_from([0, 3]), st.integers(0, 5))
def test_a_second_pass_over_cached_keys_and_values(
    way: str, fill: Callable[[int], int], segments: Segments, window: int, number: int
) -> None:
    """And over what padded_size the first one up, which none sees."""
    paths = [path(segments, k) for k in range(len(segments))]
    parts = split_by_gradient(
        segments, paths, [k == number % len(paths) for k in range(len(paths))], fill
    )
    if not len(parts.no_grad_rows):
        return
    inputs = heads(segments[-1][1])
    full = dense_attention(*inputs, visible_mask(segments, window), SCALE)
    count = len(parts.grad_rows)
    more = fill(count) - count
    filled_up = (
        torch.cat([parts.grad_table, torch.tensor([[count, count + more, -1, 1]])])
        if more
        else parts.grad_table
    )
    memory = KeyValueMemory(fill(count))
    results: list[Tensor] = []
    for rows, prefix_tree, is_reading in (
        (torch.cat([parts.grad_rows, torch.zeros(more, dtype=torch.long)]), filled_up, False),
        (parts.no_grad_rows, parts.no_grad_table, True),
    ):
        with torch.no_grad(), key_value_memory(memory, is_reading=is_reading):
            results.append(attend_by(way, *(x[:, :, rows] for x in inputs), prefix_tree, window))
    torch.testing.assert_close(results[0][:, :count], full[:, parts.grad_rows])
    torch.testing.assert_close(results[1], full[:, parts.no_grad_rows])


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@few
@given(prefix_trees(segments=7, longest=30), st.integers(0, 6))
def test_cuda_masks_equal_the_visible_pairs(
    fill: Callable[[int], int], segments: Segments, number: int
) -> None:
    """For a full prefix tree, and for a second pass after a first one."""
    windows = (0, 1, 4, 20)
    paths = [path(segments, k) for k in range(len(segments))]
    parts = split_by_gradient(
        segments, paths, [k == number % len(paths) for k in range(len(paths))], fill
    )
    nobody = torch.full((fill(len(parts.grad_rows)) - len(parts.grad_rows),), -1)
    order = torch.cat([parts.grad_rows, nobody, parts.no_grad_rows])
    full = torch.arange(segments[-1][1])
    for prefix_tree, keys, queries in (
        (segment_table(segments), full, full),
        (parts.no_grad_table, order, parts.no_grad_rows),
    ):
        if not len(queries):
            continue
        visible = Visible(segments_of(prefix_tree), windows, torch.device("cpu"))
        zero, rows, columns = (
            torch.tensor(0),
            torch.arange(len(queries))[:, None],
            torch.arange(len(keys))[None],
        )
        for window, mask in visible.masks.items():
            assert mask.shape == (1, 1, len(queries), len(keys))
            wanted = visible_mask(segments, window)[queries][:, keys.clamp(min=0)] & (keys >= 0)
            assert torch.equal(mask.mask_mod(zero, zero, rows, columns), wanted)


def blocks_of(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Which blocks a mask lists [Q, K]."""
    result = torch.zeros(places.shape[2:], dtype=torch.bool)
    for row, (count, listed) in enumerate(zip(counts[0, 0].tolist(), places[0, 0], strict=True)):
        result[row, listed[:count].long()] = True
    return result


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("walked", [True, False])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]
)
def test_no_block_is_left_out_in_which_something_is_seen(
    seed: int, walked: bool, window: int
) -> None:
    """And none is taken for one in which all is seen.

    Few are looked into in vain where rows come as in a walk depth first.
    """
    draw = random.Random(seed)
    segments, end, above = list[tuple[int, int, int]](), 0, [-1]
    for k in range(12):
        length, place = draw.choice([3, 40, 128, 200, 400]), draw.randrange(len(above))
        segments.append((end, end + length, above[place]))
        above, end = [*(above[: place + 1] if walked else above), k], end + length
    mask = Visible(segments_of(segment_table(segments)), (window,), torch.device("cpu")).masks[
        window
    ]
    sees = visible_mask(segments, window)
    size = -(-end // BLOCK) * BLOCK
    real = torch.zeros(size, size, dtype=torch.bool)
    real[:end, :end] = sees
    by_block = real.view(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
    some, every = by_block.any(3).any(1), by_block.all(3).all(1)
    request, full = (
        blocks_of(mask.kv_num_blocks, mask.kv_indices),
        blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    assert not (request & full).any()
    assert not (full & ~every).any()
    assert not (some & ~(request | full)).any()
    assert not walked or (request | full).sum() <= 1.25 * some.sum()
    assert every.sum() == full.sum()
    transposed = blocks_of(mask.q_num_blocks, mask.q_indices) | blocks_of(
        mask.full_q_num_blocks, mask.full_q_indices
    )
    assert torch.equal(transposed.T, request | full)  # which the backward pass goes by


def test_the_compiler_of_attention_has_room_for_every_size() -> None:
    """Beyond its limit it goes on with all scores in memory at once.

    With and without a gradient, and second passes behind first ones; with a window and none.
    """
    sizes = {padded_size(tokens, "cuda") for tokens in range(1, MAX_TOKENS["cuda"] + 1)}
    pairs = [
        (first, second)
        for first in sizes
        for second in sizes
        if first + second <= MAX_TOKENS["cuda"]
    ]
    assert min(sizes) >= BLOCK
    limits: list[int] = []

    def a_thread() -> None:  # the compiler's settings are each thread's own
        flex.raise_recompile_limits()
        limits.extend(
            [torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit]
        )

    thread = threading.Thread(target=a_thread)
    thread.start()
    thread.join()
    assert len(limits) == 2
    assert 2 * (2 * len(sizes) + len(pairs)) < min(limits)


def test_a_second_pass_has_few_sizes_on_cuda() -> None:
    """Each is a separate program."""
    sizes: set[tuple[int, int]] = set()
    for rows in range(3000, 4000, 7):
        parts = split_by_gradient(
            [(0, rows, -1), (rows, rows + 500, -1)],
            [[0], [1]],
            [True, False],
            partial(padded_size, device="cuda"),
        )
        sizes.add((int(parts.no_grad_table[-1, 0]), int(parts.grad_table[-1, 1])))
    assert {first for first, _ in sizes} <= {
        padded_size(rows, "cuda") for rows in range(3000, 4000)
    }
    assert len({first for first, _ in sizes}) <= 5
    assert len({rows for _, rows in sizes}) > 100


@few
@given(prefix_trees(), st.sampled_from([0, 1, 4]))
def test_every_query_attends_to_itself_and_columns_have_32_bits(
    segments: Segments, window: int
) -> None:
    """The kernels rely on it (ROWS_GUARANTEED_SAFE)."""
    visible = Visible(segments_of(segment_table(segments)), (window,), torch.device("cpu"))
    mask_mod = visible.masks[window].mask_mod
    zero, rows = torch.tensor(0), torch.arange(segments[-1][1])
    assert mask_mod(zero, zero, rows, rows).all()
    columns = [cell.cell_contents for cell in mask_mod.__closure__ or ()]
    tensors = [column for column in columns if isinstance(column, Tensor)]
    assert {column.dtype for column in tensors} == {torch.int32}


def test_each_size_has_a_program_and_no_number_is_its_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The compiler's first stage, which runs without a GPU. A scale or soft-cap that becomes an
    input of the program would be read from the host.
    """
    graphs: list[Any] = []

    def record(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiles = partial(torch.compile, backend=record)
    monkeypatch.setattr(torch, "compile", compiles)
    flex._compiled.cache_clear()
    torch.compiler.reset()
    try:
        for rows in (256, 384, 512, 640, 1024, 1152):
            segments = [(0, rows // 2, -1), (rows // 2, rows - 30, 0), (rows - 30, rows, 0)]
            q, k, v = (x.detach() for x in heads(rows, d=16, d_v=16, dtype=torch.float32))
            visible = Visible(segments_of(segment_table(segments)), (0, 5), torch.device("cpu"))
            with torch.no_grad():
                visible.run_compiled(q, k, v, SCALE, 5, 20.0)
    finally:
        flex._compiled.cache_clear()
        torch.compiler.reset()
    assert len(graphs) == 6
    inputs = {
        node.name for graph in graphs for node in graph.graph.nodes if node.op == "placeholder"
    }
    assert not [name for name in inputs if "scale" in name or "score_mod" in name]


@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (0, 0.0),
        (5, 0.8),
        *(pytest.param(*item, marks=pytest.mark.slow) for item in ((0, 0.8), (5, 0.0))),
    ],
)
def test_flex_attention_is_the_formula(window: int, softcap: float) -> None:
    segments = [(0, 20, -1), (20, 33, 0), (33, 150, 0), (150, 155, 2)]
    q, k, v = (x.detach() for x in heads(155, d=16, d_v=16))
    visible = Visible(segments_of(segment_table(segments)), (0, 5), torch.device("cpu"))
    wanted = dense_attention(q, k, v, visible_mask(segments, window), SCALE, softcap)
    torch.testing.assert_close(
        visible(q, k, v, SCALE, window, softcap).transpose(1, 2), wanted, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_fake_operators_match_the_real_ones(dtype: torch.dtype) -> None:
    prefix_tree = segment_table([(0, 20, -1), (20, 33, 0), (33, 40, 0)])
    inputs = heads(40, dtype=dtype, d=16, d_v=16)
    torch.library.opcheck(attend, (*inputs, prefix_tree, SCALE, 0, 0.0))
    out, lse = (x.detach() for x in attend(*inputs, prefix_tree, SCALE, 0, 0.0))
    plain = [x.detach() for x in inputs]
    torch.library.opcheck(
        attention.attend_backward,
        (torch.randn_like(out), out, lse, *plain, prefix_tree, SCALE, 0, 0.0),
    )


def test_a_layer_without_a_prefix_tree_raises_an_error() -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(attention.CannotPackError) as error:
        attention.prefix_tree_attention(nn.Module(), q, q, q, None)
    assert error.value.code == "sequences-unmarked"


@pytest.mark.parametrize(("others", "code"), [
    ({"attention_mask": torch.full((1, 1, 1, 1), 4)}, "windows-differ"),
    ({"sliding_window": 4}, "windows-differ"),
    ({"s_aux": torch.zeros(2)}, "attention-input-unknown"),
])  # fmt: skip
def test_unsupported_attention_arguments_are_refused(others: dict[str, object], code: str) -> None:
    q = torch.randn(1, 2, 5, 4)
    requests = {"attention_mask": None, "prefix_tree": segment_table([(0, 5, -1)])} | others
    with pytest.raises(attention.CannotPackError) as error:
        attention.prefix_tree_attention(nn.Module(), q, q, q, **requests)  # type: ignore[arg-type]
    assert error.value.code == code
    attention.prefix_tree_attention(nn.Module(), q, q, q, **requests | dict.fromkeys(others))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", [nullcontext, plain_products])
def test_autocast_converts_inputs_and_no_intermediate_values(
    kernels: Callable[[], AbstractContextManager[None]],
) -> None:
    """Products of bfloat16 numbers are summed in float32, as they are without autocast."""
    prefix_tree = segment_table([(0, 20, -1), (20, 33, 0), (33, 40, 0)])
    wide = heads(40, d=16, d_v=16, dtype=torch.float32)
    results: list[list[Tensor]] = []
    for request, autocast in (
        (wide, True),
        ([x.detach().bfloat16().requires_grad_() for x in wide], False),
    ):
        with kernels(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, _ = attention.prefix_tree_attention(
                nn.Module(), *request, None, prefix_tree=prefix_tree
            )
        assert out.dtype == torch.bfloat16
        with kernels():
            results.append(with_gradients(out, request))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.bfloat16(), theirs)
