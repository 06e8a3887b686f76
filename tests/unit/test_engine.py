"""What an engine is, and what is refused as one."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from paceline.ddp import DistributedDataParallel, check_engine
from paceline.ddp.engine import MEMBERS
from paceline.errors import UsageError
from paceline.testing import run_ranks


class Complete:
    """Has every member of an engine."""

    module = membership = identity = has_news = None

    def begin_step(self, number: int) -> None: ...

    def no_sync(self) -> None: ...

    def weigh(self, weight: float, shard: int, of_shard: float) -> None: ...

    def take_part(self) -> None: ...

    def on_generation(self) -> None: ...


def test_an_object_with_every_member_is_an_engine() -> None:
    engine = Complete()
    assert check_engine(engine) is engine  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("name", MEMBERS)
def test_what_lacks_a_member_is_refused_by_name(name: str) -> None:
    members = {n: value for n, value in vars(Complete).items() if n != name}
    with pytest.raises(UsageError, match=rf"has no {name}(\(\))?\."):
        check_engine(type("Incomplete", (), members)())


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (nn.Linear(1, 1), r"has no module, membership, identity, has_news, begin_step\(\)"),
        (None, "engine.* None, which has no module"),
        (Complete, "class Complete"),
        (type("Odd", (Complete,), {"weigh": 1.0})(), r"has no weigh\(\)"),
    ],
)
def test_what_is_not_an_engine_is_refused(value: object, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        check_engine(value)


class Namesakes(nn.Linear):
    """Its attributes are called as the engine's members are."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.identity = "mine"
        self.membership = "gym"

    def weigh(self, _weight: float) -> str:
        return "the module's"


def test_the_engines_own_members_win_over_the_models() -> None:
    def body(world: Any) -> list[Any]:
        model = DistributedDataParallel(Namesakes(), process_group=world.group)
        check_engine(model)
        model.identity = 5
        found = [model.identity, model.reducer.agreement.identity, model.weigh(1.0)]
        return [*found, model.membership.size, model.module.identity, model.module.membership]

    assert run_ranks(2, body) == [[5, 5, None, 2, "mine", "gym"]] * 2
