"""A batch is cut anew for more workers only where that changes nothing but who computes what.

In processes, because threads share torch's generators.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from paceline import Run, RunOptions
from paceline.group.world import World
from paceline.testing import run_processes, seeded
from tests.runs import Told
from tests.sentences import says

SIZES = (2, 3)
STEPS_EACH = 3
X = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) * 2).long() % 3


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(X, Y, strict=True)


class Noisy(TensorDataset):
    """Draws when it is read."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x), y


def cross_entropy(run: Run, step: Any) -> None:
    for x, y in step.batches():
        step.backward(F.cross_entropy(run.model(x), y))


def of_items(run: Run, step: Any) -> None:
    """The mean over rows of the first two classes, said."""
    for x, y in step.batches():
        loss = F.cross_entropy(run.model(x), y, ignore_index=2, reduction="sum")
        step.backward(loss, items=(y != 2).sum(), reduction="sum")


def weighted(run: Run, step: Any) -> None:
    """A mean by weights that `items=` does not say: in two shards it is another one."""
    for x, y in step.batches():
        weight = torch.tensor([1.0, 2.0, 5.0], dtype=x.dtype)
        step.backward(F.cross_entropy(run.model(x), y, weight=weight))


def compared(run: Run, step: Any) -> None:
    """Rows are told from the others of their shard."""
    for x, _ in step.batches():
        out = run.model(x)
        step.backward(F.cross_entropy(out @ out.T, torch.arange(len(out))))


def tell_apart(one: Tensor, other: Tensor) -> Tensor:
    return F.cross_entropy(one @ other.T, torch.arange(len(one)))


def joint(run: Run, step: Any) -> None:
    step.joint(lambda batch: (run.model(batch[0]), run.model(2 * batch[0])), tell_apart)


def layers(*between: nn.Module) -> nn.Module:
    first = nn.Linear(6, 8, bias=False)  # before a BatchNorm its gradient would be rounding
    return seeded(nn.Sequential(first, *between, nn.Tanh(), nn.Linear(8, 3)).double())


class Looked(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x > 0) + 2 * torch.arange(6)).sum(1)  # type: ignore[no-any-return]


CUT_ANEW: dict[str, dict[str, Any]] = {
    "plain": {},
    "items": {"loss": of_items},
    "joint": {"loss": joint},
    "stream": {"data": Stream},
    "sparse": {"net": lambda: seeded(Looked()), "optimizer": torch.optim.SGD},
    "frozen statistics": {"between": lambda: nn.BatchNorm1d(8).eval()},
    "shared out": {"options": {"update": "sharded"}},
    "merged": {"options": {"merge_shards": True, "clip_norm": 0.5}},
    "loader processes and pieces": {"arguments": {"loader_workers": 1}, "options": {"fit": 2}},
}
STAY: dict[str, dict[str, Any]] = {
    "dropout": {"between": lambda: nn.Dropout(0.2)},
    "batch norm": {"between": lambda: nn.BatchNorm1d(8)},
    "batch norm without statistics": {
        "between": lambda: nn.BatchNorm1d(8, track_running_stats=False)
    },
    "weighted": {"loss": weighted},
    "compared": {"loss": compared},
    "augmented": {"data": lambda: Noisy(X, Y)},
    "augmented by processes": {"data": lambda: Noisy(X, Y), "arguments": {"loader_workers": 1}},
    "same bits": {"options": {"same_bits": True}},
    "said": {"arguments": {"shards": 1}},
}
CASES = {**CUT_ANEW, **STAY}


@contextmanager
def forking() -> Iterator[None]:
    """Loader processes are forked, as they are where nobody chooses: others import torch first."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


@forking()
def train(name: str, folder: str, world: World | None, stop_after: int) -> dict[str, Any]:
    case, told = CASES[name], Told()
    between = case.get("between", nn.Identity)()
    net = case["net"]() if "net" in case else layers(between)
    if not between.training:
        between.eval()
    run = Run(
        net,
        case.get("optimizer", torch.optim.AdamW)(net.parameters(), lr=0.02),
        case.get("data", lambda: TensorDataset(X, Y))(),
        global_batch=9,
        epochs=3,
        world=world,
        folder=folder.replace(" ", "-"),
        sinks=[told],
        options=RunOptions(progress="quiet", **case.get("options", {})),
        **case.get("arguments", {}),
    )
    for step in run:
        with step:
            case.get("loss", cross_entropy)(run, step)
        if step.number == stop_after:
            run.save()
            break
    lines = [line for _, _, lines in told.of("start") for line in lines]
    said = [*lines, *(message.text for message in told.of("message"))]
    return {"model": dict(net.state_dict()), "shards": run.shards, "said": said}


def continue_at_sizes(world: World, folder: str) -> dict[str, list[dict[str, Any]]]:
    """By case, a few steps on each number of workers, of which the first ranks make a world."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES}
    for turn, size in enumerate(SIZES, start=2):
        group = dist.new_group(list(range(size)))
        part = World(rank=world.rank, size=size, group=group)
        for name in CASES:
            if world.rank < size:
                found[name].append(train(name, f"{folder}/{name}", part, turn * STEPS_EACH))
    return found


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By case, what is left of 1, 2, 3 and 1 workers, and of one that trained all of it."""
    folder = tmp_path_factory.mktemp("chains")
    first = {name: train(name, f"{folder}/{name}", None, STEPS_EACH) for name in CASES}
    later = run_processes(3, continue_at_sizes, str(folder), timeout_s=240)[0]
    chains = {}
    for name in CASES:
        last = train(name, f"{folder}/{name}", None, 0)
        whole = train(name, f"{folder}/whole {name}", None, 0)
        chains[name] = [first[name], *later[name], last, whole]
    return chains


@pytest.mark.parametrize("name", CASES)
def test_any_chain_of_sizes_trains_what_one_worker_does(
    name: str, chains: dict[str, list[dict[str, Any]]]
) -> None:
    *_, last, whole = chains[name]
    for key, tensor in whole["model"].items():
        torch.testing.assert_close(last["model"][key], tensor, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CUT_ANEW)
def test_a_batch_is_cut_anew_for_every_worker_where_that_changes_nothing(
    name: str, chains: dict[str, list[dict[str, Any]]]
) -> None:
    assert [each["shards"] for each in chains[name]] == [1, 2, 3, 3, 1]
    for before, each in zip((1, 2), chains[name][1:3], strict=True):
        (text,) = [text for text in each["said"] if "shards" in text]
        assert says(text, before + 1, f"shards={before}") or says(text, before + 1, before)


@pytest.mark.parametrize("name", STAY)
def test_a_batch_stays_as_it_is_cut_where_another_cut_would_train_something_else(
    name: str, chains: dict[str, list[dict[str, Any]]]
) -> None:
    assert [each["shards"] for each in chains[name]] == [1] * 5
    for size, each in zip(SIZES, chains[name][1:3], strict=True):
        (text,) = [text for text in each["said"] if "workers share" in text]
        assert says(text, size, 1, size - 1)
