"""What the workers of a run do together: find a NaN, keep buffers, write a record, agree."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, Trained, assert_same, mlp, still_valid, train
from sentences import says
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import SyncBatchNorm
from paceline.errors import CheckpointError, DesyncError, NotFiniteError, UsageError
from paceline.files.run_folder import RunFolder, read_events, read_info
from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.run.stop import StopRequest
from paceline.testing import assert_replicas_equal, run_ranks, seeded


@pytest.mark.parametrize("size", [2, 3])
def test_a_nan_on_one_worker_stops_all_of_them_and_is_named_by_all(size: int) -> None:
    data = Rows()
    data.x[13] = float("nan")
    nets: list[nn.Module] = [mlp() for _ in range(size)]

    def body(world: World) -> Trained:
        return train(world, lambda: nets[world.rank], data, shards=4)

    errors = run_ranks(size, body, return_exceptions=True)
    assert all(isinstance(error, NotFiniteError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert says(str(errors[0]), "loss of shard")
    assert "13" in str(errors[0])
    assert all(param.isfinite().all() for net in nets for param in net.parameters())
    assert_replicas_equal([net.state_dict() for net in nets])


class Counting(nn.Module):
    """Counts its calls and keeps a trace of what it saw, in buffers; and has one that is still."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("trace", torch.zeros(WIDTH))
        self.register_buffer("still", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1  # type: ignore[operator]
            self.trace = self.trace * 0.9 + x.detach().mean(0)
        out: Tensor = self.inner(x + self.trace)
        return out


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_buffers_of_any_kind_do_not_depend_on_the_number_of_workers(size: int) -> None:
    def build() -> nn.Module:
        return seeded(Counting())

    expected = train(build=build, shards=4)
    workers = run_ranks(size, lambda world: train(world, build, shards=4))
    for each in workers:
        assert_same(each.parameters, expected.parameters, rtol=1e-4, atol=1e-5)
    assert expected.parameters["calls"] == 14


class Moody(nn.Module):
    """Shifts its inputs by a buffer that it changes in every third forward of a step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("mask", torch.full((3, 5), float("nan")))
        self.step, self.way = 0, way

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x + self.shift.clone())
        if self.training and self.step % 3 == 0 and self.way != "after backward":
            self.change(x)
        return out

    def change(self, x: Tensor) -> None:
        mean = x.detach().mean(0)
        if self.way == "in place":
            self.shift += mean
        elif self.way == "replaced":
            self.shift = self.shift + mean
        elif self.way == "memory":
            self.shift.data = self.shift + mean
        else:
            self.shift.data.add_(mean)


def train_moody(world: World | None, way: str, first: int) -> tuple[dict[str, Tensor], float]:
    """Train until some steps after the first in which the buffer changes; evaluate right then."""
    net = seeded(Moody(way))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    arguments = {"global_batch": 8, "epochs": 2, "shards": 4, "options": QUIET}
    run = Run(net, optimizer, Rows(), world=world, **arguments)
    for step in run:
        net.step = step.number + 3 - first
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
                if way == "after backward" and net.step % 3 == 0:
                    net.change(x)
        if step.number == first:
            scores = run.evaluate(lambda batch: {"sum": run.model(batch[0]).sum()})
        if step.number == 9:
            break
    return net.state_dict(), scores["sum"]


@pytest.mark.parametrize("way", ["in place", "replaced", "memory", "data", "after backward"])
@pytest.mark.parametrize(("size", "first"), [(1, 2), (2, 1), (3, 2)])
def test_a_buffer_that_changes_now_and_then_is_equal_at_once(
    size: int, first: int, way: str
) -> None:
    expected, score = train_moody(None, way, first)
    for state, scored in run_ranks(size, train_moody, way, first):
        assert scored == pytest.approx(score, rel=1e-4)
        torch.testing.assert_close(state["shift"], expected["shift"])
        torch.testing.assert_close(state["inner.weight"], expected["inner.weight"])


def test_synchronised_batch_norm_needs_a_shard_for_every_worker() -> None:
    def body(world: World, shards: int, count: int) -> Trained:
        def build() -> nn.Module:
            return seeded(
                nn.Sequential(
                    *(nn.Linear(WIDTH, 8), SyncBatchNorm(8, process_group=world.group)),
                    nn.Linear(8, CLASSES),
                )
            )

        return train(world, build, Rows(count), shards=shards)

    for shards, count, message in ((3, 48, "one shard per worker"), (2, 49, "too few")):
        errors = run_ranks(2, body, shards, count, return_exceptions=True)
        assert all(isinstance(e, UsageError) and message in str(e) for e in errors), errors
    with pytest.raises(UsageError):  # whose statistics would be those of half the batch
        run_ranks(1, body, 2, 48)
    workers = run_ranks(2, body, 2, 48)
    assert_replicas_equal([each.parameters for each in workers])


@pytest.mark.parametrize(
    ("size", "shards", "count", "when"),
    [
        *((1, 2, 48, "before"), (2, 4, 48, "before"), (2, 3, 48, "before"), (2, 2, 49, "before")),
        *((3, 3, 48, "before"), (1, 2, 48, "after"), (2, 4, 48, "after"), (3, 3, 48, "after")),
    ],
)
def test_a_collective_in_a_pass_needs_a_shard_for_every_worker(
    size: int, shards: int, count: int, when: str
) -> None:
    def body(world: World) -> int:
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        arguments = {"global_batch": 12, "epochs": 1, "shards": shards, "options": QUIET}
        run = Run(net, optimizer, Rows(count), world=world, **arguments)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    seen = x.sum(0, keepdim=True)
                    if when == "before":
                        world.group.allreduce([seen]).wait()
                    step.backward(F.cross_entropy(run.model(x - seen), y))
                    if when == "after":
                        world.group.allreduce([seen]).wait()
        return run.step

    found = run_ranks(size, body, return_exceptions=True)
    if size == shards and count % 12 == 0:
        assert found == [4] * size
    else:
        assert all(isinstance(each, UsageError) for each in found), found
        assert all(says(str(each), "Step 1") for each in found)


def test_workers_with_different_arguments_are_told() -> None:
    errors = run_ranks(2, lambda world: train(world, seed=world.rank), return_exceptions=True)
    assert all(isinstance(error, DesyncError) for error in errors)
    assert says(str(errors[0]), "seed", "0 on rank 0, 1 on rank 1")


def log_steps(world: World, folder: Path | None, best: str | None = None) -> Run:
    net = mlp()
    run = Run(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        Rows(21),
        global_batch=8,
        epochs=2,
        folder=folder,
        shards=3,
        world=world,
        options=RunOptions(
            progress="quiet", best_metric=best, better="lower", policy=["128 globally"]
        ),
    )
    for step in run:
        with step:
            for x, y, indices in step.batches():
                out = run.model(x)
                step.backward(F.cross_entropy(out, y), items=len(y))
                run.log("index", indices.double().mean(), weight=len(y))
                run.log("constant", 3)
        if step.ends_epoch:
            run.evaluate(lambda b: {"rows": (len(b[1]), 1)}, Rows(10), reduction="sum")
    return run


@pytest.mark.parametrize("size", [1, 2])
def test_the_record_of_a_run_is_complete(size: int, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "digits")
    run_ranks(size, lambda world: log_steps(world, folder.path, best="rows").step)

    info = read_info(folder)
    assert info is not None
    assert (info.name, info.status, info.step, info.steps) == ("digits", "finished", 6, 6)
    assert (info.workers, info.shards, info.dataset_size) == (size, 3, 21)
    assert info.parameters == sum(p.numel() for p in mlp().parameters())
    assert info.policy == ["128 globally"]

    events = read_events(folder)
    assert folder.event_ranks() == list(range(size))
    for rank in range(size):
        kinds = [event["kind"] for event in events if event["rank"] == rank]
        assert (kinds[0], kinds[-1]) == ("start", "stop")
        assert kinds.count("step") == 6
    steps = [event for event in events if event["kind"] == "step"]
    assert sum(event["samples"] for event in steps) == 2 * 21
    assert all(sum(event["phases"].values()) > 0 for event in steps)
    epochs = [event for event in events if event["kind"] == "epoch"]
    assert [(e["epoch"], e["step"], e["samples"]) for e in epochs] == [(0, 3, 21), (1, 6, 21)]
    for event in epochs:  # every sample once: the mean of the indices 0 to 20
        assert event["metrics"]["index"] == 10
        assert event["metrics"]["constant"] == 3
        total = [e["metrics"]["loss"] for e in steps if e["epoch"] == event["epoch"]]
        mean = sum(each[0] for each in total) / sum(each[1] for each in total)
        assert event["metrics"]["loss"] == pytest.approx(mean)
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert [event["epoch"] for event in evaluations] == [0, 1]
    saved = [event for event in events if event["kind"] == "checkpoint"]
    assert [event["step"] for event in saved] == [3, 6]
    assert all(event["bytes"] > 0 for event in saved)


def test_metrics_of_an_epoch_are_whole_even_if_it_was_interrupted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = RunFolder(tmp_path / "whole")
    train(shards=2, folder=whole.path)
    run_ranks(2, lambda world: train(world, shards=2, folder=folder, stop_after=3))
    train(folder=folder)
    expected, got = (
        [e["metrics"]["loss"] for e in read_events(f) if e["kind"] == "epoch"]
        for f in (whole, RunFolder(folder))
    )
    assert got == pytest.approx(expected, rel=1e-5)


def test_what_a_restart_repeats_replaces_what_it_undoes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    options = RunOptions(progress="quiet", checkpoint_every=4)

    class Crash(Exception):
        pass

    def crash(world: World) -> None:
        for event_count, step in enumerate(make_run(world, folder.path, options)):
            if event_count == 6:
                raise Crash
            advance(step)

    run_ranks(2, crash, return_exceptions=True)
    net = make_run(None, folder.path, options)
    assert net.step == 4
    for step in net:
        advance(step)
    steps = [e for e in still_valid(read_events(folder)) if e["kind"] == "step"]
    numbers = sorted((event["step"], event["rank"]) for event in steps)
    assert numbers == [(s, r) for s in range(1, 5) for r in (0, 1)] + [(5, 0), (6, 0), (7, 0)]


def make_run(world: World | None, folder: Path, options: RunOptions = QUIET, **changed: Any) -> Run:
    net = mlp()
    arguments: dict[str, Any] = {"global_batch": 8, "epochs": 1, "shards": 2, **changed}
    dataset = arguments.pop("dataset", None) or Rows()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Run(net, optimizer, dataset, folder=folder, world=world, options=options, **arguments)


def advance(step: Any) -> None:
    with step:
        for x, y, _ in step.batches():
            out = step._training.engine(x)
            step.backward(F.cross_entropy(out, y))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, ["seed", 0, 1]),
        ({"global_batch": 6}, ["global_batch", 8, 6]),
        ({"shards": 4}, ["shards", 2, 4]),
        ({"dataset": Rows(49)}, ["dataset_size", 50, 49]),
        ({"options": RunOptions(progress="quiet", drop_last=True)}, ["drop_last", False]),
    ],
)
def test_a_folder_of_another_run_is_refused_by_every_worker(
    changed: dict[str, Any], message: list[object], tmp_path: Path
) -> None:
    for step in make_run(None, tmp_path / "run"):
        advance(step)
    errors = run_ranks(
        2, lambda world: make_run(world, tmp_path / "run", **changed), return_exceptions=True
    )
    for error in errors:
        assert isinstance(error, UsageError)
        assert says(str(error), *message)
        assert error.advice


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    for step in make_run(None, tmp_path / "run"):
        advance(step)
    net = nn.Linear(WIDTH, CLASSES)
    with pytest.raises(UsageError, match=r"model.* 'Sequential with 4 tensors"):
        Run(
            net, torch.optim.SGD(net.parameters()), Rows(), global_batch=8, epochs=1,
            folder=tmp_path / "run",
        )  # fmt: skip


def test_a_folder_without_checkpoints_is_known_by_its_run_json(tmp_path: Path) -> None:
    never = RunOptions(progress="quiet", checkpoint_every=0)
    next(iter(make_run(None, tmp_path / "run", never)))
    assert not (tmp_path / "run" / "checkpoints").exists()
    with pytest.raises(UsageError, match="belongs to another run"):
        make_run(None, tmp_path / "run", seed=1)


def test_a_damaged_folder_stops_every_worker(tmp_path: Path) -> None:
    for step in make_run(None, tmp_path / "run"):
        advance(step)
    for path in (tmp_path / "run" / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")

    def body(world: World) -> None:
        make_run(world, tmp_path / "run")

    with pytest.warns(UserWarning, match="cannot be used"):
        errors = run_ranks(2, body, return_exceptions=True)
    assert all(isinstance(error, CheckpointError) for error in errors)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    for step in make_run(None, tmp_path / "run"):
        advance(step)
    again = make_run(None, tmp_path / "run")
    assert again.step == again.steps == 7
    assert list(again) == []
    longer = make_run(None, tmp_path / "run", epochs=2)
    assert [advance(step) or step.number for step in longer] == list(range(8, 15))


def test_state_of_the_user_goes_on_too(tmp_path: Path) -> None:
    ema = mlp()
    for step in make_run(None, tmp_path / "run", state={"ema": ema}):
        advance(step)
        with torch.no_grad():
            ema[0].weight += 1  # type: ignore[index]
    other = mlp()
    make_run(None, tmp_path / "run", state={"ema": other})
    assert_same(dict(other.state_dict()), dict(ema.state_dict()), rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"state\['ema'\].* in.* checkpoint only"):
        make_run(None, tmp_path / "run")


def test_the_noise_scale_is_measured_on_the_way(tmp_path: Path) -> None:
    options = RunOptions(progress="quiet", noise_every=1)
    expected = train(shards=4)

    def body(world: World) -> Trained:
        return train(world, shards=4, options=options, folder=tmp_path / "run")

    workers = run_ranks(2, body)
    assert_same(workers[0].parameters, expected.parameters, rtol=1e-4, atol=1e-6)
    noise = [e for e in read_events(RunFolder(tmp_path / "run")) if e["kind"] == "noise"]
    assert len(noise) == 2
    assert noise[0]["noise_scale"] > 0
    assert "noise scale" in noise[-1]["advice"]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 3)])
def test_the_noise_scale_goes_on_where_a_run_was_stopped(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    options = RunOptions(progress="quiet", noise_every=1)

    def noise_of(folder: Path, *stops: int | None) -> list[float]:
        for size, stop in zip(sizes, stops, strict=False):
            run_ranks(
                size,
                lambda world, stop=stop: train(
                    world, shards=4, options=options, folder=folder, stop_after=stop
                ),
            )
        events = read_events(RunFolder(folder))
        return [event["noise_scale"] for event in events if event["kind"] == "noise"]

    whole = noise_of(tmp_path / "whole", None)
    assert noise_of(tmp_path / "stopped", 10, None) == pytest.approx(whole)


def test_sigterm_from_an_unknown_launcher_is_answered_once_the_others_are_known_to_live() -> None:
    said: list[str] = []
    request = StopRequest(said.append)
    request.hears_of_failures = False
    request.listen()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert said == []  # it may have been sent because another worker has failed
        request.say()
        request.say()
        signal.raise_signal(signal.SIGTERM)  # the same one, passed on twice
    finally:
        request.ignore()
    assert said == ["SIGTERM: finishing the step and saving; once more ends it at once."]
