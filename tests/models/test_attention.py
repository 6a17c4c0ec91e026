"""Attention over a forest against its formula, by each way that it runs on a CPU."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.prefix_trees import Segments, dense_attention, forests, path, seen
from valence.models import attention, flex, layout, native
from valence.models.attention import KeyValueMemory, attend, remembering
from valence.models.flex import BLOCK, Visible
from valence.models.layout import segments_of, split, table
from valence.models.policy_model import filled
from valence.planning.plan import MAX_TOKENS


def attended(*given: Any) -> Tensor:
    """What ``attend`` gives to the model."""
    return attend(*given)[0]


WAYS: dict[str, Callable[..., Tensor]] = {"attend": attended, "sdpa": attention.attend_by_sdpa}
SCALE = 0.3
few = settings(max_examples=25)


@contextmanager
def plain_products() -> Iterator[None]:
    """Without the compiled kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "attention_unsupported", lambda *_: "switched off")
        yield


def heads(
    rows: int,
    number: int = 4,
    shared: int = 2,
    d: int = 6,
    d_v: int = 10,
    dtype: Any = torch.float64,
) -> list[Tensor]:
    """Random q, k, v as a model makes them: [1, H, T, D], of which the heads of a token lie
    together.
    """
    made = torch.Generator().manual_seed(rows)
    shapes = ((number, d), (shared, d), (shared, d_v))
    drawn = [
        torch.randn(1, rows, *shape, generator=made, dtype=torch.float64).to(dtype)
        for shape in shapes
    ]
    return [x.transpose(1, 2).requires_grad_() for x in drawn]


def with_slopes(out: Tensor, given: list[Tensor]) -> list[Tensor]:
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return [out, *torch.autograd.grad(out, given, slope.to(out.dtype))]


@pytest.mark.parametrize("way", WAYS)
@few
@given(
    forests(),
    st.sampled_from([0, 1, 3, 20]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([1 << 21, 700]),
)
def test_values_and_gradients_are_those_of_the_formula(
    way: str, segments: Segments, window: int, softcap: float, at_once: int
) -> None:
    given = heads(segments[-1][1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ELEMENTS", at_once)
        found = with_slopes(WAYS[way](*given, table(segments), SCALE, window, softcap), given)
    wanted = with_slopes(dense_attention(*given, seen(segments, window), SCALE, softcap), given)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_rounding_is_that_of_the_type(dtype: torch.dtype, most: float) -> None:
    segments = [
        (0, 90, -1),
        (90, 100, 0),
        (100, 230, 0),
        (230, 231, 2),
        (231, 300, 2),
        (300, 420, -1),
    ]
    given = heads(420, d=64, d_v=64, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in given]
    with plain_products():
        found = with_slopes(attended(*given, table(segments), 0.125, 0, 0.0), given)
    wanted = with_slopes(dense_attention(*exact, seen(segments), 0.125), exact)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < most


@pytest.mark.parametrize(("way", "together"), [
    ("attend", True), ("attend", False), ("sdpa", True), ("sdpa", False),
])  # fmt: skip
@pytest.mark.parametrize("window", [0, 4])
def test_what_is_not_a_number_stays_in_its_sequence(
    way: str, window: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients of the others are as they are without it, whether runs share a block or
    have one each.
    """
    monkeypatch.setattr(layout, "CALL", layout.CALL if together else 0)
    layout.blocks.cache_clear()
    segments = [(0, 20, -1), (20, 43, -1), (43, 50, -1), (50, 53, 2), (53, 57, 2)]
    rows = torch.tensor([r < 20 or r >= 43 for r in range(57)])
    given = heads(57)
    right = with_slopes(WAYS[way](*given, table(segments), SCALE, window, 0.0), given)
    with torch.no_grad():
        for x in given:
            x[:, :, 20:43] = torch.nan
    found = with_slopes(WAYS[way](*given, table(segments), SCALE, window, 0.0), given)
    torch.testing.assert_close(found[0][:, rows], right[0][:, rows])
    assert found[0][:, ~rows].isnan().all()
    for ours, before in zip(found[1:], right[1:], strict=True):
        torch.testing.assert_close(ours[:, :, rows], before[:, :, rows])


FILLS = {"not filled": int, "filled up": partial(filled, device="cpu")}


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@pytest.mark.parametrize("way", WAYS)
@few
@given(forests(segments=6, longest=20), st.sampled_from([0, 3]), st.integers(0, 5))
def test_a_second_pass_over_what_the_first_one_kept(
    way: str, fill: Callable[[int], int], segments: Segments, window: int, number: int
) -> None:
    """And over what filled the first one up, which none sees."""
    paths = [path(segments, k) for k in range(len(segments))]
    parts = split(segments, paths, [k == number % len(paths) for k in range(len(paths))], fill)
    if not len(parts.rest):
        return
    given = heads(segments[-1][1])
    whole = dense_attention(*given, seen(segments, window), SCALE)
    count = len(parts.rows)
    more = fill(count) - count
    filled_up = (
        torch.cat([parts.first, torch.tensor([[count, count + more, -1, 1]])])
        if more
        else parts.first
    )
    memory = KeyValueMemory(fill(count))
    found: list[Tensor] = []
    for rows, forest, reading in (
        (torch.cat([parts.rows, torch.zeros(more, dtype=torch.long)]), filled_up, False),
        (parts.rest, parts.second, True),
    ):
        with torch.no_grad(), remembering(memory, reading=reading):
            found += [WAYS[way](*(x[:, :, rows] for x in given), forest, SCALE, window, 0.0)]
    torch.testing.assert_close(found[0][:, :count], whole[:, parts.rows])
    torch.testing.assert_close(found[1], whole[:, parts.rest])


@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
@few
@given(forests(segments=7, longest=30), st.integers(0, 6))
def test_the_masks_for_cuda_say_what_is_seen(
    fill: Callable[[int], int], segments: Segments, number: int
) -> None:
    """Of a whole forest, and of a second pass behind a first one."""
    windows = (0, 1, 4, 20)
    paths = [path(segments, k) for k in range(len(segments))]
    parts = split(segments, paths, [k == number % len(paths) for k in range(len(paths))], fill)
    nobody = torch.full((fill(len(parts.rows)) - len(parts.rows),), -1)
    order = torch.cat([parts.rows, nobody, parts.rest])
    whole = torch.arange(segments[-1][1])
    for forest, keys, queries in (
        (table(segments), whole, whole),
        (parts.second, order, parts.rest),
    ):
        if not len(queries):
            continue
        visible = Visible(segments_of(forest), windows, torch.device("cpu"))
        zero, rows, columns = (
            torch.tensor(0),
            torch.arange(len(queries))[:, None],
            torch.arange(len(keys))[None],
        )
        for window, mask in visible.masks.items():
            assert mask.shape == (1, 1, len(queries), len(keys))
            wanted = seen(segments, window)[queries][:, keys.clamp(min=0)] & (keys >= 0)
            assert torch.equal(mask.mask_mod(zero, zero, rows, columns), wanted)


def blocks_of(counts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Which blocks a mask lists [Q, K]."""
    found = torch.zeros(places.shape[2:], dtype=torch.bool)
    for row, (count, listed) in enumerate(zip(counts[0, 0].tolist(), places[0, 0], strict=True)):
        found[row, listed[:count].long()] = True
    return found


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
    mask = Visible(segments_of(table(segments)), (window,), torch.device("cpu")).masks[window]
    sees = seen(segments, window)
    size = -(-end // BLOCK) * BLOCK
    real = torch.zeros(size, size, dtype=torch.bool)
    real[:end, :end] = sees
    by_block = real.view(size // BLOCK, BLOCK, size // BLOCK, BLOCK)
    some, every = by_block.any(3).any(1), by_block.all(3).all(1)
    asked, whole = (
        blocks_of(mask.kv_num_blocks, mask.kv_indices),
        blocks_of(mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    assert not (asked & whole).any()
    assert not (whole & ~every).any()
    assert not (some & ~(asked | whole)).any()
    assert not walked or (asked | whole).sum() <= 1.25 * some.sum()
    assert every.sum() == whole.sum()
    transposed = blocks_of(mask.q_num_blocks, mask.q_indices) | blocks_of(
        mask.full_q_num_blocks, mask.full_q_indices
    )
    assert torch.equal(transposed.T, asked | whole)  # which the backward pass goes by


def test_the_compiler_of_attention_has_room_for_every_size() -> None:
    """Beyond its limit it goes on with all scores in memory at once.

    With and without a gradient, and second passes behind first ones; with a window and none.
    """
    sizes = {filled(tokens, "cuda") for tokens in range(1, MAX_TOKENS["cuda"] + 1)}
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
    """Each is a program of its own."""
    sizes: set[tuple[int, int]] = set()
    for rows in range(3000, 4000, 7):
        parts = split(
            [(0, rows, -1), (rows, rows + 500, -1)],
            [[0], [1]],
            [True, False],
            partial(filled, device="cuda"),
        )
        sizes.add((int(parts.second[-1, 0]), int(parts.first[-1, 1])))
    assert {first for first, _ in sizes} <= {filled(rows, "cuda") for rows in range(3000, 4000)}
    assert len({first for first, _ in sizes}) <= 5
    assert len({rows for _, rows in sizes}) > 100


@pytest.mark.filterwarnings("ignore:.*torch.compile.*")
@pytest.mark.parametrize(
    ("window", "softcap"),
    [
        (0, 0.0),
        (5, 0.8),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, 0.8), (5, 0.0))),
    ],
)
def test_flex_attention_is_the_formula(window: int, softcap: float) -> None:
    segments = [(0, 20, -1), (20, 33, 0), (33, 150, 0), (150, 155, 2)]
    q, k, v = (x.detach() for x in heads(155, d=16, d_v=16))
    visible = Visible(segments_of(table(segments)), (0, 5), torch.device("cpu"))
    wanted = dense_attention(q, k, v, seen(segments, window), SCALE, softcap)
    torch.testing.assert_close(
        visible(q, k, v, SCALE, window, softcap).transpose(1, 2), wanted, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]
)
def test_the_operators_are_what_the_compiler_takes_them_for(dtype: torch.dtype) -> None:
    forest = table([(0, 20, -1), (20, 33, 0), (33, 40, 0)])
    given = heads(40, dtype=dtype, d=16, d_v=16)
    torch.library.opcheck(attend, (*given, forest, SCALE, 0, 0.0))
    out, lse = (x.detach() for x in attend(*given, forest, SCALE, 0, 0.0))
    plain = [x.detach() for x in given]
    torch.library.opcheck(
        attention.attend_backward, (torch.randn_like(out), out, lse, *plain, forest, SCALE, 0, 0.0)
    )


def test_a_layer_that_hands_no_forest_over_says_so() -> None:
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(attention.CannotPackError) as error:
        attention.forest_attention(nn.Module(), q, q, q, None)
    assert error.value.code == "sequences-unmarked"


@pytest.mark.parametrize(("others", "code"), [
    ({"attention_mask": torch.full((1, 1, 1, 1), 4)}, "windows-differ"),
    ({"sliding_window": 4}, "windows-differ"),
    ({"s_aux": torch.zeros(2)}, "attention-input-unknown"),
])  # fmt: skip
def test_what_is_not_done_here_is_refused(others: dict[str, object], code: str) -> None:
    q = torch.randn(1, 2, 5, 4)
    asked = {"attention_mask": None, "forest": table([(0, 5, -1)])} | others
    with pytest.raises(attention.CannotPackError) as error:
        attention.forest_attention(nn.Module(), q, q, q, **asked)  # type: ignore[arg-type]
    assert error.value.code == code
    attention.forest_attention(nn.Module(), q, q, q, **asked | dict.fromkeys(others))  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", [nullcontext, plain_products])
def test_autocast_narrows_what_comes_in_and_nothing_inside(
    kernels: Callable[[], AbstractContextManager[None]],
) -> None:
    """Products of bfloat16 numbers are summed in float32, as they are without autocast."""
    forest = table([(0, 20, -1), (20, 33, 0), (33, 40, 0)])
    wide = heads(40, d=16, d_v=16, dtype=torch.float32)
    found: list[list[Tensor]] = []
    for asked, autocast in (
        (wide, True),
        ([x.detach().bfloat16().requires_grad_() for x in wide], False),
    ):
        with kernels(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, _ = attention.forest_attention(nn.Module(), *asked, None, forest=forest)
        assert out.dtype == torch.bfloat16
        with kernels():
            found.append(with_slopes(out, asked))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours.bfloat16(), theirs)
