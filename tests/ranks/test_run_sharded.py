"""A run whose update is shared out: the same training, and the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, Told, Trained, assert_same, mlp, train
from sentences import says
from torch.nn import functional as F

from paceline import DDPOptions, DistributedDataParallel, World
from paceline.errors import UsageError
from paceline.run import Run, RunOptions
from paceline.testing import assert_replicas_equal, run_ranks
from paceline.update.sharded import describe_sharing, is_worth_sharing


def options(update: str, **rest: Any) -> RunOptions:
    return RunOptions(progress="quiet", update=update, checkpoint_every=3, **rest)  # type: ignore[arg-type]


def trained(
    size: int, update: str, folder: Path | None = None, stop: int | None = None, **rest: Any
) -> list[Trained]:
    def body(world: World) -> Trained:
        return train(
            world, options=options(update, **rest), folder=folder, stop_after=stop, shards=4
        )

    return run_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_run_gives_the_parameters_of_the_whole_update(size: int) -> None:
    whole = trained(size, "whole", clip_norm=0.5)
    sharded = trained(size, "sharded", clip_norm=0.5)
    assert_replicas_equal([each.parameters for each in (*whole, *sharded)])


def test_a_chain_of_starts_at_3_1_4_and_2_workers_is_one_training(tmp_path: Path) -> None:
    expected = trained(1, "whole")[0].parameters
    for size, update, stop in ((3, "sharded", 3), (1, "whole", 3), (4, "sharded", 3)):
        trained(size, update, tmp_path / "run", stop)
    for each in trained(2, "sharded", tmp_path / "run"):
        assert_same(each.parameters, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("update", ["whole", "sharded"])
def test_state_is_resumed_by_name_where_the_optimizer_has_another_order(
    update: str, tmp_path: Path
) -> None:
    def part(world: World, turned: bool, folder: Path, steps: int) -> dict[str, Any]:
        net = mlp()
        params = list(net.parameters())
        optimizer = torch.optim.AdamW(params[::-1] if turned else params, lr=0.05)
        run = Run(
            *(net, optimizer, Rows(24)),
            global_batch=4,
            epochs=1,
            shards=2,
            world=world,
            folder=folder,
            options=options(update),
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if step.number == steps:
                run.save()
                break
        return dict(net.state_dict())

    run_ranks(2, part, False, tmp_path / "run", 3)
    resumed = run_ranks(2, part, True, tmp_path / "run", 99)
    assert_replicas_equal([*resumed, *run_ranks(2, part, False, tmp_path / "through", 99)])


def test_a_second_optimizer_of_the_model_is_refused_unless_the_run_saves_it() -> None:
    net = mlp()
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[2]))
    for state in ({}, {"second": second}):
        run = Run(
            *(net, first, Rows(8)), global_batch=8, epochs=1, state=state, options=options("whole")
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if state:
                second.step()
            else:
                with pytest.raises(UsageError, match="SGD"):
                    second.step()
    second.step()


def test_a_step_that_the_user_steps_himself_is_refused_and_the_run_continues() -> None:
    def body(world: World) -> dict[str, Any]:
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters())
        rows = Rows(8)
        run = Run(
            *(net, optimizer, rows),
            global_batch=4,
            epochs=1,
            world=world,
            options=options("sharded"),
        )
        for step in run:
            with pytest.raises(UsageError, match="inside a step"), step:
                optimizer.step()
            break
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]
        return dict(net.state_dict())

    assert_replicas_equal(run_ranks(2, body))


def test_auto_shares_out_what_is_large_enough_where_nothing_is_lost() -> None:
    class Tuned(torch.optim.AdamW):
        pass

    def choose(numel: int, make: Any = torch.optim.AdamW, **rest: Any) -> bool:
        optimizer = make([torch.nn.Parameter(torch.empty(numel))])
        return is_worth_sharing(optimizer, **{"size": 2, "can_survive": False, **rest})

    assert choose(2**20)
    assert not choose(2**20 - 1)
    assert not choose(2**20, size=1)
    assert choose(2**20, can_survive=True)
    assert not choose(2**20, Tuned, can_survive=True, elementwise=True)
    assert not choose(2**20, Tuned)
    assert choose(2**20, Tuned, elementwise=True)


@pytest.mark.parametrize(
    ("transport", "is_saved", "words"),
    [
        ("auto", False, "takes nothing along"),
        ("c10d", True, "newest checkpoint"),
        ("c10d", False, "ends the run"),
    ],
)
def test_a_run_that_could_survive_says_what_a_death_costs(
    transport: str, is_saved: bool, words: str
) -> None:
    def body(world: World) -> list[str]:
        options = DDPOptions(transport=transport)
        model = DistributedDataParallel(mlp(), process_group=world.group, options=options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return describe_sharing(model, optimizer, can_survive=True, is_saved=is_saved)

    (line,) = run_ranks(2, body)[0]
    assert says(line, words)


def test_a_run_says_that_its_update_is_shared_out() -> None:
    def body(world: World) -> list[str]:
        told = Told()
        rows = Rows(8)
        net = mlp()
        run = Run(
            *(net, torch.optim.SGD(net.parameters(), lr=0.1), rows),
            global_batch=4,
            epochs=1,
            world=world,
            sinks=[told],
            options=options("sharded"),
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
        return [str(args) for name, args in told.calls if name == "start"]

    lines = run_ranks(2, body)[0]
    assert says(lines[0], "each of 2 workers steps its share of", "parameters")
