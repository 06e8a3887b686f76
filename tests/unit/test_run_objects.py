"""The script's objects, as they were before a block that begins again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.run.objects import MOST_BYTES, MOST_LEAVES, StateObjects
from paceline.telemetry import Message


class Held:
    def __init__(self, **values: Any) -> None:
        self.values, self.loads = values, 0

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values, self.loads = state, self.loads + 1


@pytest.mark.parametrize("size", [1, 5])
def test_what_has_changed_is_put_back_however_often(size: int) -> None:
    held, same = Held(n=1, seen=[1], mean=torch.zeros(size)), Held(n=1)
    objects = StateObjects({"held": held, "same": same})
    kept = objects.keep()
    for _ in range(3):
        held.values["n"] += 1
        held.values["seen"].append(2)
        held.values["mean"] += 1
        objects.put_back(kept, 4)
        assert held.values["n"] == 1
        assert held.values["seen"] == [1]
        assert held.values["mean"].tolist() == [0.0] * size
    assert (held.loads, same.loads) == (3, 0)


def test_a_large_one_is_not_copied_and_a_change_of_it_is_told_once() -> None:
    large = nn.Linear(MOST_BYTES // 4 + 1, 1, bias=False)
    objects = StateObjects({"net": large, "lists": Held(seen=list(range(10_000)))})
    told: list[Message] = []
    objects.tell = told.append
    assert objects.keep() == {}  # where nothing is done again
    objects.looks_at_large = True
    kept = objects.keep()
    objects.put_back(kept, 4)
    with torch.no_grad():
        large.weight.add_(1)
    for _ in range(2):
        objects.put_back(kept, 4)
    assert large.weight.min() > 0
    (message,) = told
    assert message.level == "warning"
    assert "net" in message.text
    assert "4" in message.text


def test_one_that_has_become_large_in_the_block_is_put_back() -> None:
    held = Held(seen=[1])
    objects = StateObjects({"held": held})
    objects.looks_at_large = True
    told: list[Message] = []
    objects.tell = told.append
    kept = objects.keep()
    held.values["seen"] = list(range(MOST_LEAVES + 1))
    objects.keep()
    objects.put_back(kept, 4)
    assert (held.values, told) == ({"seen": [1]}, [])
