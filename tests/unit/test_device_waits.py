"""A device that waits for a rank that has left is released, and what it then holds is refused."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.errors import PeerError
from paceline.group.device_waits import DeviceWaits


@dataclass
class Device:
    """Passes an event when it is told to, or when its communicators are aborted."""

    passed: threading.Event = field(default_factory=threading.Event)
    looked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    recorded: int = 0
    aborted: threading.Event = field(default_factory=threading.Event)

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        self.looked.release()
        return self.passed.is_set()

    def abort(self) -> None:
        self.aborted.set()
        self.passed.set()


def explain(_group: Any, what: str, _error: BaseException) -> PeerError:
    return PeerError(f"{what} failed", "Rank 1 raised ValueError.")


def waits_of(device: Device, *, is_left: bool) -> DeviceWaits:
    return DeviceWaits(lambda _: is_left, explain, lambda: device, device.abort, patience_s=0.01)


def test_a_sum_that_a_rank_has_left_is_aborted_and_every_later_one_refused() -> None:
    device = Device()
    waits = waits_of(device, is_left=True)
    waits.note(None, "Step 3: the sum of bucket 0")
    assert device.aborted.wait(60)
    for _ in range(2):
        with pytest.raises(PeerError):
            waits.check()
    with pytest.raises(PeerError):
        waits.note(None, "Step 4: the sum of bucket 0")


def test_a_sum_that_is_only_slow_is_waited_for() -> None:
    device = Device()
    waits = waits_of(device, is_left=False)
    waits.note(None, "Step 3: the sum of bucket 0")
    for _ in range(3):
        assert device.looked.acquire(timeout=60)
    assert not device.aborted.is_set()
    waits.check()
    device.passed.set()


def test_a_rank_may_leave_when_the_device_waits_for_nothing() -> None:
    device = Device()
    device.passed.set()
    waits = waits_of(device, is_left=True)
    for number in range(3):
        waits.note(None, f"Step {number}: the sum of bucket 0")
        assert device.looked.acquire(timeout=60)
    waits.check()
    assert not device.aborted.is_set()


def test_what_is_noted_while_an_earlier_sum_is_watched_is_watched_too() -> None:
    device = Device()
    is_left = threading.Event()
    waits = DeviceWaits(lambda _: is_left.is_set(), explain, lambda: device, device.abort, 0.01)
    waits.note(None, "Step 3: the sum of bucket 0")
    assert device.looked.acquire(timeout=60)
    waits.note(None, "Step 9: the sum of bucket 0")
    assert device.recorded == 2
    is_left.set()
    assert device.aborted.wait(60)
    with pytest.raises(PeerError) as found:
        waits.check()
    assert "Step 9" in str(found.value)


def test_a_sum_that_arrives_over_a_lost_connection_is_refused() -> None:
    device, lost = Device(), threading.Event()
    device.passed.set()  # the device goes on, with anything in memory
    waits = DeviceWaits(
        lambda _: False, explain, lambda: device, device.abort, 0.01, has_failed=lost.is_set
    )
    waits.note(None, "Step 3: the sum of bucket 0")
    assert device.looked.acquire(timeout=60)
    lost.set()
    waits.note(None, "Step 4: the sum of bucket 0")
    assert device.aborted.wait(60)
    with pytest.raises(PeerError, match="Step 4"):
        waits.check()


def test_the_end_of_a_process_waits_for_word_of_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()
    device.passed.set()
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    waits = DeviceWaits(
        lambda _: False, explain, lambda: device, device.abort, has_failed=lambda: True
    )
    waits.settle()  # nothing was summed
    waits.note(None, "Step 9: the sum of bucket 0")
    with pytest.raises(PeerError, match="Step 9"):
        waits.settle()
    assert device.aborted.is_set()


def test_a_connection_that_is_lost_once_the_host_waits_is_left_to_its_waits() -> None:
    device, lost = Device(), threading.Event()
    waits = DeviceWaits(
        lambda _: False, explain, lambda: device, device.abort, 0.01, has_failed=lost.is_set
    )
    waits.note(None, "Copying rank 0's model")
    assert device.looked.acquire(timeout=60)
    waits.stop()
    lost.set()
    for thread in threading.enumerate():
        if thread.name == "paceline device waits":
            thread.join(60)
    waits.settle()
    waits.check()
    assert not device.aborted.is_set()
