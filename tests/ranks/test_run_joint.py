"""`step.joint()`: a loss over the whole batch, the same at any number of workers and shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import QUIET, WIDTH, Rows
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.ddp import NaiveEngine
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_processes, run_ranks, seeded

BATCH = 12


class Towers(nn.Module):
    """Two encoders and a temperature, as CLIP has them; one with statistics, both with dropout."""

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        middle: nn.Module = nn.BatchNorm1d(8) if norm else nn.Tanh()
        # A bias before a normalisation has no gradient but rounding, of which AdamW makes a step.
        first = nn.Linear(WIDTH, 8, bias=not norm)
        self.left = nn.Sequential(first, middle, nn.Dropout(dropout), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(WIDTH, 4), nn.Dropout(dropout))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.left(x), dim=1), F.normalize(self.right(x.flip(1)), dim=1)


def make(**options: Any) -> Towers:
    return seeded(Towers(**options)).double()


def contrast(left: Tensor, right: Tensor, temperature: Tensor) -> Tensor:
    scores = left @ right.T / temperature.exp()
    target = torch.arange(len(left))
    return (F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)) / 2


class Doubles(Rows):
    def __getitem__(self, index: int) -> Any:
        return self.x[index].double(), index


def train(world: World | None, shards: int, *, epochs: int = 2, **given: Any) -> Any:
    arguments = {"options": QUIET, **given}
    net = make(**arguments.pop("model", {}))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    run = Run(
        *(net, optimizer, Doubles(30)),
        **{"global_batch": BATCH, "epochs": epochs, "shards": shards, "world": world, **arguments},
    )
    batches = []
    for step in run:
        rows: list[int] = []

        def encode(batch: Any, rows: list[int] = rows) -> Any:
            x, indices = batch
            if not torch.is_grad_enabled():
                rows += indices.tolist()
            return run.model(x)

        with step:
            step.joint(encode, lambda left, right: contrast(left, right, net.temperature))
        batches.append(rows)
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return state, batches


def train_by_hand(batches: list[list[int]]) -> dict[str, Tensor]:
    """The same in plain torch, on whole batches."""
    net, data = make(), Doubles(30)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    for rows in batches:
        optimizer.zero_grad()
        left, right = net(torch.stack([data[row][0] for row in rows]))
        contrast(left, right, net.temperature).backward()
        optimizer.step()
    return dict(net.state_dict())


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_one_worker_computes_what_plain_torch_computes_on_the_whole_batch() -> None:
    state, batches = train(None, shards=1)
    assert [len(rows) for rows in batches] == [12, 12, 6] * 2
    assert_close(state, train_by_hand(batches))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("shards", [3, 4])
@pytest.mark.parametrize("given", [{}, {"engine": NaiveEngine}], ids=["ddp", "naive"])
def test_neither_workers_nor_shards_change_it(size: int, shards: int, given: Any) -> None:
    expected, _ = train(None, shards=1)
    for state, _ in run_ranks(size, lambda world: train(world, shards, **given)):
        assert_close(state, expected)


def train_restless(world: World | None) -> dict[str, Tensor]:
    state, _ = train(world, shards=3, model={"dropout": 0.3, "norm": True})
    return dict(state)


def test_both_passes_draw_the_same_numbers_and_statistics_move_once() -> None:
    expected = train_restless(None)
    assert expected["left.1.num_batches_tracked"] == 6
    # In processes, because threads share the random numbers of dropout.
    for state in run_processes(2, train_restless):
        assert_close(state, expected)


def test_with_same_bits_it_is_equal_to_the_last_bit() -> None:
    options = RunOptions(progress="quiet", same_bits=True)
    alone, _ = train(None, shards=4, options=options)
    for state, _ in run_ranks(2, lambda world: train(world, 4, options=options)):
        for name, value in alone.items():
            assert torch.equal(state[name], value), name


def test_workers_without_a_shard_take_part() -> None:
    expected, _ = train(None, shards=2)
    for state, _ in run_ranks(3, lambda world: train(world, 2)):
        assert_close(state, expected)


@pytest.mark.parametrize(
    ("encode", "loss", "part"),
    [
        (lambda net, x: net(x)[0][:1], lambda e: e.sum(), "1 items for a batch of"),
        (lambda net, x: net(x)[0], lambda e: e.sum().item(), "one element"),
        (lambda net, x: net(x)[0], lambda e: e.detach().sum(), "does not depend"),
    ],
)
def test_what_makes_no_sense_is_refused(encode: Any, loss: Any, part: str) -> None:
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run(net, optimizer, Doubles(8), global_batch=4, epochs=1, options=QUIET)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    steps = iter(run)
    step = next(steps)
    with pytest.raises(UsageError, match=part), step:
        step.joint(lambda batch: encode(run.model, batch[0]), loss)
    assert_close(dict(net.state_dict()), before)


def test_a_step_to_be_recorded_says_that_it_is_not(tmp_path: Path) -> None:
    options = RunOptions(progress="quiet", trace_step=2)
    run_ranks(2, lambda world: train(world, 4, options=options, folder=tmp_path / "run"))
    said = (tmp_path / "run" / "events" / "rank0.jsonl").read_text()
    assert said.count("Step 2 is not recorded: its loss is over the whole batch.") == 1
    assert not [*tmp_path.rglob("step*.json")]
