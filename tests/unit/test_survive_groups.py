"""Groups that cannot be formed leave nothing behind that keeps the next one from being formed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from paceline.comm.sockets import Connections
from paceline.errors import PeerError
from paceline.survive import groups
from paceline.survive.groups import Groups
from paceline.survive.link import Generation


def test_a_worker_that_failed_to_form_a_group_calls_the_next_one_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups, "BUILD_TIMEOUT", timedelta(milliseconds=50))
    maker = Groups(HashStore(), Connections(), "gloo", timedelta(seconds=5))
    for number in (1, 2):
        meeting = maker.meet(Generation(number, rank=0, size=2))
        with pytest.raises(PeerError, match=f"Generation {number} could not form"):
            maker.make(meeting)
    maker.make(maker.meet(Generation(3, rank=0, size=1)))
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        maker.leave()
