"""One step of DistributedDataParallel, recorded on all workers at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import DistributedDataParallel, SyncBatchNorm
from paceline.comm.world import World
from paceline.record import record_step, schema, to_json
from paceline.record import step as record_module
from paceline.record.stages import Check, Stage, Trace
from paceline.testing import run_ranks, seeded

X = torch.randn(1_000, 10, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1, keepdim=True) > 0).float()
ROWS = list(range(300, 400))

Step = Callable[[Any, list[int]], Tensor]


def net(*layers: nn.Module) -> nn.Module:
    hidden = layers or (nn.ReLU(),)
    return seeded(nn.Sequential(nn.Linear(10, 32), *hidden, nn.Linear(32, 1)))


def weighted(model: Any, rows: list[int]) -> Tensor:
    """The usual step: exact for any shares."""
    with model.weighted(len(rows)):
        loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows], reduction="sum")
        loss.backward()
    return loss


def record(
    size: int,
    make: Callable[[], nn.Module] = net,
    take_step: Step = weighted,
    optimizer: Any = lambda p: torch.optim.SGD(p, lr=0.1),
    **options: Any,
) -> Trace:
    """The trace of one step, which must be the same on every rank."""

    def body(world: World) -> dict[str, Any]:
        model = DistributedDataParallel(make(), process_group=world.group)
        chosen = optimizer(model.parameters())
        rows = ROWS[world.rank :: world.size]
        with record_step(model, chosen, dataset=TensorDataset(X, Y), **options) as seen:
            seen.note_batch(rows)
            seen.note_loss(take_step(model, rows))
            chosen.step()
        assert seen.trace is not None
        return to_json(seen.trace)

    told = run_ranks(size, body)
    for other in told[1:]:
        assert {**other, "created": 0} == {**told[0], "created": 0}
    schema.from_json(json.loads(json.dumps(told[0])))
    return schema.from_json(told[0])


def check_of(*arguments: Any, **options: Any) -> Check:
    check = record(*arguments, **options).check
    assert check is not None
    return check


def shapes(stage: Stage) -> list[list[int]]:
    return [part.tensors[0].shape for part in stage.parts]


def test_the_stages_and_shapes_are_those_of_a_batch_of_100_on_two_workers() -> None:
    trace = record(2)
    assert [(stage.name, shapes(stage)) for stage in trace.stages] == [
        ("data", [[1_000, 10]]),
        ("sampler", [[50], [50]]),
        ("batch", [[50, 10], [50, 10]]),
        ("forward", [[50, 1], [50, 1]]),
        ("loss", [[], []]),
        ("backward", [[385], [385]]),
        ("buckets", [[385 + 4 + 4]]),
        ("all-reduce", [[385], [385]]),
        ("update", [[385], [385]]),
    ]
    assert trace.stages[6].parts[0].text == "2.bias to 0.weight, then 8 control numbers"
    for stage in trace.stages[3:6]:
        assert stage.seconds is not None
        assert all(part.seconds is not None for part in stage.parts)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_step_is_the_same_as_in_one_process_on_the_whole_batch(size: int) -> None:
    check = check_of(size)
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.difference is not None
    assert check.difference < 1e-5
    assert check.is_equal_on_all is (None if size == 1 else True)


def test_a_step_without_synchronisation_is_noticed() -> None:
    def local(model: Any, rows: list[int]) -> Tensor:
        with model.no_sync():
            loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows])
            loss.backward()
        return loss

    check = check_of(2, take_step=local)
    assert check.is_same is False
    assert check.is_equal_on_all is False
    assert check.difference is not None
    assert check.difference > 1e-3
    assert check.text.startswith("NOT the same as one process on the whole batch")


def mean(model: Any, rows: list[int]) -> Tensor:
    """A step that forgets that workers may have different numbers of rows."""
    loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows])
    loss.backward()
    return loss


@pytest.mark.parametrize(("rows", "is_same"), [([50, 50], True), ([5, 50], False)])
def test_a_mean_of_means_over_uneven_shares_is_noticed(rows: list[int], is_same: bool) -> None:
    def body(world: World) -> Check | None:
        model = DistributedDataParallel(net(), process_group=world.group)
        own = ROWS[world.rank :: 2][: rows[world.rank]]
        loss_fn = F.binary_cross_entropy_with_logits
        with record_step(model, loss_fn=loss_fn) as seen:
            seen.note_loss(mean(model, own), targets=Y[own])
        assert seen.trace is not None
        return seen.trace.check

    check = run_ranks(2, body)[0]
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", is_same)
    assert ("5 and 50 rows" in check.reason) is not is_same
    assert check.loss is not None
    assert (check.loss < 1e-5) is is_same


def test_the_loss_of_the_whole_batch_is_compared_where_it_is_known() -> None:
    def body(world: World) -> Check | None:
        model = DistributedDataParallel(net(), process_group=world.group)
        own = ROWS[world.rank :: 3]
        with record_step(model, loss_fn=F.binary_cross_entropy_with_logits) as seen:
            seen.note_loss(weighted(model, own), targets=Y[own])
        assert seen.trace is not None
        return seen.trace.check

    check = run_ranks(3, body)[0]
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.loss is not None
    assert check.loss < 1e-6


def test_one_worker_that_ends_with_other_weights_is_noticed() -> None:
    def spoil(model: Any, rows: list[int]) -> Tensor:
        loss = weighted(model, rows)
        if model.process_group.rank() == 1:
            model.module[0].bias.grad.mul_(2)
        return loss

    check = check_of(2, take_step=spoil)
    assert check.is_equal_on_all is False


def test_watching_changes_no_bit_of_the_result() -> None:
    def body(world: World, watches: bool) -> list[Tensor]:
        model = DistributedDataParallel(net(), process_group=world.group)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(3):
            rows = ROWS[world.rank + 7 * number :: world.size]
            optimizer.zero_grad()
            if watches and number == 1:
                with record_step(model, optimizer):
                    weighted(model, rows)
                    optimizer.step()
            else:
                weighted(model, rows)
                optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    for watched, plain in zip(run_ranks(2, body, True), run_ranks(2, body, False), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(watched, plain, strict=True))


def test_a_sample_is_followed_to_the_worker_that_has_it() -> None:
    trace = record(3, sample=304, values=True)
    assert trace.sample is not None
    stops = {stop.stage: (stop.worker, stop.row) for stop in trace.sample.stops}
    assert stops == {"data": (None, 304), "sampler": (1, 1), "batch": (1, 1), "forward": (1, 1)}
    values = {stop.stage: stop.values for stop in trace.sample.stops}
    assert values["data"] == values["batch"] == X[304][:6].tolist()
    with torch.no_grad():
        expected = net()(X[304:305]).reshape(-1).tolist()
    assert values["forward"] == pytest.approx(expected, abs=1e-6)


def test_a_weight_is_followed_to_a_value_that_is_equal_on_all() -> None:
    trace = record(2, weight="2.weight[0, 5]", values=True)
    assert trace.weight is not None
    numbers = {stop.what: stop.by_worker or [] for stop in trace.weight.stops}
    equal = {stop.what: stop.is_equal for stop in trace.weight.stops}
    before = net()[2].weight[0, 5].item()  # type: ignore[index]
    assert numbers["value"] == [before, before]
    one, two = numbers["gradient"]
    assert one != two
    assert numbers["averaged gradient"] == pytest.approx([(one + two) / 2] * 2, abs=1e-7)
    assert numbers["new value"] == pytest.approx([before - 0.1 * (one + two) / 2] * 2, abs=1e-6)
    assert equal == {
        "value": True,
        "gradient": None,
        "averaged gradient": True,
        "new value": True,
    }
    # The bucket holds 2.bias (1 number), then 2.weight.
    assert (trace.weight.bucket, trace.weight.position) == (0, 6)


def test_without_values_no_value_is_kept() -> None:
    trace = record(2, sample=304, weight="0.bias[3]")
    kept = [
        facts
        for stage in trace.stages
        for part in stage.parts
        for facts in part.tensors
        if facts.first is not None
    ]
    assert {facts.name for facts in kept} == {"loss"}
    assert trace.sample is not None
    assert trace.weight is not None
    assert all(stop.values is None for stop in trace.sample.stops)
    assert all(stop.by_worker is None for stop in trace.weight.stops)
    assert trace.weight.stops[-1].is_equal


def accumulate(model: Any, rows: list[int]) -> Tensor:
    """A step of three forward and backward passes."""
    total = torch.zeros(())
    for number, part in enumerate([rows[:20], rows[20:30], rows[30:]]):
        with model.no_sync(enabled=number < 2):
            total = total + weighted(model, part).detach()
    return total


def test_gradients_accumulated_over_micro_batches_are_one_step() -> None:
    trace = record(2, take_step=accumulate)
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    batch = next(stage for stage in trace.stages if stage.name == "batch")
    assert shapes(batch) == [[50, 10], [50, 10]]
    assert "in 3 forward passes" in batch.text


def test_random_numbers_are_drawn_again_for_each_part() -> None:
    # One rank only: ranks in threads share a generator.
    check = check_of(1, lambda: net(nn.Dropout(0.5)), accumulate)
    assert (check.how, check.is_same) == ("part by part", True)
    assert "random numbers" in check.reason


def test_batch_normalisation_is_explained_rather_than_called_wrong() -> None:
    check = check_of(2, lambda: net(nn.BatchNorm1d(32), nn.ReLU()))
    assert (check.how, check.is_same) == ("part by part", True)
    assert "SyncBatchNorm does not" in check.reason


def test_synchronised_batch_normalisation_is_the_whole_batch() -> None:
    def body(world: World) -> Check | None:
        module = net(nn.BatchNorm1d(32), nn.ReLU())
        module = SyncBatchNorm.convert_sync_batchnorm(module, world.group)
        model = DistributedDataParallel(module, process_group=world.group)
        with record_step(model) as seen:
            weighted(model, ROWS[world.rank :: world.size])
        assert seen.trace is not None
        return seen.trace.check

    check = run_ranks(2, body)[0]
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", True)


def test_inputs_of_different_lengths_go_through_part_by_part() -> None:
    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = seeded(nn.Linear(1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mean(1, keepdim=True))

    def ragged(model: Any, rows: list[int]) -> Tensor:
        loss = model(X[rows][:, : 5 + model.process_group.rank()]).square().mean()
        loss.backward()
        return loss

    check = check_of(2, Pool, ragged)
    assert (check.how, check.is_same) == ("part by part", True)
    assert "different shapes" in check.reason


def test_a_batch_too_large_to_be_sent_has_its_gradients_summed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record_module, "WHOLE_BATCH_LIMIT_BYTES", 100)
    check = check_of(2)
    assert (check.how, check.is_same) == ("gradients only", True)

    def local(model: Any, rows: list[int]) -> Tensor:
        with model.no_sync():
            return weighted(model, rows)

    assert check_of(2, take_step=local).is_same is False


def test_trees_of_tensors_unused_parameters_and_adam_are_compared_too() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.idle = seeded(nn.Linear(3, 3))

        def forward(self, batch: dict[str, Tensor], *, scale: float) -> dict[str, Any]:
            out = self.inner(batch["x"]) * scale
            return {"out": out, "both": (out * 2, len(out)), "flag": "yes"}

    def step(model: Any, rows: list[int]) -> Tensor:
        out = model({"x": X[rows]}, scale=3.0)
        loss = (out["out"] + out["both"][0]).square().mean()
        loss.backward()
        return loss

    check = check_of(2, Tree, step, lambda p: torch.optim.Adam(p, lr=0.01))
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.parameters is not None
    assert check.parameters < 1e-6


def test_lower_precision_is_compared_in_lower_precision() -> None:
    def step(model: Any, rows: list[int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X[rows]).float().square().mean()
        loss.backward()
        return loss

    check = check_of(2, take_step=step)
    assert (check.how, check.is_same) == ("whole batch", True)


def test_without_a_check_nothing_is_copied_or_compared() -> None:
    trace = record(2, check=False)
    assert trace.check is None
    assert [stage.name for stage in trace.stages][-1] == "update"


def test_without_an_optimizer_there_is_no_update() -> None:
    def body(world: World) -> list[str]:
        model = DistributedDataParallel(net(), process_group=world.group)
        with record_step(model) as seen:
            weighted(model, ROWS[world.rank :: world.size])
        assert seen.trace is not None
        assert seen.trace.check is not None
        assert seen.trace.check.is_same
        return [stage.name for stage in seen.trace.stages]

    assert run_ranks(2, body)[0] == [
        "batch",
        "forward",
        "loss",
        "backward",
        "buckets",
        "all-reduce",
    ]


def test_rank_0_writes_the_file(tmp_path: Path) -> None:
    trace = record(2, folder=tmp_path / "run", step=7)
    assert schema.read(tmp_path / "run" / "pipeline" / "step7.json") == trace
    assert [path.name for path in (tmp_path / "run" / "pipeline").iterdir()] == ["step7.json"]


def test_many_small_buckets_are_listed_in_order() -> None:
    def body(world: World) -> Trace:
        model = DistributedDataParallel(net(), process_group=world.group, bucket_cap_mb=0.0001)
        for _ in range(2):  # the order is learned in the first
            model.zero_grad()
            weighted(model, ROWS[world.rank :: world.size])
        model.zero_grad()
        with record_step(model, weight="0.weight[1, 1]") as seen:
            weighted(model, ROWS[world.rank :: world.size])
        assert seen.trace is not None
        return seen.trace

    trace = run_ranks(2, body)[0]
    buckets = next(stage for stage in trace.stages if stage.name == "buckets")
    assert len(buckets.parts) > 1
    assert trace.weight is not None
    assert trace.weight.bucket == len(buckets.parts) - 1
    assert trace.check is not None
    assert trace.check.is_same
