"""Islands: exact where the mathematics says so, and equal on all workers after every round."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import IterableDataset, TensorDataset

from paceline import Callback, Islands, Run, RunOptions, World
from paceline.errors import UsageError
from paceline.islands import IslandPlace, IslandsError, Request
from paceline.run import islands as in_run
from paceline.telemetry import Message
from paceline.testing import run_ranks, seeded
from tests.archipelago import run_islands
from tests.sentences import says

X = torch.randn(53, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Endless(IterableDataset[Any]):
    """Samples that nobody has counted."""

    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


def train(
    world: World,
    islands: Islands | None,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: str = "SGD",
    model: nn.Module | None = None,
    epochs: int = 3,
    batch: int = 12,
    stop_after: int = 0,
    heard: list[str] | None = None,
    options: dict[str, Any] | None = None,
    decay: float = 1.0,
    evaluates: bool = False,
    seeds: bool = True,
    **more: Any,
) -> list[Tensor]:
    """The parameters after a short training on this worker."""
    net = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    if seeds:
        seeded(net)
    net = net.to(dtype)
    data = TensorDataset(X.to(dtype), Y)
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.1)
    chosen = {"progress": "quiet", "islands": islands, "handle_signals": False, **(options or {})}
    scheduler = None if decay == 1 else torch.optim.lr_scheduler.ExponentialLR(made, decay)
    run = Run(
        net,
        made,
        data,
        global_batch=batch,
        epochs=epochs,
        seed=3,
        world=world,
        options=RunOptions(**chosen),
        scheduler=scheduler,
        **more,
    )

    def score(batch: Any) -> dict[str, Tensor]:
        return {"loss": cross_entropy(net(batch[0]).float(), batch[1])}

    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(cross_entropy(run.model(x), y))
        if evaluates and step.number % 3 == 0:
            run.evaluate(score, data, batch=10, reduction="mean")
        if step.number == stop_after:
            run.save()
            break
    if heard is not None:
        heard += run._parts.outlets.lines
    return [value.detach().clone() for value in net.state_dict().values()]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(map(torch.equal, one, other))


def test_an_island_joins_when_all_of_its_workers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the others would wait in a round for one that has yet to start."""
    there: set[tuple[int, int]] = set()
    seen: dict[int, set[tuple[int, int]]] = {}
    attach = in_run.OuterUpdate.attach

    def come(update: in_run.OuterUpdate, run: Any, plan: Any) -> None:
        attach(update, run, plan)
        if run.place.world.rank:
            threading.Event().wait(0.3)  # long enough for the others to ask without it
        there.add((plan.island, run.place.world.rank))

    def ask(place: IslandPlace, head: dict[str, Any], *bodies: Any) -> Request:
        if head["ask"] == "join":
            seen[place.number] = {each for each in there if each[0] == place.number}
        return Request(place, head, *bodies)

    monkeypatch.setattr(in_run.OuterUpdate, "attach", come)
    monkeypatch.setattr(in_run, "Request", ask)
    run_islands(2, 2, lambda world, at: train(world, Islands(every=2, at=at), epochs=1))
    assert seen == {island: {(island, 0), (island, 1)} for island in range(2)}


def test_a_run_says_from_which_round_on_another_island_is_missing() -> None:
    """The second one stops after step 5."""
    said: list[tuple[str, str]] = []

    class Heard(Callback):
        def message(self, message: Message) -> None:
            said.append((message.level, message.text))

    def island(world: World, at: str) -> None:
        is_first = at.startswith("0")
        sinks = [Heard()] if is_first else []
        stop_after = 0 if is_first else 5
        train(world, Islands(every=4, at=at), stop_after=stop_after, sinks=sinks)

    run_islands(2, 1, island)
    assert any(level == "warning" and says(text, "Island 1", "step 8") for level, text in said)


def test_the_time_of_a_delayed_round_is_only_what_the_island_waits_when_it_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = threading.local()
    """Each island is a thread: 100 s pass while it trains on, and 7 while it waits."""

    def read_clock() -> float:
        return getattr(clock, "s", 0.0)

    class Timed(Request):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            clock.s = read_clock() + 100

        def wait(self, *args: Any) -> Any:
            clock.s = read_clock() + 7
            return super().wait(*args)

    waited: list[float] = []

    class Heard(Callback):
        def step(self, step: Any) -> None:
            waited.extend(v for name, v in step.metrics.items() if name == "island_round_s")

    monkeypatch.setattr(in_run, "Request", Timed)
    monkeypatch.setattr(in_run, "perf_counter", read_clock, raising=False)

    def island(world: World, at: str) -> None:
        train(world, Islands(every=4, delay=2, at=at), stop_after=6, sinks=[Heard()])

    run_islands(2, 1, island)
    assert waited == [7, 7]


@pytest.mark.parametrize(("count", "size"), [(2, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_a_round_in_every_step_with_plain_sgd_is_the_training_of_all_workers(
    count: int, size: int, dtype: torch.dtype, close: float
) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=1, outer="sgd", at=at), dtype=dtype)

    [whole] = run_ranks(1, lambda world: train(world, None, dtype=dtype))
    for workers in run_islands(count, size, island):
        for mine in workers:
            for got, expected in zip(mine, whole, strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=close)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_one_island_that_assigns_its_average_has_the_bits_of_a_plain_run(
    size: int, optimizer: str
) -> None:
    islands = Islands(every=4, lr=1, momentum=0)

    def both(world: World) -> tuple[list[Tensor], list[Tensor]]:
        plain = train(world, None, dtype=torch.float32, optimizer=optimizer)
        return plain, train(world, islands, dtype=torch.float32, optimizer=optimizer)

    for plain, island in run_ranks(size, both):
        assert_equal(plain, island)


TOGETHER: list[dict[str, Any]] = [
    {"options": {"precision": "bf16"}},
    {"options": {"precision": "fp16"}},
    {"shards": 6, "decay": 0.9},
    {"options": {"clip_norm": 0.1, "check_finite": "all"}},
    {"options": {"merge_shards": True}, "shards": 4},
    {"options": {"fit": "auto"}},
    {"options": {"noise_every": 2}, "shards": 4},
    {"options": {"checkpoint_every": 3, "best_metric": "loss"}, "evaluates": True},
    {"options": {"shuffle": False, "drop_last": True}},
]
"""Other options of a run, with which islands work."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("more", TOGETHER, ids=str)
def test_one_island_that_assigns_its_average_has_the_bits_of_a_run_with_the_same_options(
    more: dict[str, Any], size: int, tmp_path: Path
) -> None:
    def one(world: World, name: str, islands: Islands | None) -> list[Tensor]:
        folder = tmp_path / name
        return train(world, islands, dtype=torch.float32, optimizer="AdamW", folder=folder, **more)

    def both(world: World) -> tuple[list[Tensor], list[Tensor]]:
        return one(world, "plain", None), one(world, "island", Islands(every=4, lr=1, momentum=0))

    for plain, island in run_ranks(size, both):
        assert_equal(plain, island)


@pytest.mark.parametrize("more", TOGETHER, ids=str)
def test_islands_that_average_rarely_end_alike_with_other_options(
    more: dict[str, Any], tmp_path: Path
) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        islands = Islands(every=4, bits=8, fragments=2, delay=1, at=at)
        return train(
            world, islands, dtype=torch.float32, optimizer="AdamW", folder=tmp_path, **more
        )

    [first], [second] = run_islands(2, 1, island)
    assert_equal(first, second)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 16},
        {"bits": 8},
        {"outer": "sgd", "momentum": 0.3, "lr": 0.9},
        {"fragments": 2},
        {"fragments": 2, "delay": 1, "bits": 16},
        {"delay": 3, "momentum": 0, "lr": 1},
    ],
    ids=str,
)
def test_all_workers_of_all_islands_end_with_the_same_bits(options: dict[str, Any]) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=4, at=at, **options), optimizer="AdamW")

    (first, *others), second = run_islands(2, 2, island)
    for workers in [*others, *second]:
        assert_equal(first, workers)


def test_islands_whose_learning_rates_differ_end_alike() -> None:
    def island(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=4, at=at), decay=0.9 if at.startswith("0") else 0.7)

    [first], [second] = run_islands(2, 1, island)
    assert_equal(first, second)


def simulate(
    dealt: list[list[list[int]]],
    fragments: int,
    period: int,
    delay: int,
    lr: float,
    momentum: float,
) -> list[Tensor]:
    """Streaming islands written down plainly: `dealt` has the samples by island and step."""
    nets = []
    for _ in dealt:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        seeded(net)
        nets.append(net.double())
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    names = (
        [["0.weight"], ["0.bias", "2.weight", "2.bias"]]
        if fragments == 2
        else [[*nets[0].state_dict()]]
    )
    of_net = [dict(net.named_parameters()) for net in nets]
    anchor = {name: param.detach().clone() for name, param in of_net[0].items()}
    velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
    seen = [[0] * fragments for _ in nets]
    """Samples by island and fragment since it began to be exchanged."""
    flying: list[tuple[int, int, list[dict[str, Tensor]], list[int]]] = []
    last = len(dealt[0])

    def begin(step: int, fragment: int) -> None:
        local = [{n: params[n].detach().clone() for n in names[fragment]} for params in of_net]
        flying.append((step, fragment, local, [each[fragment] for each in seen]))
        for each in seen:
            each[fragment] = 0

    def land() -> None:
        _, fragment, local, weights = flying.pop(0)
        for name in names[fragment]:
            pairs = zip(weights, local, strict=True)
            move = sum(w * (each[name] - anchor[name]) for w, each in pairs) / sum(weights)
            velocity[name] = momentum * velocity[name] + move
            anchor[name] = anchor[name] + lr * (move + momentum * velocity[name])
            for params, each in zip(of_net, local, strict=True):
                params[name].data += anchor[name] - each[name]

    for step in range(1, last + 1):
        for island, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            rows = dealt[island][step - 1]
            optimizer.zero_grad()
            cross_entropy(net(X[rows].double()), Y[rows]).backward()
            optimizer.step()
            seen[island] = [count + len(rows) for count in seen[island]]
        if flying and (step == last or flying[0][0] + delay == step):
            land()
        if step == last:
            for fragment in range(fragments):
                begin(step, fragment)
                land()
        elif step % period == 0:
            begin(step, (step // period - 1) % fragments)
            if not delay:
                land()
    return [param.detach() for param in of_net[0].values()]


@pytest.mark.parametrize(
    ("fragments", "delay"), [(1, 0), (1, 3), (2, 0), (2, 1)], ids=lambda each: str(each)
)
def test_streaming_is_what_a_plain_simulation_computes(fragments: int, delay: int) -> None:
    dealt: dict[int, list[list[int]]] = {0: [], 1: []}

    def island(world: World, at: str) -> list[Tensor]:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        seeded(net)
        net = net.double()
        options = Islands(every=4, lr=0.9, momentum=0.6, fragments=fragments, delay=delay, at=at)
        run = Run(
            net,
            torch.optim.AdamW(net.parameters(), lr=0.1),
            TensorDataset(X.double(), Y, torch.arange(len(X))),
            global_batch=12,
            epochs=3,
            seed=3,
            world=world,
            options=RunOptions(progress="quiet", islands=options, handle_signals=False),
        )
        for step in run:
            rows: list[int] = []
            with step:
                for x, y, number in step.batches():
                    rows += number.tolist()
                    step.backward(cross_entropy(run.model(x), y))
            dealt[int(at[0])].append(rows)
        return [value.detach().clone() for value in net.state_dict().values()]

    [first], [second] = run_islands(2, 1, island)
    expected = simulate([dealt[0], dealt[1]], fragments, 4 // fragments, delay, 0.9, 0.6)
    assert_equal(first, second)
    for got, wanted in zip(first, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def test_statistics_of_batch_norm_are_averaged_too() -> None:
    def island(world: World, at: str) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        return train(world, Islands(every=5, at=at), model=model)

    [first], [second] = run_islands(2, 1, island)
    assert_equal(first, second)


@pytest.mark.parametrize("delay", [0, 2])
def test_infinities_in_buffers_stay_what_they_are(delay: int) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        return [*train(world, Islands(every=4, delay=delay, at=at), model=model), model.mask]

    for [(*_, mask)] in run_islands(2, 1, island):
        assert torch.equal(mask, torch.full_like(mask, -torch.inf).triu(1))


def test_frozen_parameters_that_differ_become_those_of_the_first_island() -> None:
    def island(world: World, at: str) -> list[Tensor]:
        frozen = nn.Linear(8, 2).requires_grad_(False)
        model = nn.Sequential(nn.Linear(6, 8), frozen)
        seeded(model)
        with torch.no_grad():
            frozen.bias.fill_(int(at[0]))
        return train(world, Islands(every=4, at=at), model=model, seeds=False)

    [first], [second] = run_islands(2, 1, island)
    assert_equal(first, second)


@pytest.mark.parametrize(
    "options",
    [{}, {"bits": 8}, {"fragments": 2, "delay": 1, "bits": 16}, {"momentum": 0.5}],
    ids=str,
)
@pytest.mark.parametrize("stop_after", [4, 6])
def test_a_resume_has_the_bits_of_an_undisturbed_run(
    options: dict[str, Any], stop_after: int, tmp_path: Path
) -> None:
    def island(world: World, at: str, stop_after: int, folder: Path | None) -> list[Tensor]:
        islands = Islands(every=4, at=at, **options)
        how = {"optimizer": "AdamW", "decay": 0.9, "folder": folder, "stop_after": stop_after}
        return train(world, islands, **how)

    def whole(world: World, at: str) -> list[Tensor]:
        return island(world, at, 0, None)

    def begin(world: World, at: str) -> list[Tensor]:
        return island(world, at, stop_after, tmp_path)

    def resume(world: World, at: str) -> list[Tensor]:
        return island(world, at, 0, tmp_path)

    expected = run_islands(2, 1, whole)
    run_islands(2, 1, begin)
    for got, wanted in zip(run_islands(2, 1, resume), expected, strict=True):
        assert_equal(got[0], wanted[0])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 1), (1, 2)])
def test_a_resume_with_another_number_of_islands_says_what_changes(
    before: int, after: int, tmp_path: Path
) -> None:
    heard: list[str] = []

    def begin(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=4, at=at), folder=tmp_path, stop_after=6)

    def resume(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=4, at=at), folder=tmp_path, heard=heard)

    run_islands(before, 1, begin)
    (first,), *others = run_islands(after, 1, resume)
    for [other] in others:
        assert_equal(first, other)
    assert any(says(line, before, "island" if before == 1 else "islands", after) for line in heard)


def test_every_island_has_the_points_of_its_trackers_in_its_own_folder(tmp_path: Path) -> None:
    def island(world: World, at: str) -> list[Tensor]:
        return train(world, Islands(every=4, at=at), folder=tmp_path, trackers=["csv"])

    run_islands(2, 1, island)
    for folder in (tmp_path, tmp_path / "island-1"):
        with open(folder / "metrics.csv", newline="") as file:
            steps = [int(row["step"]) for row in csv.DictReader(file) if row["kind"] == "train"]
        assert steps == list(range(1, 16))
        assert (folder / "tracker-csv.json").exists()


def test_an_island_without_islands_in_its_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_ISLAND", "0/2@/nowhere")
    with pytest.raises(UsageError):
        run_ranks(1, lambda world: train(world, None))


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ({"same_bits": True}, {}),
        ({"update": "sharded"}, {}),
        ({"ema": 0.9}, {}),
        ({"patience": 1, "best_metric": "loss"}, {}),
        ({}, {"global_batch": 13}),
        ({}, {"shards": 7}),
        ({}, {"dataset": TensorDataset(X[:49], Y[:49])}),
        ({}, {"dataset": Endless()}),
        ({}, {"dataset": None, "loader": [(X[:12], Y[:12])], "global_batch": None}),
        ({"islands": 3}, {}),
        ({"islands": Islands(every=6, fragments=3)}, {}),
        ({"islands": Islands(at="0/2")}, {}),
    ],
    ids=[
        *(
            "same_bits",
            "sharded",
            "ema",
            "patience",
            "unequal",
            "more shards than samples",
            "a last batch of one sample",
        ),
        *("a dataset without a length", "loader", "a number", "more fragments than parameters"),
        "a place without an address",
    ],
)
def test_what_does_not_go_with_islands_is_refused(
    options: dict[str, Any], more: dict[str, Any]
) -> None:
    net = nn.Linear(6, 2)
    values = {"dataset": TensorDataset(X, Y), "global_batch": 12, "epochs": 1, **more}
    chosen = {"islands": Islands(at="0/2@/nowhere"), "progress": "quiet", **options}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError) as refused:
        Run(net, optimizer, options=RunOptions(**chosen), **values)
    assert refused.value.advice


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    net = nn.Linear(6, 2).requires_grad_(False)
    options = RunOptions(islands=Islands(), progress="quiet")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError) as refused:
        Run(net, optimizer, TensorDataset(X, Y), global_batch=12, epochs=1, options=options)
    assert refused.value.advice


def test_parameters_that_are_not_real_numbers_are_refused() -> None:
    net = nn.Linear(6, 2, dtype=torch.complex64)
    options = RunOptions(islands=Islands(), progress="quiet")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError) as refused:
        Run(net, optimizer, TensorDataset(X, Y), global_batch=12, epochs=1, options=options)
    assert refused.value.advice


def test_several_models_on_islands_are_refused() -> None:
    net = nn.Linear(6, 2)
    options = RunOptions(islands=Islands(), progress="quiet")
    models = {"net": (net, torch.optim.SGD(net.parameters(), lr=0.1))}
    with pytest.raises(UsageError, match="several models"):
        Run(models, TensorDataset(X, Y), global_batch=12, epochs=1, options=options)


def test_a_layer_that_is_unfrozen_later_is_refused() -> None:
    net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    net[0].requires_grad_(False)
    options = RunOptions(islands=Islands(every=3), progress="quiet", handle_signals=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run(net, optimizer, TensorDataset(X, Y), global_batch=12, epochs=2, options=options)

    def train_all() -> None:
        for step in run:
            with step:
                net[0].requires_grad_(step.number > 1)
                for x, y in step.batches():
                    step.backward(cross_entropy(run.model(x), y))

    with pytest.raises(UsageError, match=r"0\.weight"):
        train_all()


def test_the_meeting_place_out_of_reach_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.islands.client.LOCAL_REACH_S", 0.3)
    with pytest.raises(IslandsError, match="/nowhere"):
        run_ranks(1, lambda world: train(world, Islands(at="0/2@/nowhere")))
