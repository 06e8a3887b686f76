"""Steps that run out of memory are done again in smaller pieces, with the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, WIDTH, Rows, Told
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import DDPOptions, DistributedDataParallel
from paceline.data.plan import Plan
from paceline.ddp import NaiveEngine
from paceline.errors import FitError, UsageError
from paceline.group.world import World
from paceline.run import Run, RunOptions, fit
from paceline.testing import run_processes, run_ranks, seeded
from tests.faults.memory import Full

WHOLE = 10**6


class Net(nn.Module):
    """Layers on a device that holds `limit` rows, in `where`: forward or backward."""

    def __init__(self, limit: int, where: str, middle: nn.Module) -> None:
        super().__init__()
        self.limit, self.where, self.trouble = limit, where, 0
        self.below, self.middle = nn.Linear(WIDTH, 16), middle
        self.above = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.below(x))
        if len(x) > self.limit and self.where in ("forward", "backward"):
            self.trouble += 1
            if self.where == "forward" or not torch.is_grad_enabled():
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
            x = Full.apply(x)  # type: ignore[no-untyped-call]
        return self.above(self.middle(x))  # type: ignore[no-any-return]


class Doubles(Rows):
    def __getitem__(self, index: int) -> Any:
        x, y, number = super().__getitem__(index)
        return x.double(), y, number


def train(
    world: World | None = None,
    *,
    limit: int = WHOLE,
    who: int | None = None,
    where: str = "forward",
    option: Any = "auto",
    middle: Any = nn.Identity,
    buckets: bool = False,
    evaluates: bool = False,
    options: dict[str, Any] | None = None,
    sinks: Any = (),
    rows: Any = None,
    overflow: int = -1,
    **given: Any,
) -> dict[str, Any]:
    """Train where rank `who`, or all, have memory for `limit` rows.

    The gradients of the sample `overflow` are too large for 16 bits.
    """
    rank = 0 if world is None else world.rank
    mine = limit if who in (None, rank) else WHOLE
    rows = rows or Doubles(30)
    net = seeded(Net(mine, where, middle())).to(rows[0][0].dtype)
    model: Any = net
    if buckets and world is not None:
        model = DistributedDataParallel(net, process_group=world.group, bucket_cap_mb=1e-4)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    arguments = {"global_batch": 12, "epochs": 2, "shards": 3, "world": world, **given}
    run = Run(
        *(model, optimizer, rows),
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.8),
        options=RunOptions(progress="quiet", fit=option, **(options or {})),
        sinks=sinks,
        **arguments,
    )
    scores = []
    for step in run:
        with step:
            for x, y, numbers in step.batches():
                factor = 1e30 if overflow in numbers else 1.0
                step.backward(F.cross_entropy(run.model(x), y) * factor)
        if evaluates:
            found = run.evaluate(lambda b: {"loss": F.cross_entropy(run.model(b[0]), b[1])})
            scores += [found] * step.is_applied
    state = {name: value.detach().clone() for name, value in net.state_dict().items()}
    training = run._parts.training
    scaler = training.update.parts.get("scaler")
    return {
        "state": state,
        "size": training.fit.size,
        "trouble": net.trouble,
        "scores": scores,
        "scaler": scaler and scaler.state_dict(),
    }


def assert_close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("who", [None, 0, -1])
@pytest.mark.parametrize("given", [{}, {"buckets": True}, {"engine": NaiveEngine}])
def test_gradients_are_those_of_whole_shards(
    size: int, where: str, who: int | None, given: Any
) -> None:
    expected = train()
    who = size - 1 if who == -1 else who
    found = run_ranks(size, lambda world: train(world, limit=1, who=who, where=where, **given))
    for rank, each in enumerate(found):
        assert_close(each["state"], expected["state"])
        assert each["size"] == 1
        assert bool(each["trouble"]) == (who in (None, rank))


ALONG: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "several shards a worker": ({"shards": 4, "global_batch": 16}, {}),
    "merged shards": ({"shards": 6}, {"merge_shards": True}),
    "a worker without a shard": ({"shards": 1}, {}),
    "clipping and an average": ({}, {"clip_norm": 0.1, "ema": 0.9, "check_finite": "all"}),
    "a shared update": ({"buckets": True}, {"update": "sharded"}),
    "noise": ({"shards": 4}, {"noise_every": 1}),
    "a recorded step": ({}, {"trace_step": 2}),
    "compression": ({"ddp": DDPOptions(compression="bf16")}, {}),
    "loader processes": ({"loader_workers": 1}, {}),
}


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_it_is_exact_along_with(along: str, where: str, tmp_path: Path) -> None:
    arguments, options = ALONG[along]
    given = {**arguments, "options": options, "evaluates": True}
    size = 2

    def both(world: World) -> tuple[Any, Any]:
        folder = {"folder": tmp_path / "fits"} if "trace_step" in options else {}
        expected = train(world, option="off", **given, **folder)
        folder = dict.fromkeys(folder, tmp_path / "short")
        who = 0 if along == "a worker without a shard" else 1
        return expected, train(world, limit=2, who=who, where=where, **given, **folder)

    for expected, found in run_ranks(size, both):
        tolerance = {"rtol": 1e-10, "atol": 1e-12}
        if along == "compression":
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(found["state"], expected["state"], **tolerance)
        torch.testing.assert_close(found["scores"], expected["scores"], **tolerance)
        assert found["size"] is not None
        assert found["size"] <= 2


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_gradients_of_16_bits_are_those_of_a_run_that_begins_with_the_size(
    size: int, where: str, precision: str, update: str
) -> None:
    options = {"precision": precision, "clip_norm": 1.0, "update": update}
    given: Any = {"rows": Rows(30), "options": options}
    expected, whole = train(option=2, **given), train(**given)
    torch.testing.assert_close(expected["state"], whole["state"], rtol=0, atol=2e-2)

    def body(world: World) -> Any:
        found = train(world, limit=2, who=size - 1, where=where, evaluates=True, **given)
        assert not torch.is_autocast_enabled("cpu")
        return found

    for found in run_ranks(size, body):
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=1e-5)
        assert found["scaler"] == expected["scaler"]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("shard", [0, 1, 2])
def test_a_piece_that_overflows_skips_the_whole_step_everywhere(
    size: int, where: str, shard: int
) -> None:
    first = next(iter(Plan(samples=30, global_batch=12, shards=3, epochs=2).portions(0, 0, 1)))
    given = {"rows": Rows(30), "options": {"precision": "fp16"}}
    given["overflow"] = first.shards[shard].indices[-1]  # in the step in which memory runs out
    whole, expected = train(**given), train(option=2, **given)
    assert whole["scaler"] == expected["scaler"]
    assert whole["scaler"]["scale"] == 2.0**14  # once in each of two epochs
    for found in run_ranks(size, lambda world: train(world, limit=2, where=where, **given)):
        torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=1e-5)
        assert found["scaler"] == expected["scaler"]
        assert found["trouble"]


def train_with_dropout(world: World | None, given: dict[str, Any]) -> dict[str, Any]:
    return train(world, middle=lambda: nn.Dropout(0.4), **given)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_random_numbers_are_those_of_a_run_that_begins_with_the_size(where: str) -> None:
    expected = train_with_dropout(None, {"option": 2})
    whole = train_with_dropout(None, {})
    assert not torch.equal(whole["state"]["below.weight"], expected["state"]["below.weight"])
    # In processes, because threads share the random numbers of dropout.
    for size in (1, 2):
        short = {"limit": 3, "who": 0, "where": where}
        for found in run_processes(size, train_with_dropout, short):
            assert_close(found["state"], expected["state"])
            assert found["size"] == 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sample_that_does_not_fit_ends_the_run_and_says_what_was_tried(size: int) -> None:
    def body(world: World) -> None:
        with pytest.raises(FitError, match=r"(?s)Tried to allocate 1.00 GiB.*4, 2, 1"):
            train(world, limit=0, who=size - 1)

    run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("option", ["off", None])
def test_without_the_option_it_is_an_error_of_the_script(size: int, option: str | None) -> None:
    def body(world: World) -> None:
        with pytest.raises(torch.OutOfMemoryError, match=r"1.00 GiB"):
            train(world, limit=2, option=option)

    run_ranks(size, body)


def test_batch_statistics_are_refused_in_training_mode_only() -> None:
    with pytest.raises(UsageError, match=r"(?s)rank 0.*'middle'.*BatchNorm1d"):
        train(limit=2, middle=lambda: nn.BatchNorm1d(16))
    with pytest.raises(UsageError, match="'middle'"):
        train(option=2, middle=lambda: nn.BatchNorm1d(16))
    frozen = train(limit=2, middle=lambda: Frozen(16))
    assert_close(frozen["state"], train(middle=lambda: Frozen(16))["state"])


class Frozen(nn.BatchNorm1d):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.eval()

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self


class Counter(nn.Module):
    """Counts its calls, as layers do that warm up."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x / (1 + self.calls)


@pytest.mark.parametrize("shards", [1, 3])
def test_buffers_count_a_shard_once(shards: int) -> None:
    given = {"middle": Counter, "shards": shards}
    expected = train(**given)
    for size in (1, 2):
        for found in run_ranks(size, lambda world: train(world, limit=1, **given)):
            assert_close(found["state"], expected["state"])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_evaluation_is_scored_in_parts(size: int) -> None:
    def score(world: World | None, limit: int) -> Any:
        net = seeded(Net(limit, "forward", nn.Identity())).double()
        options = RunOptions(progress="quiet", fit="auto")
        optimizer = torch.optim.SGD(net.parameters())
        given: Any = {"global_batch": 12, "epochs": 1, "options": options, "world": world}
        run = Run(net, optimizer, Doubles(30), **given)
        loss = run.evaluate(lambda b: {"loss": F.cross_entropy(run.model(b[0]), b[1])}, batch=7)
        seen: list[Tensor] = []

        def collect(out: Tensor, rows: Tensor) -> dict[str, float]:
            seen.append(rows)
            return {"sum": out.sum().item()}

        total = run.evaluate(lambda b: (run.model(b[0]), b[2]), batch=7, collect=collect)
        return loss, total, seen

    expected = score(None, WHOLE)
    for rank, found in enumerate(run_ranks(size, lambda world: score(world, 7 - 2 * world.rank))):
        assert_close(found[:2], expected[:2])
        if rank == 0:
            assert torch.equal(found[2][0], torch.arange(30))
    with pytest.raises(FitError, match=r"1.00 GiB"):
        score(None, 0)


def test_larger_pieces_are_tried_again_and_not_twice_in_vain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fit, "CALM_STEPS", 3)
    told = Told()
    found = train(limit=2, epochs=6, sinks=[told])
    sizes = [m.facts["piece"] for m in told.of("message") if m.kind == "fit"]
    assert sizes == [2, 4, 2]
    assert found["size"] == 2
    assert [report.piece for report in told.of("step")] == [2] * 18


def test_a_resumed_run_begins_with_the_size(tmp_path: Path) -> None:
    options = {"checkpoint_every": 1}
    expected = train(epochs=2)
    short = {"limit": 2, "options": options, "folder": tmp_path}
    assert train(epochs=1, **short)["trouble"]
    found = train(epochs=2, **short)
    assert not found["trouble"]
    assert found["size"] == 2
    assert_close(found["state"], expected["state"])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"options": {"same_bits": True}}, "same_bits"),
        ({"middle": lambda: nn.SyncBatchNorm(16)}, "SyncBatchNorm"),
        ({"option": 0}, "fit"),
        ({"option": True}, "fit"),
        ({"option": "of"}, "off"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(given: Any, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        train(**given)


def contrast(out: Tensor) -> Tensor:
    return (out @ out.T).logsumexp(1).mean() - out.square().mean()


def train_joint(
    world: World | None, limit: int, who: int, where: str, precision: Any = "", option: Any = "auto"
) -> dict[str, Tensor]:
    rank = 0 if world is None else world.rank
    rows = Rows(30) if precision else Doubles(30)
    net = seeded(Net(limit if who == rank else WHOLE, "", nn.Identity())).to(rows[0][0].dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    given: Any = {"global_batch": 12, "epochs": 2, "shards": 4, "world": world}
    options = RunOptions(progress="quiet", fit=option, clip_norm=1.0, precision=precision or "fp32")
    run = Run(net, optimizer, rows, options=options, **given)
    full = False

    def encode(batch: Any) -> Any:
        is_first = not torch.is_grad_enabled()
        net.where = {"first": "forward", "second": "forward"}.get(where, where)
        net.where *= is_first == (where == "first")
        return run.model(batch[0])

    def loss(out: Tensor) -> Tensor:
        nonlocal full
        if where == "loss" and who == rank and not full:
            full = True
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return contrast(out)

    for step in run:
        with step:
            step.joint(encode, loss)
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("where", ["first", "second", "backward", "loss"])
def test_a_joint_loss_is_that_of_whole_shards(size: int, where: str) -> None:
    expected = train_joint(None, WHOLE, 0, "first")
    for found in run_ranks(size, lambda world: train_joint(world, 1, size - 1, where)):
        assert_close(found, expected)


def train_turns(
    world: World | None, limit: int, who: int, where: str, precision: Any = "", option: Any = "auto"
) -> dict[str, Tensor]:
    rank = 0 if world is None else world.rank
    rows = Rows(30) if precision else Doubles(30)
    mine = limit if who == rank else WHOLE
    made = seeded(Net(mine, where, nn.Identity())).to(rows[0][0].dtype)
    judge = seeded(nn.Linear(CLASSES, 1)).to(rows[0][0].dtype)
    models = {
        "made": (made, torch.optim.AdamW(made.parameters(), lr=0.01)),
        "judge": (judge, torch.optim.AdamW(judge.parameters(), lr=0.01)),
    }
    given: Any = {"global_batch": 12, "epochs": 2, "shards": 4, "world": world}
    options = RunOptions(progress="quiet", fit=option, precision=precision or "fp32")
    run = Run(models, rows, options=options, **given)
    made_by, judged = run.models["made"], run.models["judge"]
    for step in run:
        with step:
            with step.turn("judge"):
                made.where = ""
                for x, _, _ in step.batches():
                    step.backward(judged(made_by(x).detach()).square().mean())
            with step.turn("made"):
                made.where = where
                for x, y, _ in step.batches():
                    out = made_by(x)
                    step.backward(F.cross_entropy(out, y) + judged(out).mean())
    state = {**made.state_dict(prefix="made."), **judge.state_dict(prefix="judge.")}
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_turns_of_several_models_are_done_again_one_by_one(size: int, where: str) -> None:
    expected = train_turns(None, WHOLE, 0, where)
    for found in run_ranks(size, lambda world: train_turns(world, 2, size - 1, where)):
        assert_close(found, expected)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("train_so", "where"),
    [(train_joint, "first"), (train_joint, "backward"), (train_turns, "backward")],
)
def test_joint_losses_and_turns_of_16_bits_are_those_of_a_run_that_begins_with_the_size(
    size: int, precision: str, train_so: Any, where: str
) -> None:
    expected = train_so(None, WHOLE, 0, where, precision, 2)
    for found in run_ranks(size, lambda world: train_so(world, 2, size - 1, where, precision)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return map(Doubles(30).__getitem__, range(30))


def own_loader(world: World) -> Any:
    """Batches that are cut as those of `Stream` are."""
    rows = [Doubles(30)[index] for index in range(30)]
    batches = [rows[start : start + 12][world.rank :: world.size] for start in (0, 12, 24)]
    return [torch.utils.data.default_collate(batch) for batch in batches]


def own_processes(world: World) -> Any:
    """Batches of two processes, of which each has read ahead when memory runs out."""
    mine = range(30)[world.rank :: world.size]
    rows = torch.utils.data.Subset(Doubles(30), mine)
    return torch.utils.data.DataLoader(rows, batch_size=6, num_workers=2)


def train_on(world: World, given: dict[str, Any], limit: int) -> dict[str, Tensor]:
    net = seeded(Net(limit, "backward", nn.Identity())).double()
    options = RunOptions(progress="quiet", fit="auto", drop_last=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    arguments: Any = {"global_batch": 12, "epochs": 2, "world": world, **given}
    run = Run(net, optimizer, options=options, **arguments)
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    "given",
    [{"dataset": Stream(), "shards": 2}, {"loader": own_loader}, {"loader": own_processes}],
)
def test_streams_and_loaders_of_ones_own_are_read_again(given: dict[str, Any]) -> None:
    def both(world: World) -> Any:
        return [train_on(world, given, limit if world.rank else WHOLE) for limit in (WHOLE, 2)]

    for expected, found in run_ranks(2, both):
        assert_close(found, expected)
