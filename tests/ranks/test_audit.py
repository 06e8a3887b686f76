"""`RunOptions(audit=)`: shards that two workers compute, and the one that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from runs import Rows, mlp
from torch import Tensor, nn

from paceline.ddp.audit import Audit, Claim, find_right
from paceline.errors import AuditError, PeerError, UsageError
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks, seeded
from tests.faults.flip_trials import STEPS, Left, normed, plan, run_trials, train
from tests.faults.flips import WHERE, Where


def assert_same(found: Left, expected: Left) -> None:
    assert found.error is None
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name
    for one, other in zip(found.told.of("epoch"), expected.told.of("epoch"), strict=True):
        assert one.metrics == other.metrics


@pytest.mark.parametrize("build", [mlp, normed])
def test_an_audit_changes_nothing_and_finds_nothing_where_nothing_is_wrong(
    build: Callable[[], nn.Module],
) -> None:
    expected = train(None, build, audit=0.0)
    assert expected.steps == STEPS
    for size in (1, 2, 3, 4):
        for share in (0.3, 1.0):
            ranks = run_ranks(size, lambda world, s=share: train(world, build, audit=s))
            assert_same(ranks[0], expected)
            assert not any(rank.findings for rank in ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["gradient", "activation"])
@pytest.mark.parametrize("breaks", [False, True])
def test_what_flips_once_is_named_and_never_applied(size: int, where: Where, breaks: bool) -> None:
    expected, culprit = train(None, audit=0.0), size - 1
    flip = culprit, where, {"step": 3, "element": 5, "bit": 22}
    ranks = run_ranks(size, lambda world: train(world, flip=flip, breaks=breaks))
    assert_same(ranks[0], expected)
    [found] = ranks[0].findings
    assert (found["step"], found["culprit"], found["parameter"]) == (3, culprit, "0.weight")
    assert culprit not in found["others"] or size < 3


@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("where", WHERE)
def test_a_worker_that_stays_wrong_is_named_on_all_and_its_step_not_applied(
    size: int, where: Where
) -> None:
    culprit = 1
    flip = culprit, where, {"step": 4, "stays": where != "weight", "bit": 22}
    ranks = run_ranks(size, lambda world: train(world, flip=flip))
    for rank, left in enumerate(ranks):
        assert isinstance(left.error, AuditError if rank == culprit else PeerError)
        assert f"rank {culprit}" in str(left.error)
        assert left.steps == 3
    [found] = ranks[0].findings
    assert (found["step"], found["culprit"]) == (4, culprit)


def test_of_two_workers_that_stay_different_nobody_is_named() -> None:
    flip = 1, "gradient", {"step": 4, "stays": True}
    for left in run_ranks(2, lambda world: train(world, flip=flip)):  # type: ignore[arg-type]
        assert isinstance(left.error, AuditError)
        assert left.error.ends_run
        assert left.steps == 3


def test_flips_anywhere_are_caught_before_they_are_applied() -> None:
    found = run_trials(plan(18, seed=1))
    assert sum(found.values()) == 18
    assert {where for where, *_ in found} == set(WHERE)


def test_a_weight_that_no_gradient_depends_on_is_caught() -> None:
    class Rare(nn.Sequential):
        """Rows of a table that no batch reads."""

        def __init__(self) -> None:
            super().__init__(nn.Embedding(9, 4), mlp())

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self[1](x) + self[0](x[:, 0].long().clamp(0, 0)).sum(1, keepdim=True)
            return out

    flip: Any = 2, "weight", {"step": 3, "element": 30, "bit": 0}
    ranks = run_ranks(3, partial(train, build=lambda: seeded(Rare()), flip=flip))
    [found] = ranks[0].findings
    assert (found["step"], found["culprit"], found["parameter"]) == (3, 2, "0.weight")
    assert "parameters" in found["text"]
    assert [left.steps for left in ranks] == [2, 2, 2]


def test_the_choice_is_a_function_of_seed_and_step() -> None:
    audit, again = (Audit(share=0.25, seed=3, shards=8) for _ in range(2))
    chosen = [audit.chosen(step) for step in range(1, 2001)]
    assert chosen == [again.chosen(step) for step in range(1, 2001)]
    assert abs(sum(map(len, chosen)) / 16000 - 0.25) < 0.03
    assert chosen != [Audit(share=0.25, seed=4, shards=8).chosen(s) for s in range(1, 2001)]
    for size in (2, 3, 5):
        for step in range(1, 50):
            dealt = [audit.seconds_of(step, rank, size) for rank in range(size)]
            assert sorted(v for mine in dealt for v in mine) == audit.chosen(step)
            assert all(v % size != rank for rank, mine in enumerate(dealt) for v in mine)
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_right_is_what_two_workers_have() -> None:
    def judge(text: str, size: int) -> str | None:
        claims = [Claim(int(word[0]), [word[1]], word.endswith("!")) for word in text.split()]
        found = find_right(claims, size)
        return None if found is None else found[0]

    assert judge("0x 1g 0x 2g", 3) == "g"
    assert judge("0x 1g 0g 2g", 3) == "g"
    assert judge("0g 1x 0g 2g", 3) == "g"
    assert judge("0x 1g 0g 1g", 2) == "g"
    assert judge("0x 1g 0x 1g", 2) is None
    assert judge("0x 1g 0y 1g", 2) == "g"
    assert judge("0x 1g 0y 1z", 2) is None
    assert judge("0x 1g! 0x 1g!", 2) == "g"
    assert judge("0x! 1g! 0x! 1g!", 2) is None
    assert judge("0x 1g 0x 2y", 3) is None
    assert judge("0x 0g 0g 0g", 1) == "g"
    assert judge("0x 0g 0x 0g", 1) is None


@pytest.mark.parametrize(
    "options", [{"audit": 0.1}, {"audit": 2, "same_bits": True}, {"audit": -1}]
)
def test_an_audit_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="audit"):
        RunOptions(**options)


def test_an_audit_of_what_cannot_be_read_by_number_is_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Rows(30))

    net = mlp()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="Stream"):
        Run(net, sgd, Stream(), global_batch=6, epochs=1,
            options=RunOptions(same_bits=True, audit=1.0))  # fmt: skip
