"""What a run that continues has from its checkpoint, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import QUIET, Rows, Told, mlp
from torch import Tensor, optim
from torch.nn import functional as F

from paceline.group.world import World
from paceline.run import Run, RunOptions
from paceline.testing import run_ranks


@pytest.mark.parametrize("size", [1, 2])
def test_a_group_that_was_added_in_mid_run_is_there_again_after_a_resume(
    size: int, tmp_path: Path
) -> None:
    def train(folder: Path, stop_after: int | None = None) -> dict[str, Tensor]:
        def body(world: World) -> dict[str, Tensor]:
            net: Any = mlp()
            net[0].requires_grad_(False)
            optimizer = torch.optim.AdamW(net[2].parameters(), lr=0.1)
            run = Run(
                *(net, optimizer, Rows(16)),
                global_batch=4,
                epochs=2,
                shards=2,
                options=QUIET,
                folder=folder,
                world=world,
            )
            for step in run:
                with step:
                    for x, y, _ in step.batches():
                        step.backward(F.cross_entropy(run.model(x), y))
                if step.number == 3:
                    net[0].requires_grad_(True)
                    optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.01})
                if step.number == stop_after:
                    run.save()
                    break
            return {name: tensor.clone() for name, tensor in net.state_dict().items()}

        return run_ranks(size, body)[0]

    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", stop_after=5)
    torch.testing.assert_close(train(tmp_path / "parts"), whole, rtol=0, atol=1e-7)


def resumed(folder: Path, *, lr: float = 0.1, seed: int = 1, overwrites: bool = False) -> list[str]:
    """The lines at the second start of a run, which may differ from the first in these."""
    told = Told()

    def body(world: World) -> None:
        net, data = mlp(), Rows(16)
        if seed != 1:
            data.y = data.y.flip(0)
        optimizer = optim.SGD(net.parameters(), lr=lr)
        sinks = [told] if world.rank == 0 else []
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        run = Run(
            net,
            optimizer,
            data,
            global_batch=4,
            epochs=2,
            shards=2,
            options=RunOptions(progress="quiet", ema=0.9),
            folder=folder,
            world=world,
            sinks=sinks,
        )
        run.evaluate(lambda batch: {"mean": run.model(batch[0]).mean()}, data, ema=True)
        if overwrites:
            net.load_state_dict(before)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x), y))
            if step.number == 3:
                run.save()
                break

    run_ranks(2, body)
    return [line for _, _, lines in told.of("start") for line in lines]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lr": 0.5}, ["lr is 0.1, and not 0.5"]),
        ({"seed": 2}, ["dataset is not the one", "First difference"]),
        ({"overwrites": True}, ["other weights after Run()"]),
        ({}, []),
    ],
)
def test_a_resume_says_what_its_script_has_otherwise_than_the_checkpoint(
    change: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    assert not any("continues" in line for line in resumed(tmp_path / "run", **change))
    resumed(tmp_path / "other")
    lines = resumed(tmp_path / "other", **change)
    about = [line for line in lines if "checkpoint" in line or "dataset" in line]
    assert len(about) == bool(words), lines
    assert all(word in about[0] for word in words)


def test_a_group_is_taken_away_where_a_run_goes_back_to_before_it_was_added(
    tmp_path: Path,
) -> None:
    net: Any = mlp()
    optimizer = optim.AdamW(net[2].parameters(), lr=0.1)
    run = Run(net, optimizer, Rows(16), global_batch=4, epochs=1, options=QUIET, folder=tmp_path)
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y))
        if step.number == 2:
            run.save()
            optimizer.add_param_group({"params": net[0].parameters()})
        elif step.number == 3:
            found = run._parts.outlets.saving.find()
            assert found is not None
            run._parts.training.state.forget()
            run._parts.training.state.load(found[0])
            break
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]
    assert len(optimizer.state) == 2
