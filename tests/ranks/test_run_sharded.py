"""A run whose update is shared out: the same training, and the same checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, Told, Trained, assert_same, mlp, train
from torch.nn import functional as F

from paceline import World
from paceline.errors import UsageError
from paceline.run import Run, RunOptions
from paceline.testing import assert_replicas_equal, run_ranks
from paceline.update.choice import choose_update, describe_sharing


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
    def choose(numel: int, **rest: Any) -> bool:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.empty(numel))])
        return choose_update("auto", optimizer, **{"size": 2, "can_survive": False, **rest})

    assert choose(2**20)
    assert not choose(2**20 - 1)
    assert not choose(2**20, size=1)
    assert not choose(2**20, can_survive=True)


@pytest.mark.parametrize(
    ("is_saved", "words"),
    [(True, "the others go back to the newest checkpoint"), (False, "its death ends the run")],
)
def test_a_run_that_could_survive_says_what_a_death_costs(is_saved: bool, words: str) -> None:
    optimizer = torch.optim.SGD(mlp().parameters(), lr=0.1)
    (line,) = describe_sharing(optimizer, 2, can_survive=True, is_saved=is_saved)
    assert words in line


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
    assert "each of 2 workers steps its share of the parameters" in lines[0]
