"""Evaluation counts every sample once, and leaves no trace in the training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, assert_same, mlp, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from paceline.errors import DesyncError, UsageError
from paceline.files.run_folder import RunFolder, read_events
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks, seeded


def make(net: nn.Module, world: World | None = None, **arguments: Any) -> Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    arguments = {"global_batch": 8, "epochs": 1, "options": QUIET, "shards": 2, **arguments}
    return Run(net, optimizer, Rows(), world=world, **arguments)


def score_with(run: Run, seen: list[int] | None = None, form: str = "mean") -> Any:
    def score(batch: Any) -> dict[str, Any]:
        x, y, indices = batch
        if seen is not None:
            seen.extend(indices.tolist())
        out = run.model(x)
        right, rows = (out.argmax(1) == y).double(), len(y)
        if form == "sum":
            loss = F.cross_entropy(out, y, reduction="sum")
            return {"loss": (loss, rows), "accuracy": (right.sum(), torch.tensor(rows))}
        if form == "items":
            return {"loss": (F.cross_entropy(out, y), rows), "accuracy": (right.mean(), rows)}
        return {"loss": F.cross_entropy(out, y), "accuracy": right.mean().item()}

    return score


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("count", "form", "reduction"),
    [(1, "mean", None), (7, "sum", "sum"), (23, "items", "mean"), (50, "mean", "mean")],
)
def test_every_sample_is_counted_once(
    size: int, count: int, form: str, reduction: Literal["mean", "sum"] | None
) -> None:
    data, net = Rows(count), mlp()
    with torch.no_grad():
        out = net(data.x)
    expected = {
        "loss": F.cross_entropy(out, data.y).item(),
        "accuracy": (out.argmax(1) == data.y).double().mean().item(),
    }

    def body(world: World) -> tuple[dict[str, float], list[int]]:
        seen: list[int] = []
        run = make(mlp(), world)
        scores = run.evaluate(score_with(run, seen, form), data, reduction=reduction)
        return scores, seen

    results = run_ranks(size, body)
    for scores, _ in results:
        assert scores == pytest.approx(expected, rel=1e-5)
        assert scores == results[0][0]
    assert sorted(index for _, seen in results for index in seen) == list(range(count))


def test_a_stream_is_counted_once_too() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = Rows(21)
            return (data[index] for index in range(21))

    def body(world: World) -> list[int]:
        seen: list[int] = []
        run = make(mlp(), world)
        run.evaluate(score_with(run, seen), Stream(), batch=4)
        return seen

    assert sorted(i for seen in run_ranks(3, body) for i in seen) == list(range(21))


def test_layers_are_back_in_their_own_modes() -> None:
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)))
    net[0].eval()
    run = make(net)
    modes = []

    def score(batch: Any) -> dict[str, Any]:
        modes.append(any(layer.training for layer in net.modules()))
        assert not torch.is_grad_enabled()
        return {"rows": 1}

    run.evaluate(score)
    assert not any(modes)
    assert [layer.training for layer in net.modules()] == [True, False, True, True]


def test_evaluating_in_between_changes_nothing_about_the_training() -> None:
    def body(evaluates: bool) -> dict[str, Any]:
        net = seeded(nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES)))
        run = make(net)
        drawn = []
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if evaluates:
                run.evaluate(lambda _: {"noise": torch.rand(())})
            drawn.append(torch.rand(1))
        return {**net.state_dict(), "drawn": torch.cat(drawn)}

    assert_same(body(True), body(False), rtol=0, atol=0)


class Counting(nn.Module):
    """Writes down what it sees, in evaluation too; one of its buffers grows."""

    passes: Tensor
    seen: Tensor
    grown: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("passes", 1), ("seen", 2**15), ("grown", 2)):
            self.register_buffer(name, torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.seen.data[:] = x[0, 0].detach()
        if not self.training:
            self.grown = torch.cat([self.grown, x[:, 0]])
        return x * (1 + 0.01 * self.passes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_buffers_are_as_before_an_evaluation_on_every_worker(size: int) -> None:
    def body(world: World, evaluates: bool = True) -> dict[str, Any]:
        net = seeded(nn.Sequential(Counting(), nn.Linear(WIDTH, CLASSES)))
        run = make(net, world, shards=3)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if evaluates:
                run.evaluate(score_with(run), batch=7)
        return dict(net.state_dict())

    expected = run_ranks(1, lambda world: body(world, evaluates=False))[0]
    for each in run_ranks(size, body):
        assert_same(each, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (3.0, "scores are 3.0"),
        ({"accuracy": "good"}, "and not a number"),
        ({"accuracy": (5, 8)}, r"\(5, 8\)"),
    ],
)
def test_scores_that_could_mean_anything_are_refused(scores: Any, message: str) -> None:
    run = make(mlp())
    with pytest.raises(UsageError, match=message):
        run.evaluate(lambda _: scores)
    with pytest.raises(UsageError, match="a function that scores a batch, not Rows"):
        run.evaluate(Rows(), lambda _: scores)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"reduction.* 'none'"):
        run.evaluate(lambda _: scores, reduction="none")  # type: ignore[arg-type]


def test_a_mean_over_nothing_counts_for_nothing() -> None:
    """Of a batch that is all padding, torch's losses make NaN."""

    def score(batch: Any) -> dict[str, Any]:
        x, y, _ = batch
        loss = F.cross_entropy(run.model(x), y, ignore_index=0)
        return {"loss": (loss, (y != 0).sum())}

    run, data = make(mlp()), Rows(50)
    with torch.no_grad():
        expected = F.cross_entropy(run.model(data.x), data.y, ignore_index=0).item()
    got = run.evaluate(score, data, reduction="mean", batch=1)
    assert got == {"loss": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_stream_is_trained_on_as_a_dataset_in_its_order(size: int, drop_last: bool) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = Rows()
            return (data[index] for index in range(len(data)))

    plain = RunOptions(progress="quiet", shuffle=False, drop_last=drop_last)
    expected = train(options=plain, shards=3)

    def body(world: World) -> Any:
        return train(world, dataset=Stream(), options=plain, shards=3)

    workers = run_ranks(size, body)
    assert sorted(workers[0].losses) == sorted(expected.losses)
    assert sorted(e for each in workers for e in each.ledger) == sorted(expected.ledger)
    assert_same(workers[0].parameters, expected.parameters, rtol=1e-4, atol=1e-6)


def test_a_stream_goes_on_in_mid_epoch(tmp_path: Any) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = Rows()
            for index in range(len(data)):
                x, y, _ = data[index]
                yield x + torch.rand(()) * 0.1, y, index

    whole = train(dataset=Stream(), shards=2)
    begun = train(dataset=Stream(), shards=2, folder=tmp_path / "run", stop_after=9)
    ended = train(dataset=Stream(), folder=tmp_path / "run")
    assert begun.ledger + ended.ledger == whole.ledger
    assert_same(ended.parameters, whole.parameters, rtol=0, atol=0)
    loaded = train(dataset=Stream(), shards=2, loader_workers=2)
    assert_same(loaded.parameters, whole.parameters, rtol=0, atol=0)


@pytest.mark.parametrize("batch", [0, -1, 2.5])
def test_an_impossible_batch_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match=rf"batch.* {re.escape(repr(batch))}"):
        make(mlp()).evaluate(lambda _: {"rows": 1}, batch=batch)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_weights_of_metrics_may_be_tensors(size: int, tmp_path: Path) -> None:
    data = Rows(21)

    def body(world: World) -> None:
        net = mlp()
        run = Run(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            data,
            global_batch=8,
            epochs=1,
            shards=3,
            folder=tmp_path / "run",
            world=world,
            options=QUIET,
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
                    rows = torch.tensor(len(y))
                    run.log("label", y.double().mean(), weight=rows)
                    run.log("label as a number", y.double().mean().item(), weight=rows)

    run_ranks(size, body)
    (epoch,) = [e for e in read_events(RunFolder(tmp_path / "run")) if e["kind"] == "epoch"]
    mean = pytest.approx(data.y.double().mean().item())
    assert epoch["metrics"]["label"] == mean
    assert epoch["metrics"]["label as a number"] == mean


def area_under_curve(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """How often a positive sample is scored above a negative one."""
    above = scores[labels == 1][:, None] - scores[labels != 1][None, :]
    return float(((above > 0).double() + 0.5 * (above == 0).double()).mean())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [9, 23])
def test_what_is_no_mean_is_computed_from_all_predictions_in_their_order(
    size: int, count: int
) -> None:
    data, net = Rows(count), mlp()
    with torch.no_grad():
        expected = area_under_curve(net(data.x)[:, 1], data.y)

    def body(world: World) -> tuple[dict[str, float], list[Any]]:
        run, calls = make(mlp(), world), []

        def score(batch: Any) -> Any:
            x, y, indices = batch
            return run.model(x)[:, 1], y, [f"row {index}" for index in indices.tolist()]

        def collect(scores: Any, labels: Any, names: list[str]) -> dict[str, float]:
            calls.append(names)
            return {"auc": area_under_curve(scores, labels)}

        return run.evaluate(score, data, batch=4, collect=collect), calls

    results = run_ranks(size, body)
    for scores, _ in results:
        assert scores == results[0][0]
        assert scores["auc"] == pytest.approx(expected, rel=1e-5)
    assert [calls for _, calls in results] == [
        [[f"row {index}" for index in range(count)]],
        *([[]] * (size - 1)),
    ]


def test_an_object_of_torchmetrics_is_given_all_predictions_at_once() -> None:
    class Hits:
        """What torchmetrics' classes have, and no more."""

        def __init__(self) -> None:
            self.reset()

        def reset(self) -> None:
            self.updates: list[int] = []
            self.right = 0.0

        def update(self, out: torch.Tensor, y: torch.Tensor) -> None:
            self.updates.append(len(y))
            self.right += float((out.argmax(1) == y).sum())

        def compute(self) -> torch.Tensor:
            return torch.tensor(self.right / self.updates[0] if len(self.updates) == 1 else -1.0)

    data, net = Rows(23), mlp()
    with torch.no_grad():
        expected = (net(data.x).argmax(1) == data.y).double().mean().item()

    def body(world: World) -> dict[str, float]:
        run = make(mlp(), world)
        return run.evaluate(lambda b: (run.model(b[0]), b[1]), data, batch=5, collect=Hits())

    for scores in run_ranks(2, body):
        assert scores == pytest.approx({"Hits": expected})


def test_what_collect_draws_follows_the_step_and_leaves_no_trace() -> None:
    run = make(mlp())

    def evaluate() -> dict[str, float]:
        return run.evaluate(
            lambda batch: batch[0], Rows(9), collect=lambda _: {"drawn": torch.rand(()).item()}
        )

    before = torch.get_rng_state()
    first = evaluate()
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)
    assert evaluate() == first


@pytest.mark.parametrize(
    ("score", "collect", "part"),
    [
        (lambda b: {"out": b[0][:1]}, lambda out: {}, "1 items for a batch of 4"),
        (lambda b: b[0].sum(), lambda out: {}, r"tensor\("),
        (lambda b: 3.0, lambda out: {}, "3.0"),
        (lambda b: b[0], lambda out: 0.5, "0.5"),
        (lambda b: b[0], lambda out: {"auc": "high"}, "high"),
    ],
)
def test_predictions_and_results_that_make_no_sense_are_refused(
    score: Any, collect: Any, part: str
) -> None:
    run = make(mlp())
    with pytest.raises(UsageError, match=part):
        run.evaluate(score, Rows(8), batch=4, collect=collect)


@pytest.mark.parametrize(
    ("of_rank", "where"),
    [(lambda rank: Rows(7 + rank), "7 samples on rank 0, and 8 on rank 1"), (None, "Sample 0 ")],
)
def test_a_dataset_that_is_another_one_on_each_worker_is_refused(of_rank: Any, where: str) -> None:
    def body(world: World) -> None:
        run = make(mlp(), world)
        dataset = Rows(7) if of_rank is None else of_rank(world.rank)
        if of_rank is None and world.rank:
            dataset.y = (dataset.y + 1) % CLASSES
        run.evaluate(score_with(run), dataset)

    for error in run_ranks(3, body, return_exceptions=True):
        assert isinstance(error, DesyncError), error
        assert where in str(error)


class OfEpoch(Rows):
    """Rows that know which epoch it is, as those of an augmented dataset do."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_evaluating_the_dataset_that_is_trained_on_leaves_it_in_its_epoch() -> None:
    def body(world: World) -> list[tuple[int, int]]:
        net, data, seen = mlp(), OfEpoch(16), []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run = Run(net, optimizer, data, global_batch=8, epochs=2, options=QUIET, world=world)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    seen.append((step.epoch, data.epoch))
                    step.backward(F.cross_entropy(run.model(x), y))
            if step.number == 3:
                run.evaluate(score_with(run), data)
        return seen

    for seen in run_ranks(2, body):
        assert seen == [(0, 0), (0, 0), (1, 1), (1, 1)]
