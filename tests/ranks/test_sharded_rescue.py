"""A rank that dies in an update that is shared out takes nothing along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sharded_loops import Loop, groups
from test_sharded_update import OPTIMIZERS
from torch import Tensor

from paceline import World
from paceline.errors import PeerError
from paceline.testing import assert_replicas_equal, run_ranks
from paceline.update import find_exchanged, kept
from paceline.update.kept import KeptState

STEPS, SIZE, DEAD = 3, 3, 1
MAKERS = {**OPTIMIZERS, "groups": groups}


class Death(Exception):
    """Of one rank."""


def die(rank: KeptState, lot: int) -> None:
    """Leave the lot that is being stepped in pieces."""
    for state in rank._kept:
        for value in state.values():
            if any(value.data_ptr() == live.data_ptr() for live in rank._copied[lot][0]):
                value.fill_(1e9)
    raise Death


def whole_state(loop: Loop) -> dict[str, Tensor]:
    named = {id(param): name for name, param in loop.model.named_parameters()}
    return {
        f"{named[id(param)]} {key}": torch.as_tensor(value).clone()
        for param, state in loop.optimizer.state.items()
        for key, value in state.items()
    }


def train(world: World, name: str, moment: str) -> dict[str, Any] | None:
    """Three steps, in the last of which a rank dies; what those that are left have then."""
    loop = Loop(world, True, lambda m: MAKERS[name](m if name == "groups" else m.parameters()))
    exchanged: Any = find_exchanged(loop.optimizer)
    exchanged.is_kept = True
    for _ in range(STEPS - 1):
        loop.step()
    own: KeptState = exchanged._shares.kept
    assert len(own.lots) > 3
    if world.rank == DEAD and moment != "never":
        last = len(own.lots) - 1
        lot = {"first": 0, "middle": last // 2, "last": last}.get(moment)
        is_entered = moment == "entered"
        opened, entered, closed = own.open, own.begin, own.close

        def on_open(number: int) -> None:
            opened(number)
            if number == lot:
                die(own, number)

        def on_close(number: int) -> None:
            closed(number)
            if moment == "stepped" and number == last:
                raise Death

        def on_begin() -> None:
            if is_entered:
                raise Death
            entered()

        own.open, own.begin, own.close = on_open, on_begin, on_close  # type: ignore[method-assign]
    try:
        loop.step()
    except Death:
        own.open, own.begin, own.close = opened, entered, closed  # type: ignore[method-assign]
        exchanged.withdraw()
        return None
    if moment == "never":
        exchanged.make_whole()
    return {**loop.params(), **whole_state(loop)}


@pytest.mark.parametrize("moment", ["entered", "first", "middle", "last", "stepped"])
@pytest.mark.parametrize("name", ["groups", "fused adamw", "nadam", "momentum"])
def test_those_who_are_left_finish_the_step_of_a_rank_that_dies_in_it(
    name: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "LOT_NUMEL", 512)
    left = [each for each in run_ranks(SIZE, train, name, moment) if each is not None]
    assert len(left) == SIZE - 1
    assert_replicas_equal([*left, run_ranks(SIZE, train, name, "never")[0]])


@pytest.mark.parametrize("name", ["groups", "adagrad"])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_state_is_whole_again_after_a_death_between_two_steps(name: str, steps: int) -> None:
    def body(world: World) -> list[dict[str, Tensor]] | None:
        loop = Loop(world, True, lambda m: MAKERS[name](m if name == "groups" else m.parameters()))
        exchanged: Any = find_exchanged(loop.optimizer)
        exchanged.is_kept = True
        for _ in range(steps):
            loop.step()
        saved = loop.optimizer.state_dict()["state"]  # all meet
        if world.rank == DEAD:
            exchanged.withdraw()
            return None
        exchanged.rescue()
        assert exchanged.is_whole
        params = [param for group in loop.optimizer.param_groups for param in group["params"]]
        rescued = {number: loop.optimizer.state[param] for number, param in enumerate(params)}
        return [
            {f"{number} {key}": state[number][key] for number in saved for key in saved[number]}
            for state in (saved, rescued)
        ]

    for end in run_ranks(SIZE, body):
        if end is not None:
            assert_replicas_equal(end)


def test_nobody_steps_unless_all_can() -> None:
    def body(world: World) -> bool:
        loop = Loop(world, True)
        exchanged: Any = find_exchanged(loop.optimizer)
        exchanged.is_kept = True
        loop.step()
        before = loop.params()
        loop.optimizer.zero_grad()
        loop.backward()
        if world.rank == DEAD:
            exchanged.withdraw()
            return True
        with pytest.raises(PeerError):
            loop.optimizer.step()
        assert_replicas_equal([before, loop.params()])
        exchanged.rescue()
        return bool(exchanged.is_whole)

    assert all(run_ranks(SIZE, body))
