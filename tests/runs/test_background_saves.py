"""Checkpoints that a thread writes, when a signal interrupts the wait for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from valence.training.checkpoints import MIN_BACKGROUND_BYTES, Checkpoints

LARGE = torch.zeros(MIN_BACKGROUND_BYTES // 4)


class _Interrupt(BaseException):
    """Raised by the handler of a signal, as ``Stop`` does."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def interrupt(*_: object) -> None:
        raise _Interrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


def test_an_interrupted_wait_does_not_lose_the_save(tmp_path: Path, alarm: None) -> None:
    """The next save of the same step would otherwise write into the folder of the first one."""
    may_write, states = threading.Event(), [{"w": LARGE}, {"w": LARGE + 1, "x": 1}]
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)

    def block() -> None:
        may_write.wait()

    checkpoints.save(5, states[0], {}, first=[block])
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(_Interrupt):
        checkpoints.wait()
    threading.Timer(0.2, may_write.set).start()
    checkpoints.save(5, states[1], {}, wait=True)
    assert checkpoints.take_messages() == []
    saved = checkpoints.newest(pytest.fail)
    assert saved is not None
    assert saved.step == 5
    assert list((tmp_path / "checkpoints").iterdir()) == [saved.path]


def test_no_thread_is_left_after_a_wait(tmp_path: Path) -> None:
    """A program that ends while a thread frees tensors is aborted."""
    checkpoints, before = Checkpoints(tmp_path / "checkpoints", keep=1), threading.enumerate()
    for step in range(1, 6):
        checkpoints.save(step, {"w": LARGE}, {})
        checkpoints.wait()
        assert threading.enumerate() == before


def test_the_thread_has_the_device_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 0 is the current one of a new thread, and PyTorch's writer waits for its stream: each
    process of a host would get memory there.
    """
    current, devices = threading.local(), list[int]()
    current.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    checkpoints.save(
        5, {"w": LARGE}, {}, first=[lambda: devices.append(torch.cuda.current_device())]
    )
    checkpoints.wait()
    assert checkpoints.take_messages() == []
    assert devices == [3]
