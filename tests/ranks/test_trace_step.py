"""One step of either engine, recorded: what happens to a batch; observing changes nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentences import says
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import DataParallel, DistributedDataParallel, SyncBatchNorm
from paceline.dp import DPOptions
from paceline.errors import UsageError
from paceline.group import tree
from paceline.group.world import World
from paceline.record import record_step, stages, to_json
from paceline.record import step as step_module
from paceline.record.reference import distance
from paceline.record.stages import Check, Stage, Trace
from paceline.testing import run_ranks, seeded

X = torch.randn(1_000, 10, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1, keepdim=True) > 0).float()
ROWS = list(range(300, 400))
DATA = TensorDataset(X, Y)
NAN, INF = math.nan, math.inf

Step = Callable[[Any, list[int]], Tensor]

each_engine = pytest.mark.parametrize("engine", ["dp", "ddp"])


def net(*layers: nn.Module) -> nn.Module:
    hidden = layers or (nn.ReLU(),)
    return seeded(nn.Sequential(nn.Linear(10, 32), *hidden, nn.Linear(32, 1)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mean(model: Any, rows: list[int]) -> Tensor:
    """The loss as torch gives it: of all rows on replicas, of its own on a worker."""
    loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows])
    torch.autograd.backward(loss)
    return loss


def weighted(model: Any, rows: list[int]) -> Tensor:
    """Exact for any shares of the workers."""
    with model.weighted(len(rows)):
        loss = F.binary_cross_entropy_with_logits(model(X[rows]), Y[rows], reduction="sum")
        torch.autograd.backward(loss)
    return loss


def record_here(
    model: Any, rows: list[int], take_step: Step, optimizer: Any = None, **options: Any
) -> Trace:
    chosen = optimizer(model.parameters()) if optimizer else None
    with record_step(model, chosen, **options) as recording:
        recording.note_batch(rows)
        recording.note_loss(take_step(model, rows), targets=Y[rows])
        if chosen is not None:
            chosen.step()
    assert recording.trace is not None
    return recording.trace


def record(
    engine: str,
    size: int = 2,
    make: Callable[[], nn.Module] = net,
    take_step: Step | None = None,
    optimizer: Any = sgd,
    **options: Any,
) -> Trace:
    """The trace of one step on so many workers, which must be the same on every rank."""
    options = {"dataset": DATA, **options}
    if engine == "dp":
        model = DataParallel(make(), [f"cpu:{i}" for i in range(size)])
        told = [to_json(record_here(model, ROWS, take_step or mean, optimizer, **options))]
    else:

        def body(world: World) -> dict[str, Any]:
            wrapped = DistributedDataParallel(make(), process_group=world.group)
            rows = ROWS[world.rank :: world.size]
            return to_json(record_here(wrapped, rows, take_step or weighted, optimizer, **options))

        told = run_ranks(size, body)
    for other in told[1:]:
        assert {**other, "created": 0} == {**told[0], "created": 0}
    return stages.from_json(json.loads(json.dumps(told[0], allow_nan=False)))


def check_of(*arguments: Any, **options: Any) -> Check:
    check = record(*arguments, **options).check
    assert check is not None
    return check


def shapes(stage: Stage) -> list[list[int]]:
    return [part.tensors[0].shape for part in stage.parts if part.tensors]


def by_name(trace: Trace) -> dict[str, Stage]:
    return {stage.name: stage for stage in trace.stages}


PAIR = [[385], [385]]
STAGES = {
    "dp": {
        "data": [[1_000, 10]],
        "batch": [[100, 10]],
        "split": [[50, 10], [50, 10]],
        "copy": [[], []],
        "forward": [[50, 1], [50, 1]],
        "gather": [[100, 1]],
        "loss": [[]],
        "backward": PAIR,
        "sum": [[385]],
        "update": [[385]],
        "main": [],
    },
    "ddp": {
        "data": [[1_000, 10]],
        "sampler": [[50], [50]],
        "batch": [[50, 10], [50, 10]],
        "forward": [[50, 1], [50, 1]],
        "loss": [[], []],
        "backward": PAIR,
        "buckets": [[400]],  # with a gap after the one number of 2.bias, and the trailer
        "all-reduce": PAIR,
        "update": PAIR,
    },
}


@each_engine
def test_the_stages_and_shapes_are_those_of_a_batch_of_100_on_two_workers(engine: str) -> None:
    trace = record(engine)
    stages = by_name(trace)
    found = {name: shapes(stage) for name, stage in stages.items()}
    if engine == "ddp":
        text = re.fullmatch(
            r"2.bias to 0.weight, then (\d+) control numbers", stages["buckets"].parts[0].text
        )
        assert text
        found["buckets"][0][0] -= int(text[1])
    assert list(found.items()) == list(STAGES[engine].items())
    assert [part.worker for part in stages["forward"].parts] == [0, 1]
    assert all(part.seconds is not None for part in stages["forward"].parts)
    assert all(stages[name].seconds is not None for name in ("forward", "loss", "backward"))
    if engine == "dp":
        assert trace.devices == ["cpu:0", "cpu:1"]


@each_engine
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_step_is_the_same_as_in_one_process_on_the_whole_batch(engine: str, size: int) -> None:
    check = check_of(engine, size)
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.difference is not None
    assert check.difference < 1e-5
    assert check.text.startswith("same as one process on the whole batch: difference ")
    assert check.is_equal_on_all is (None if engine == "dp" or size == 1 else True)


@each_engine
def test_observing_changes_no_bit_of_the_result(engine: str) -> None:
    def train(model: Any, rows: list[int], take_step: Step, watches: bool) -> list[Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            if watches and number == 1:
                with record_step(model, optimizer):
                    take_step(model, rows[number:])
                    optimizer.step()
            else:
                take_step(model, rows[number:])
                optimizer.step()
        return [param.detach().clone() for param in model.parameters()]

    def body(world: World, watches: bool) -> list[Tensor]:
        model = DistributedDataParallel(net(), process_group=world.group)
        return train(model, ROWS[world.rank :: world.size], weighted, watches)

    def weights(watches: bool) -> list[list[Tensor]]:
        if engine == "dp":
            return [train(DataParallel(net(), ["cpu:0", "cpu:1"]), ROWS, mean, watches)]
        return run_ranks(2, body, watches)

    for watched, plain in zip(weights(True), weights(False), strict=True):
        assert all(map(torch.equal, watched, plain))


@pytest.mark.parametrize(
    ("engine", "sample", "stops"),
    [
        (
            "dp",
            349,
            {"batch": (None, 49), "split": (0, 49), "forward": (0, 49), "gather": (None, 49)},
        ),
        (
            "dp",
            350,
            {"batch": (None, 50), "split": (1, 0), "forward": (1, 0), "gather": (None, 50)},
        ),
        ("ddp", 305, {"sampler": (1, 2), "batch": (1, 2), "forward": (1, 2)}),
    ],
)
def test_a_sample_is_followed_through_all_stages(
    engine: str, sample: int, stops: dict[str, Any]
) -> None:
    trace = record(engine, sample=sample, values=True)
    assert trace.sample is not None
    found = {stop.stage: (stop.worker, stop.row) for stop in trace.sample.stops}
    assert found == {"data": (None, sample), **stops}
    values = {stop.stage: stop.values for stop in trace.sample.stops}
    assert values["data"] == values["batch"] == X[sample][:6].tolist()
    with torch.no_grad():
        expected = net()(X[sample : sample + 1]).reshape(-1).tolist()
    assert values["forward"] == pytest.approx(expected, abs=1e-6)


@each_engine
def test_a_sample_that_is_not_in_the_batch_is_not_followed(engine: str) -> None:
    assert record(engine, sample=7).sample is None


def test_the_replicas_gradients_of_a_weight_add_up() -> None:
    module = net()
    before = module[0].weight[3, 1].item()  # type: ignore[index]
    trace = record("dp", make=lambda: module, weight="0.weight[3, 1]", values=True)
    assert trace.weight is not None
    numbers = {stop.what: stop.by_worker or [] for stop in trace.weight.stops}
    assert numbers["value"] == [before, before]
    assert len(numbers["gradient"]) == 2
    assert sum(numbers["gradient"]) == pytest.approx(numbers["summed gradient"][0], abs=1e-7)
    assert numbers["new value"] == [module[0].weight[3, 1].item()]  # type: ignore[index]
    assert numbers["new value"][0] == pytest.approx(before - 0.1 * numbers["summed gradient"][0])


def test_a_weight_is_followed_to_a_value_that_is_equal_on_all_workers() -> None:
    trace = record("ddp", weight="2.weight[0, 5]", values=True)
    assert trace.weight is not None
    numbers = {stop.what: stop.by_worker or [] for stop in trace.weight.stops}
    before = net()[2].weight[0, 5].item()  # type: ignore[index]
    assert numbers["value"] == [before, before]
    one, two = numbers["gradient"]
    assert one != two
    assert numbers["averaged gradient"] == pytest.approx([(one + two) / 2] * 2, abs=1e-7)
    assert numbers["new value"] == pytest.approx([before - 0.1 * (one + two) / 2] * 2, abs=1e-6)
    equal = {stop.what: stop.is_equal for stop in trace.weight.stops}
    assert equal.pop("gradient") is None
    assert set(equal.values()) == {True}
    # The bucket holds 2.bias (1 number), and from the next multiple of 64 bytes on 2.weight.
    assert (trace.weight.bucket, trace.weight.position) == (0, 16 + 5)


@each_engine
def test_without_values_no_value_is_kept(engine: str) -> None:
    trace = record(engine, sample=350, weight="2.weight[0, 7]")
    assert not trace.has_values
    facts = [t for stage in trace.stages for part in stage.parts for t in part.tensors]
    assert {each.name for each in facts if each.first is not None} == {"loss"}
    assert by_name(trace)["batch"].parts[0].tensors[0].stats is not None
    assert trace.sample is not None
    assert trace.weight is not None
    assert all(stop.values is None for stop in trace.sample.stops)
    assert all(stop.by_worker is None for stop in trace.weight.stops)


def test_statistics_of_a_few_numbers_are_values_too() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1"])
    outputs = by_name(record_here(model, [1, 2, 3], mean))["forward"].parts
    assert [part.tensors[0].shape for part in outputs] == [[2, 1], [1, 1]]
    assert [part.tensors[0].stats for part in outputs] == [None, None]


def accumulate(model: Any, rows: list[int]) -> Tensor:
    """A step of three forward and backward passes."""
    total = torch.zeros(())
    for number, part in enumerate([rows[:20], rows[20:30], rows[30:]]):
        if isinstance(model, DataParallel):
            loss = model(X[part]).square().sum()
            torch.autograd.backward(loss)
            total = total + loss.detach()
        else:
            with model.no_sync(enabled=number < 2):
                total = total + weighted(model, part).detach()
    return total


def test_gradients_accumulated_over_micro_batches_are_one_step() -> None:
    replicas, ranks = (record(engine, take_step=accumulate) for engine in ("dp", "ddp"))
    for trace in (replicas, ranks):
        assert trace.check is not None
        assert (trace.check.how, trace.check.is_same) == ("whole batch", True)
    assert replicas.workers == 2
    assert shapes(by_name(replicas)["split"]) == [[10, 10], [10, 10]]  # the first pass is drawn
    assert shapes(by_name(ranks)["batch"]) == [[50, 10], [50, 10]]
    assert "in 3 passes of 20, 10 and 20 rows" in by_name(ranks)["batch"].text


@each_engine
def test_batch_normalisation_is_explained_rather_than_called_wrong(engine: str) -> None:
    check = check_of(engine, 2, lambda: net(nn.BatchNorm1d(32), nn.ReLU()))
    assert (check.how, check.is_same) == ("part by part", True)
    assert "as BatchNorm does without synchronisation" in check.reason


def test_synchronised_batch_normalisation_is_the_whole_batch() -> None:
    def body(world: World) -> Check | None:
        module = net(nn.BatchNorm1d(32), nn.ReLU())
        module = SyncBatchNorm.convert_sync_batchnorm(module, world.group)
        model = DistributedDataParallel(module, process_group=world.group)
        return record_here(model, ROWS[world.rank :: world.size], weighted).check

    check = run_ranks(2, body)[0]
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", True)


def test_random_numbers_are_drawn_again_for_each_part() -> None:
    # One rank only: ranks in threads share a generator.
    check = check_of("ddp", 1, lambda: net(nn.Dropout(0.5)), accumulate)
    assert (check.how, check.is_same) == ("part by part", True)
    assert "random numbers" in check.reason
    assert check_of("dp", 1, lambda: net(nn.Dropout(0.5))).is_same
    # Replicas share one too: whether what each drew can be drawn again is a matter of luck.
    check = check_of("dp", 2, lambda: net(nn.Dropout(0.5)))
    assert (check.how, check.is_same) in [("not computed", None), ("part by part", True)]
    assert "random numbers" in check.reason


@pytest.mark.parametrize("scale", [1.01, 0.0, -1.0])
def test_gradients_that_are_not_right_are_noticed(scale: float) -> None:
    module = net()

    def spoil(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(scale)

    next(module.parameters()).register_post_accumulate_grad_hook(spoil)
    check = check_of("dp", make=lambda: module)
    assert check.is_same is False
    assert check.gradients == check.difference
    assert check.difference is not None
    assert check.difference > 1e-4
    assert check.text.startswith("NOT the same as one process")


def test_outputs_that_depend_on_the_number_of_rows_are_noticed() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + float(len(x) == 50)

    check = check_of("dp", make=Odd)
    assert check.how == "part by part"
    assert says(check.reason, "treats", "rows of a batch together")


def test_an_update_that_is_not_right_is_noticed() -> None:
    module = net()

    def wrong(parameters: Any) -> torch.optim.Optimizer:
        optimizer = sgd(parameters)
        optimizer.register_step_post_hook(lambda *_: module[0].bias.data.add_(1.0))  # type: ignore[index]
        return optimizer

    check = check_of("dp", make=lambda: module, optimizer=wrong)
    assert check.is_same is False
    assert check.parameters == pytest.approx(1.0, abs=1e-3)


def test_a_step_without_synchronisation_is_noticed() -> None:
    def local(model: Any, rows: list[int]) -> Tensor:
        with model.no_sync():
            return mean(model, rows)

    check = check_of("ddp", take_step=local)
    assert (check.is_same, check.is_equal_on_all) == (False, False)
    assert check.difference is not None
    assert check.difference > 1e-3


def test_one_worker_that_ends_with_other_weights_is_noticed() -> None:
    def spoil(model: Any, rows: list[int]) -> Tensor:
        loss = weighted(model, rows)
        if model.process_group.rank() == 1:
            model.module[0].bias.grad.mul_(2)
        return loss

    assert check_of("ddp", take_step=spoil).is_equal_on_all is False


@pytest.mark.parametrize(
    ("take_step", "rows", "is_same"),
    [(mean, [50, 50], True), (mean, [5, 50], False), (weighted, [5, 50], True)],
)
def test_a_mean_of_means_over_uneven_shares_is_noticed_where_the_loss_is_known(
    take_step: Step, rows: list[int], is_same: bool
) -> None:
    def body(world: World) -> Check | None:
        model = DistributedDataParallel(net(), process_group=world.group)
        own = ROWS[world.rank :: 2][: rows[world.rank]]
        loss_fn = F.binary_cross_entropy_with_logits
        return record_here(model, own, take_step, loss_fn=loss_fn).check

    check = run_ranks(2, body)[0]
    assert check is not None
    assert (check.how, check.is_same) == ("whole batch", is_same)
    assert ("parts of unequal size" in check.reason) is not is_same
    assert check.loss is not None
    assert (check.loss < 1e-5) is is_same


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

    check = check_of("ddp", 2, Pool, ragged)
    assert (check.how, check.is_same) == ("part by part", True)
    assert "different shapes" in check.reason


def test_a_batch_too_large_to_be_sent_is_not_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_module, "WHOLE_BATCH_LIMIT_BYTES", 100)
    check = check_of("ddp")
    assert (check.how, check.is_same, check.is_equal_on_all) == ("not computed", None, True)
    assert "too large" in check.reason


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

    check = check_of("ddp", 2, Tree, step, lambda p: torch.optim.Adam(p, lr=0.01))
    assert (check.how, check.is_same) == ("whole batch", True)
    assert check.parameters is not None
    assert check.parameters < 1e-6


def test_lower_precision_is_compared_in_lower_precision() -> None:
    def step(model: Any, rows: list[int]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X[rows]).float().square().mean()
        loss.backward()
        return loss

    check = check_of("ddp", take_step=step)
    assert (check.how, check.is_same) == ("whole batch", True)


def test_a_recording_that_is_kept_keeps_no_tensors() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1"])
    optimizer = sgd(model.parameters())
    with record_step(model, optimizer) as recording:
        recording.note_loss(mean(model, ROWS), targets=Y[ROWS])
        optimizer.step()
    assert recording.trace is not None
    held = {name: value for name, value in vars(recording).items() if name != "model"}
    assert list(tree.find_tensors(held)) == []


@each_engine
def test_without_a_check_and_an_optimizer_there_is_neither(engine: str) -> None:
    trace = record(engine, optimizer=None, check=False)
    assert trace.check is None
    left = [name for name in STAGES[engine] if name != "update"]
    assert [stage.name for stage in trace.stages] == left


@each_engine
def test_one_file_is_in_the_run_folder(engine: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trace = record(engine, folder=folder, step=12)
    assert stages.read(folder / "pipeline" / "step12.json") == trace
    assert [path.name for path in (folder / "pipeline").iterdir()] == ["step12.json"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_many_small_buckets_are_listed_in_order() -> None:
    def body(world: World) -> Trace:
        model = DistributedDataParallel(net(), process_group=world.group, bucket_cap_mb=0.0001)
        rows = ROWS[world.rank :: world.size]
        for _ in range(2):  # the order is learned in the first
            model.zero_grad()
            weighted(model, rows)
        model.zero_grad()
        return record_here(model, rows, weighted, weight="0.weight[1, 1]")

    trace = run_ranks(2, body)[0]
    buckets = by_name(trace)["buckets"]
    assert len(buckets.parts) > 1
    assert trace.weight is not None
    assert trace.weight.bucket == len(buckets.parts) - 1
    assert trace.check is not None
    assert trace.check.is_same


def test_the_loss_on_the_replicas_is_recorded_without_a_gather() -> None:
    def on_replicas(model: Any, rows: list[int]) -> Tensor:
        loss: Tensor = model.backward(F.binary_cross_entropy_with_logits, X[rows], Y[rows])
        return loss

    trace = record("dp", 3, take_step=on_replicas)
    names = ["data", "split", "copy", "forward", "loss", "backward", "sum", "update", "main"]
    assert [stage.name for stage in trace.stages] == names
    assert shapes(trace.stages[1]) == [[34, 10], [34, 10], [32, 10]]
    assert trace.check is not None
    assert (trace.check.how, trace.check.is_same) == ("whole batch", True)


def test_parts_in_one_memory_are_not_copied_and_copies_of_the_model_are_counted() -> None:
    shared = by_name(record("dp"))
    assert (shared["split"].bytes_moved, shared["copy"].bytes_moved) == (0, 0)
    assert shared["gather"].bytes_moved == 400
    options = DPOptions(share_parameters=False)
    model = DataParallel(net(), ["cpu:0", "cpu:1", "cpu:2"], options=options)
    copied = record_here(model, ROWS, mean)
    assert by_name(copied)["copy"].bytes_moved == 2 * 385 * 4
    assert copied.check is not None
    assert copied.check.is_same


def test_clipped_gradients_are_no_difference() -> None:
    def clip(model: Any, rows: list[int]) -> Tensor:
        loss = mean(model, rows)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        return loss

    check = check_of("dp", take_step=clip)
    assert check.is_same
    assert check.parameters == 0.0


def test_gradients_from_before_the_step_are_named_as_the_reason() -> None:
    model = DataParallel(net(), ["cpu:0", "cpu:1"])
    mean(model, ROWS)
    check = record_here(model, ROWS, mean).check
    assert check is not None
    assert check.is_same is None
    assert "zero_grad()" in check.reason


@pytest.mark.parametrize(
    ("ours", "theirs", "apart"),
    [
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, -INF], [1.5, -INF], 0.5),
        ([INF], [-INF], INF),
        ([INF], [3.0], INF),
        ([1.0, 1.0], [NAN, 9.0], INF),
    ],
)
def test_what_is_not_a_number_on_both_sides_is_no_difference_and_on_one_side_the_worst(
    ours: list[float], theirs: list[float], apart: float
) -> None:
    pairs = [(torch.tensor([x]), torch.tensor([y])) for x, y in zip(ours, theirs, strict=True)]
    for found in (distance(pairs)[0], distance([(torch.tensor(ours), torch.tensor(theirs))])[0]):
        assert found == apart


@pytest.mark.parametrize("odd", [NAN, INF])
def test_a_number_that_is_not_finite_does_not_excuse_the_others(odd: float) -> None:
    _, scale = distance([(torch.tensor([odd, 2.0]), torch.tensor([odd, 1.0]))])
    assert scale == 2.0


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (torch.tensor([[1.0] * 4] * 7 + [[NAN] * 4]), "some numbers are not finite, on both"),
        (torch.full((8, 4), 1e30, dtype=torch.float64), ""),  # a loss beyond float32
    ],
)
def test_numbers_that_are_not_finite_or_huge_are_the_same_as_in_one_process(
    inputs: Tensor, reason: str
) -> None:
    targets = torch.zeros(8, 1, dtype=inputs.dtype)
    model = DataParallel(seeded(nn.Linear(4, 1)).to(inputs.dtype), ["cpu:0", "cpu:1"])
    with record_step(model, loss_fn=F.mse_loss) as recording:
        loss = F.mse_loss(model(inputs), targets)
        recording.note_loss(loss, targets=targets)
        torch.autograd.backward(loss)
    assert recording.trace is not None
    check = recording.trace.check
    assert check is not None
    assert (check.is_same, check.reason) == (True, reason)


def test_an_error_in_the_step_passes_and_leaves_no_hook() -> None:
    module = net()
    model = DataParallel(module, ["cpu:0", "cpu:1"])
    optimizer = sgd(model.parameters())

    def fail() -> None:
        output = model(X[:10])
        output.register_hook(lambda _: 1 / 0)
        output.sum().backward()

    with pytest.raises(ZeroDivisionError), record_step(model, optimizer):
        fail()
    for each in (model, module):
        assert not each._forward_hooks
        assert not each._forward_pre_hooks
    assert not any(param._backward_hooks for param in module.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"weight": "0.wieght[0, 0]"}, ["'0.weight'"]),
        ({"weight": "0.weight[32, 0]"}, ["(32, 10)"]),
        ({"weight": "0.weight[0]"}, ["0.weight[0]", "one element"]),
        ({"weight": "0.weight[-1, 0]"}, ["0.weight[-1, 0]", "one element"]),
        ({"weight": "[0]"}, ["parameter ''"]),
        ({"step": 0}, ["step", 0]),
        ({"folder": "my run"}, ["'my run'"]),
    ],
)
def test_nonsense_is_refused_before_the_step(options: dict[str, Any], parts: list[object]) -> None:
    with pytest.raises(UsageError) as caught:
        record("dp", **options)
    assert says(str(caught.value), *parts)


@pytest.mark.parametrize(
    ("model", "words"),
    [(net(), "Wrap"), (DataParallel(net(), ["cpu:0"]), "not called")],
)
def test_a_bare_model_and_a_block_without_a_step_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words), record_step(model):
        pass
