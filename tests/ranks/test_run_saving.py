"""When a run saves, what it then calls the best, and what it says if something is not saved."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Rows, Told, mlp, train
from sentences import says
from torch import Tensor, nn, optim
from torch.nn import functional as F

from paceline import DDPOptions, env
from paceline.checkpoint.directory import list_entries, open_checkpoint
from paceline.errors import CheckpointError, UsageError
from paceline.files.run_folder import RunFolder, read_events, read_info
from paceline.group.world import World
from paceline.run import Run, RunOptions, Sink
from paceline.testing import run_ranks


def make_run(
    world: World | None,
    folder: Path | None,
    *,
    sinks: Sequence[Sink] = (),
    ddp: DDPOptions | None = None,
    **options: Any,
) -> Run:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Run(
        net,
        optimizer,
        Rows(16),
        global_batch=4,
        epochs=2,
        folder=folder,
        shards=2,
        world=world,
        sinks=sinks,
        ddp=ddp,
        options=RunOptions(**{"progress": "quiet", **options}),
    )


def advance(run: Run, step: Any) -> None:
    with step:
        for x, y, _ in step.batches():
            step.backward(F.cross_entropy(run.model(x), y))


def evaluate_as(run: Run, **scores: float) -> None:
    run.evaluate(lambda batch: scores)


def metrics_by_step(folder: Path) -> Mapping[int, float | None]:
    found: dict[int, float | None] = {}
    for entry in list_entries(folder / "checkpoints"):
        with open_checkpoint(entry) as checkpoint:
            found.setdefault(entry.step, checkpoint.manifest.metric)
    return found


def test_a_script_may_change_its_working_directory_in_the_middle_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = make_run(None, Path("runs/first"), progress="plain", checkpoint_every=1, trace_step=5)
    for step in run:
        advance(run, step)
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert metrics_by_step(tmp_path / "runs" / "first").keys() >= {run.step}
    info = read_info(RunFolder(tmp_path / "runs" / "first"))
    assert (info.status, info.step) == ("finished", run.step)
    said = capsys.readouterr().out
    assert "paceline report runs/first\n" in said
    assert "`paceline trace runs/first`" in said


def test_a_replay_does_not_point_at_its_folder_which_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for replayed in ("", "3"):
        monkeypatch.setenv(env.REPLAY_VARIABLE, replayed)
        run = make_run(None, tmp_path / f"run{replayed}", progress="plain")
        for step in run:
            advance(run, step)
        said = capsys.readouterr().out
        assert "finished" in said
        assert ("paceline report" in said) == (not replayed)


def test_a_metric_belongs_to_the_step_that_it_was_measured_after(tmp_path: Path) -> None:
    run = make_run(None, tmp_path / "run", checkpoint_every=1, best_metric="accuracy", keep=2)
    for step in run:
        advance(run, step)
        if step.number in (2, 7):
            evaluate_as(run, accuracy=0.75 if step.number == 2 else 0.5)
    assert metrics_by_step(tmp_path / "run") == {2: 0.75, 7: 0.5, 8: None}


def test_what_was_measured_is_saved_even_if_no_save_is_due(tmp_path: Path) -> None:
    run = make_run(None, tmp_path / "run", best_metric="accuracy", keep=2)
    for step in run:
        advance(run, step)
        if step.number == 2:
            evaluate_as(run, accuracy=0.75)
    assert metrics_by_step(tmp_path / "run") == {2: 0.75, 4: None, 8: None}


def test_of_two_metrics_of_one_name_the_evaluation_counts(tmp_path: Path) -> None:
    run = make_run(None, tmp_path / "run", best_metric="loss")
    for step in run:
        advance(run, step)
        if step.ends_epoch:
            evaluate_as(run, loss=step.number / 64)
    assert metrics_by_step(tmp_path / "run") == {4: 4 / 64, 8: 8 / 64}


def test_a_metric_that_comes_after_a_save_by_hand_is_kept_too(tmp_path: Path) -> None:
    run = make_run(None, tmp_path / "run", best_metric="accuracy", better="higher")
    for step in run:
        advance(run, step)
        if step.ends_epoch:
            run.save()
            evaluate_as(run, accuracy=0.5)
    kept = [metric for metric in metrics_by_step(tmp_path / "run").values() if metric is not None]
    assert kept == [0.5, 0.5]


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_that_is_saved_by_hand_is_not_counted_into_the_next(
    size: int, tmp_path: Path
) -> None:
    def stop(world: World) -> None:
        run = make_run(world, tmp_path / "run")
        for step in run:
            advance(run, step)
            if step.ends_epoch:
                run.save()
                break

    def go_on(world: World) -> None:
        run = make_run(world, tmp_path / "run")
        for step in run:
            advance(run, step)

    def undisturbed(world: World) -> None:
        run = make_run(world, tmp_path / "whole")
        for step in run:
            advance(run, step)

    for body in (stop, go_on, undisturbed):
        run_ranks(size, body)
    got, expected = (
        [
            (event["epoch"], event["samples"], event["metrics"]["loss"])
            for event in read_events(RunFolder(tmp_path / name))
            if event["kind"] == "epoch"
        ]
        for name in ("run", "whole")
    )
    assert got == expected


@pytest.mark.parametrize("size", [1, 2])
def test_a_run_that_has_nothing_left_to_do_can_be_saved(size: int, tmp_path: Path) -> None:
    def body(world: World) -> int:
        for _ in range(2):
            run = make_run(world, tmp_path / "run")
            for step in run:
                advance(run, step)
            run.save()
        return run.step

    assert run_ranks(size, body) == [8] * size


@pytest.mark.filterwarnings("ignore::paceline.checkpoint.CheckpointWarning")
@pytest.mark.parametrize(
    ("size", "transport"), [(1, "auto"), (2, "c10d"), (2, "shared_memory"), (3, "auto")]
)
def test_a_disk_that_fills_up_does_not_stop_training_and_the_end_says_what_is_lost(
    size: int, transport: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    sink = Told()

    def body(world: World) -> None:
        ddp = DDPOptions(transport=transport)
        run = make_run(world, tmp_path / "run", sinks=[sink], ddp=ddp, checkpoint_every=1)

        def go_through() -> None:
            for step in run:
                advance(run, step)
                if step.number == 3 and world.rank == 0:
                    run._parts.outlets.saving.take_finished(wait=True)
                    folder.rename(tmp_path / "elsewhere")
                    folder.touch()  # as good as a disk that is full

        with pytest.raises(CheckpointError) as raised:
            go_through()
        assert run.step == 8
        text = str(raised.value)
        assert says(text, "finished, but", "last 6 steps are not saved")
        assert "checkpoint of step 8" in text
        with pytest.raises(CheckpointError, match="last 6 steps are not saved"):
            run.save()
        if world.rank == 0:
            folder.unlink()
            (tmp_path / "elsewhere").rename(folder)
        run.save()

    run_ranks(size, body)
    ((step, status, reason),) = sink.of("stop")
    assert (step, status) == (8, "finished")
    assert says(reason, "last 6 steps are not saved")
    assert sorted(entry.step for entry in list_entries(folder)) == [1, 2, 8]
    assert not list(folder.glob(".tmp-*"))


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
def test_after_a_resume_errors_name_the_step_of_the_run(transport: str, tmp_path: Path) -> None:
    def body(world: World, last: int, fault: int) -> None:
        ddp = DDPOptions(transport=transport)
        run = make_run(world, tmp_path / "run", ddp=ddp)
        for step in run:
            if step.number == fault and world.rank == 1:
                raise KeyError("lost")
            advance(run, step)
            if step.number == last:
                run.save()
                break

    run_ranks(2, body, 3, 0)
    error, fault = run_ranks(2, body, 0, 6, return_exceptions=True)
    assert isinstance(fault, KeyError)
    assert "Step 6:" in str(error), error


def test_a_loop_that_is_left_says_what_is_not_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(None, tmp_path / "run", progress="plain")
    for step in run:
        advance(run, step)
        if step.number == 6:
            break
    said = " ".join(capsys.readouterr().out.split())
    assert says(said, "loop was left after step 6, and step 4", "last that", "saved")
    assert "run.save()" in said


def test_a_loop_that_is_left_with_a_full_disk_makes_its_worker_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.UNSAVED_VARIABLE, "")
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "checkpoints").touch()
    run = make_run(None, tmp_path / "run", progress="plain", checkpoint_every=2)

    def leave_after(last: int) -> None:
        for step in run:
            advance(run, step)
            if step.number == last:
                break

    with pytest.warns(UserWarning, match="Training continues"):
        leave_after(5)
    said = " ".join(capsys.readouterr().out.split())
    assert says(said, "step 0", "last that", "saved.", "checkpoint of step 4 in")
    assert subprocess.run([sys.executable, "-c", LEAVE], check=False).returncode == 0
    program = f"import os; os.environ[{env.UNSAVED_VARIABLE!r}] = f'{{os.getpid()}} why'; {LEAVE}"
    pid, _, reason = os.environ[env.UNSAVED_VARIABLE].partition(" ")
    assert pid == str(os.getpid())
    assert reason in said
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 1
    (tmp_path / "run" / "checkpoints").unlink()
    run.save()
    assert env.UNSAVED_VARIABLE not in os.environ


LEAVE = "from paceline.launcher.worker import leave; leave(None)"


def test_a_loop_that_is_left_after_a_save_has_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder=tmp_path / "run", stop_after=3, options=RunOptions(progress="plain"))
    captured = capsys.readouterr()
    assert "is saved" not in captured.out + captured.err


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        return {"fn": len}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def test_a_run_that_ended_between_checkpoints_says_which_steps_are_done_again(
    tmp_path: Path,
) -> None:
    for step in (run := make_run(None, tmp_path, checkpoint_every=2)):
        advance(run, step)
        if step.number == 5:
            break
    told = Told()
    run = make_run(None, tmp_path, checkpoint_every=2, sinks=[told])
    for step in run:
        advance(run, step)
    ((_, first, lines),) = told.of("start")
    assert first == 4
    assert any(
        says(line, "Step 5", "done again:", "last start ended before it was saved.")
        for line in lines
    )


def test_a_restart_without_a_folder_says_that_all_is_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    told = Told()
    for step in (run := make_run(None, None, sinks=[told])):
        advance(run, step)
    ((_, _, lines),) = told.of("start")
    assert any(line.startswith("All steps are done again") for line in lines)


def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def body(world: World) -> None:
        train(world, folder=tmp_path / "run", state={"mine": Unsavable()})

    for error in run_ranks(2, body, return_exceptions=True):
        assert isinstance(error, UsageError)
        assert says(str(error), "state['state']['mine']['fn']")
    never = RunOptions(progress="quiet", checkpoint_every=0)
    train(folder=tmp_path / "other", state={"mine": Unsavable()}, options=never)


@pytest.mark.parametrize("transport", ["c10d", "shared_memory"])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_files_of_the_folder_that_make_no_sense_do_not_stop_a_run(
    transport: Any, has_checkpoint: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    huge = "9" * 400
    options = RunOptions(progress="quiet", checkpoint_every=1)

    def body(world: World, stop_after: int | None = None) -> list[int]:
        ddp = DDPOptions(transport=transport)
        trained = train(
            world, folder=folder, shards=2, stop_after=stop_after, ddp=ddp, options=options
        )
        return sorted(trained.losses)

    run_ranks(2, body, 3)
    info = RunFolder(folder).info
    info.write_text(info.read_text().replace('"seed": 0', f'"seed": {huge}'))
    newest = list_entries(folder / "checkpoints")[0].path / "manifest.json"
    newest.write_text(newest.read_text().replace('"step": 3', f'"step": {huge}'))
    if not has_checkpoint:
        shutil.rmtree(folder / "checkpoints")
    with pytest.warns(UserWarning, match=r"run\.json .*more than 20 digits"):
        found = run_ranks(2, body)
    assert found[0] == found[1]
    assert found[0][0] == (3 if has_checkpoint else 1)


@pytest.mark.parametrize("order", ["torch", "keyed"])
def test_a_resumed_run_keeps_the_order_that_it_began_with(tmp_path: Path, order: Any) -> None:
    quiet = RunOptions(progress="quiet")
    chosen, other = (RunOptions(progress="quiet", order=each) for each in (order, OTHER[order]))
    arguments: dict[str, Any] = {"folder": tmp_path / "run", "shards": 2}
    first = train(options=chosen, stop_after=3, **arguments)
    with pytest.raises(UsageError, match=f"order.* '{order}' there, '{OTHER[order]}' here"):
        train(options=other, **arguments)
    rest = train(options=quiet, **arguments)
    assert first.ledger + rest.ledger == train(options=chosen, shards=2).ledger
    assert first.ledger != train(options=other, shards=2, stop_after=3).ledger


OTHER = {"torch": "keyed", "keyed": "torch"}


class Scaled(nn.Module):
    """One of its parameters has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("update", ["whole", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [optim.NAdam, optim.ASGD])
def test_numbers_in_the_state_of_an_optimizer_keep_the_dtype_that_they_had(
    tmp_path: Path, make: Any, dtype: torch.dtype, update: Any
) -> None:
    """NAdam's product of momenta is in fp32, whatever the model is in."""

    def body(world: World, folder: str, stop_after: int) -> tuple[dict[str, Tensor], set[Any]]:
        net = Scaled().to(dtype)
        options = RunOptions(progress="quiet", update=update)
        optimizer, where = make(net.parameters(), lr=0.05), tmp_path / folder
        run = Run(
            *(net, optimizer, Rows()),
            epochs=2,
            global_batch=8,
            world=world,
            folder=where,
            options=options,
        )
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(F.cross_entropy(run.model(x.to(dtype)).float(), y))
            if step.number == stop_after:
                run.save()
                break
        keys = {"NAdam": "mu_product", "ASGD": "eta"}
        kinds = {state[keys[make.__name__]].dtype for state in optimizer.state.values()}
        return {name: value.clone() for name, value in net.state_dict().items()}, kinds

    run_ranks(2, body, "part", 3)
    for (whole, kinds), (parts, kinds_of_parts) in zip(
        run_ranks(2, body, "whole", 0), run_ranks(2, body, "part", 0), strict=True
    ):
        assert kinds == kinds_of_parts == {torch.float32}
        for name, tensor in whole.items():
            assert torch.equal(parts[name], tensor), name
