"""Many processes give what one would, the same bits to all; and none waits for ever."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist import jobs, rig
from valence.dist.posts import Place, Posts
from valence.dist.processes import Processes, start
from valence.dist.protocol import Group
from valence.dist.single import Single
from valence.errors import UserError

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of 2, and of 4 processes found."""
    ended = rig.run(jobs.members, request.param)
    assert [each.error for each in ended] == [""] * request.param
    assert [each.code for each in ended] == [0] * request.param
    return [each.value for each in ended]


def same_bits(ranks: list[dict[str, Any]], name: str) -> torch.Tensor:
    first = ranks[0][name]
    for other in ranks[1:]:
        assert other[name].dtype == first.dtype
        assert other[name].shape == first.shape
        assert other[name].contiguous().view(-1).view(torch.uint8).equal(first.contiguous().view(-1).view(torch.uint8))
    return first


@pytest.mark.parametrize("name", jobs.summands(0))
def test_sum(ranks: list[dict[str, Any]], name: str) -> None:
    given = [jobs.summands(rank)[name] for rank in range(len(ranks))]
    total = same_bits(ranks, f"sum {name}") if given[0].ndim else torch.stack([each[f"sum {name}"] for each in ranks]).unique()[0]
    torch.testing.assert_close(total, torch.stack(given).sum(0))
    assert all(each["kept"] for each in ranks)


@pytest.mark.parametrize("name", jobs.parts(0))
def test_gather(ranks: list[dict[str, Any]], name: str) -> None:
    whole = torch.cat([jobs.parts(rank)[name] for rank in range(len(ranks))])
    for each in ranks:
        torch.testing.assert_close(each[f"gather {name}"], whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("i", range(len(jobs.parameters(0))))
def test_gradients(ranks: list[dict[str, Any]], i: int) -> None:
    given = [jobs.parameters(rank)[i].grad for rank in range(len(ranks))]
    there = [grad for grad in given if grad is not None]
    assert all(each["in place"] for each in ranks)
    if not there:
        assert [each[f"grad {i}"] for each in ranks] == [None] * len(ranks)
    else:
        assert {each[f"grad {i}"].shape for each in ranks} == {there[0].shape}
        for each in ranks:
            assert each[f"grad {i}"].equal(ranks[0][f"grad {i}"])
        torch.testing.assert_close(ranks[0][f"grad {i}"], torch.stack(there).sum(0))


def test_broadcast_any_barrier(ranks: list[dict[str, Any]]) -> None:
    assert [each["broadcast"] for each in ranks] == [jobs.JSON | {"pair": [1, 2]}] * len(ranks)
    assert [each["any"] for each in ranks] == [[True, False, True]] * len(ranks)
    assert min(left for each in ranks for left in each["barrier"][1:]) >= max(each["barrier"][0] for each in ranks)
    assert [each["place"] for each in ranks] == [(rank, len(ranks), rank) for rank in range(len(ranks))]


def test_one_process_is_a_group_too() -> None:
    found = jobs.members(Single())
    for name, values in jobs.summands(0).items():
        assert found[f"sum {name}"].equal(values)
    for name, values in jobs.parts(0).items():
        assert found[f"gather {name}"].equal(values)
    assert found["broadcast"] == jobs.JSON | {"pair": [1, 2]}
    assert found["any"] == [True, False, True]
    assert found["place"] == (0, 1, 0)


@pytest.mark.parametrize("kind", [Single, Processes])
def test_groups_have_the_members_of_the_protocol(kind: type) -> None:
    for name, member in vars(Group).items():
        if not name.startswith("_") and inspect.isfunction(member):
            assert inspect.signature(getattr(kind, name)) == inspect.signature(member)


def test_a_second_group_finds_nothing_of_the_first() -> None:
    assert [each.value for each in rig.run(jobs.twice, 2)] == [[2.0, 4.0]] * 2


@pytest.mark.parametrize(("size", "away"), [(4, 2), (2, 0)])
def test_a_deadline_says_who_is_missing_and_where(size: int, away: int) -> None:
    ended = rig.run(jobs.one_stays_away, size, away, deadline=2.0)
    for rank, each in enumerate(ended):
        if rank != away:
            assert each.error.startswith(f"rank {rank}: rank {away} has not come to `sum` #2 ")
            assert "(it was last at `barrier audit` #1)" in each.error
            assert each.seconds < 5
    assert any("within 2 s" in each.error for each in ended)


def test_processes_that_part_are_told_so() -> None:
    ended = rig.run(jobs.they_part, 2, deadline=2.0)
    assert any("have parted: this one is at `sum` #2, it was last at `gather` #2" in each.error for each in ended)


@pytest.mark.parametrize(("size", "killed", "before"), [(2, 1, False), (4, 2, False), (4, 1, True), (2, 0, False)])
def test_a_process_that_is_killed_ends_the_others_within_seconds(size: int, killed: int, before: bool) -> None:
    ended = rig.run(jobs.one_is_killed, size, killed, before)
    assert ended[killed].code == -9
    others = [each for rank, each in enumerate(ended) if rank != killed]
    assert all(each.code == 0 and each.seconds < 5 for each in others)
    if killed == 0:  # who kept what the others know
        assert all("nobody can say who is missing" in each.error for each in others)
    elif before:
        assert any(f"rank {killed} has not come to `reduce_gradients` #2 before a connection" in each.error for each in others)
    else:
        assert all("before a connection to another process broke" in each.error for each in others)


def test_a_process_that_does_not_start_is_named() -> None:
    (first,) = rig.run(jobs.never, 3, deadline=0.5, started=[0])
    assert first.error.startswith("rank 0: not all processes have started within 0.5 s; missing: rank 1, 2")
    (second,) = rig.run(jobs.never, 3, deadline=0.5, started=[1])
    assert ": rank 0 does not answer within 0.5 s" in second.error
    assert second.error.startswith("127.0.0.1:")


@pytest.mark.parametrize("ends", [True, False])
def test_a_collective_that_a_device_does_not_end_ends_the_process(ends: bool, tmp_path: Path) -> None:
    ended = rig.run(jobs.watched, 2, ends, str(tmp_path))
    assert [(each.value, each.code) for each in ended] == [("went on", 0) if ends else (None, 2)] * 2
    said = [(tmp_path / str(rank)).read_text(encoding="utf-8") for rank in range(2)]
    assert said == ["" if ends else "valence: `sum` #1 did not end\n"] * 2


def test_other_errors_of_a_collective_stay_what_they_are() -> None:
    ended = rig.run(jobs.wrong_type, 2)
    assert [each.value for each in ended] == ["RuntimeError"] * 2
    assert [each.error for each in ended] == ["", ""]


def test_no_environment_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(start(), Single)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(start(), Single)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="RANK: WORLD_SIZE names several processes, but RANK is no number"):
        start()


def test_many_missing_are_counted() -> None:
    posts = Posts(torch.distributed.HashStore(), 0, range(30))
    for rank in range(30):
        Posts(posts.store, rank, range(30)).post(Place(5 if rank % 2 == 0 else 4, "sum"))
    said = posts.missed(Place(5, "sum"), 600.0)
    assert said.what.startswith("ranks 1, 3, 5, 7, 9, 11, 13, 15 and 7 more have not come to `sum` #5 within 600 s (rank 1 was ")


def test_the_norm_of_a_large_gradient_is_exact_on_a_cpu() -> None:
    """PyTorch's own, in float32, is 4e-5 too small here."""
    weight = torch.nn.Parameter(torch.zeros(3, 800_000))
    weight.grad = torch.rand(3, 800_000, generator=torch.Generator().manual_seed(0)) + 0.5
    expected = weight.grad.double().square().sum().sqrt().item()
    assert Single().norm([weight]).item() == pytest.approx(expected, rel=1e-12)
    assert Single().norm([torch.nn.Parameter(torch.zeros(2))]).item() == 0.0
