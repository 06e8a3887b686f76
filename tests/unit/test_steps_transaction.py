"""A step is applied as a whole, or nothing has happened."""

from __future__ import annotations

import copy
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, QUIET, WIDTH, Rows, Told, assert_same, mlp, train
from sentences import says
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.data.plan import Position
from paceline.errors import NotFiniteError, UsageError
from paceline.run import Run, RunOptions, Step
from paceline.run.recovery import Recovery
from paceline.run.stop import SIGNALS
from paceline.testing import seeded


def make(net: nn.Module, dataset: Any = None, *, lr: float = 0.05, **arguments: Any) -> Run:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    arguments = {"global_batch": 8, "epochs": 1, "options": QUIET, "shards": 2, **arguments}
    return Run(net, optimizer, Rows() if dataset is None else dataset, **arguments)


def compute(run: Run, step: Step, items: float | None = None) -> Iterator[Tensor]:
    for x, y, _ in step.batches():
        loss = F.cross_entropy(run.model(x), y, reduction="sum")
        yield loss
        step.backward(loss, items, "sum")


def advance(run: Run, step: Step) -> None:
    with step:
        for _ in compute(run, step):
            pass


def with_statistics() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))


class Stumble(Exception):
    pass


def test_an_error_in_the_block_leaves_everything_as_it_was() -> None:
    net = with_statistics()
    run = make(net)
    optimizer = run._parts.config.optimizer
    steps = iter(run)
    advance(run, next(steps))
    before = copy.deepcopy([net.state_dict(), optimizer.state_dict()])
    drawn = torch.default_generator.get_state(), random.getstate()
    step = next(steps)

    def stumble() -> None:
        with step:
            for number, _ in enumerate(compute(run, step)):
                if number == 1:
                    raise Stumble

    with pytest.raises(Stumble):
        stumble()
    assert step.state == "failed"
    assert run.step == 1
    assert_same(dict(net.state_dict()), dict(before[0]), rtol=0, atol=0)
    assert all(param.grad is None for param in net.parameters())
    after = optimizer.state_dict()["state"]
    for index, moments in before[1]["state"].items():
        assert_same(after[index], moments, rtol=0, atol=0)
    assert torch.equal(torch.default_generator.get_state(), drawn[0])
    assert random.getstate() == drawn[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_error_whose_message_fails_leaves_the_block_as_itself(precision: Any) -> None:
    class Wordless(RuntimeError):
        def __str__(self) -> str:
            raise ValueError

    run = make(with_statistics(), options=RunOptions(progress="quiet", precision=precision))
    step = next(iter(run))
    with pytest.raises(Wordless), step:
        raise Wordless


def test_a_step_that_failed_comes_again_and_changes_nothing_about_the_training() -> None:
    nets = []
    for stumbles in (False, True):
        net = with_statistics()
        run = make(net, options=RunOptions(progress="quiet", drop_last=True))
        failed = []
        for step in run:
            try:
                with step:
                    for _ in compute(run, step):
                        if stumbles and step.number in (1, 4) and step.number not in failed:
                            failed.append(step.number)
                            raise Stumble
            except Stumble:
                continue
        assert failed == ([1, 4] if stumbles else [])
        assert run.step == 6
        nets.append(net)
    assert_same(dict(nets[1].state_dict()), dict(nets[0].state_dict()), rtol=0, atol=0)


def test_nothing_changes_before_the_end_of_the_block() -> None:
    net = mlp()
    run = make(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    steps = iter(run)
    step = next(steps)
    with step:
        for _ in compute(run, step):
            pass
        assert_same(dict(net.state_dict()), before, rtol=0, atol=0)
        assert run.step == 0
    assert run.step == 1
    assert not torch.equal(net.state_dict()["0.weight"], before["0.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_and_spares_the_parameters(value: float) -> None:
    net, data = mlp(), Rows()
    data.x[13] = value
    run = make(net, data, shards=4)
    expected, before = [], []

    def go_on() -> None:
        for step in run:
            before.append({name: each.clone() for name, each in net.state_dict().items()})
            with step:
                for x, y, indices in step.batches():
                    if 13 in indices.tolist():
                        expected.append((step.number, step._shard))
                    loss = F.cross_entropy(run.model(x), y, reduction="sum")
                    step.backward(loss, reduction="sum")

    with pytest.raises(NotFiniteError) as raised:
        go_on()
    number, shard = expected[0]
    assert shard is not None
    parts = (f"Step {number}", f"shard {shard.number}", "rank 0", 13)
    assert says(raised.value.what, *parts)
    assert_same(dict(net.state_dict()), before[-1], rtol=0, atol=0)
    assert run.step == number - 1


def test_a_gradient_that_is_not_finite_stops_the_run_though_its_loss_is() -> None:
    net = seeded(nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)))
    run = make(net)

    def go_on() -> None:
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    out = run.model(x)
                    # The square root of zero is fine, and its slope is not.
                    root = (out - out.detach()).abs().sum().sqrt()
                    step.backward(F.cross_entropy(out, y, reduction="sum") + root, reduction="sum")

    with pytest.raises(NotFiniteError, match=r"gradient of '\d.\w+'.* not"):
        go_on()


def test_a_check_that_is_off_lets_everything_pass() -> None:
    data = Rows()
    data.x[13] = float("nan")
    options = RunOptions(progress="quiet", check_finite="off")
    parameters = train(dataset=data, shards=2, options=options).parameters
    assert parameters["0.weight"].isnan().any()


@pytest.mark.parametrize("mode", ["sample", "all"])
def test_one_bad_element_of_a_row_is_found(mode: str) -> None:
    options = RunOptions(progress="quiet", check_finite=mode)  # type: ignore[arg-type]
    net = mlp()
    run = make(net, options=options)
    bad = torch.zeros_like(net[0].weight)
    bad[3] = float("nan")
    net[0].weight.register_hook(lambda grad: grad + bad)

    def go_on() -> None:
        for step in run:
            with step:
                for _ in compute(run, step):
                    pass

    with pytest.raises(NotFiniteError):
        go_on()


def test_a_scaler_that_skips_a_step_still_counts_it() -> None:
    net = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = make(net, scaler=scaler)
    before = {name: each.clone() for name, each in net.state_dict().items()}
    steps = iter(run)
    step = next(steps)
    with step:
        for x, y, _ in step.batches():
            step.backward(F.cross_entropy(run.model(x), y) * float("inf"))
    assert run.step == 1
    assert_same(dict(net.state_dict()), before, rtol=0, atol=0)
    assert scaler.get_scale() == 2.0**9
    advance(run, next(steps))
    assert not torch.equal(net.state_dict()["0.weight"], before["0.weight"])


def test_a_scaler_changes_nothing_about_finite_steps() -> None:
    expected = train(shards=2).parameters
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    assert_same(train(shards=2, scaler=scaler).parameters, expected, rtol=1e-4, atol=1e-6)


def test_schedulers_step_once_per_step() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run = Run(
        net, optimizer, Rows(), global_batch=8, epochs=1, shards=4, scheduler=scheduler,
        options=QUIET,
    )  # fmt: skip
    for step in run:
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (step.number - 1)
        advance(run, step)


def test_a_loop_that_cannot_begin_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = [signal.getsignal(number) for number in SIGNALS]
    net = mlp()
    run = make(net, options=RunOptions(progress="quiet"))

    def fail(*_: object) -> None:
        raise OSError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.run.loader.make_loader", fail)
        with pytest.raises(OSError, match="no more processes"):
            next(iter(run))
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    torch.optim.SGD(net.parameters(), lr=0.1).step()  # nobody's business again
    for step in run:
        advance(run, step)
    assert run.step == run.steps


def test_metrics_of_a_failed_step_are_forgotten() -> None:
    told = Told()
    run = make(mlp(), sinks=[told])
    steps = iter(run)

    def stumble() -> None:
        with next(steps):
            run.log("accuracy", 1.0)
            raise Stumble

    with pytest.raises(Stumble):
        stumble()
    run.log("behind", 1.0)
    advance(run, next(steps))
    run.log("behind", 2.0)
    next(steps)
    (report,) = told.of("step")
    assert list(report.metrics) == ["loss", "behind"]
    assert report.metrics["behind"] == 2.0


def misuse_twice(run: Run, step: Step) -> None:
    for loss in compute(run, step):
        step.backward(loss * 0)


def misuse_never(run: Run, step: Step) -> None:
    for _ in step.batches():
        pass


def misuse_break(run: Run, step: Step) -> None:
    for _ in step.batches():
        break


def misuse_batches(run: Run, step: Step) -> None:
    for _ in compute(run, step):
        pass
    next(step.batches())


def misuse_outside(run: Run, step: Step) -> None:
    step.backward(torch.zeros((), requires_grad=True))


def misuse_log(run: Run, step: Step) -> None:
    for _ in compute(run, step):
        run.log("accuracy", "high")  # type: ignore[arg-type]


def misuse_elements(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x), y, reduction="none"))


def misuse_evaluate(run: Run, step: Step) -> None:
    run.evaluate(lambda batch: {})


def misuse_mixture(run: Run, step: Step) -> None:
    for number, (x, y, _) in enumerate(step.batches()):
        loss = F.cross_entropy(run.model(x), y, reduction="sum")
        step.backward(loss, items=len(y) if number else None)


def misuse_items(run: Run, step: Step) -> None:
    for _ in compute(run, step, items=-1):
        pass


def misuse_item(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x), y).item())  # type: ignore[arg-type]


def misuse_detach(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x).detach(), y))


def misuse_words(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x), y), items="all")  # type: ignore[arg-type]


def misuse_weight(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x), y), weight=len(y))


def misuse_reduction(run: Run, step: Step) -> None:
    for x, y, _ in step.batches():
        step.backward(F.cross_entropy(run.model(x), y), reduction="none")


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (misuse_twice, "called once per batch"),
        (misuse_never, r"no step.backward\(\) for shard 0"),
        (misuse_break, "0 of this worker's 2 shards"),
        (misuse_batches, r"batches\(\) .*once"),
        (misuse_outside, "inside.* loop"),
        (misuse_elements, "loss has 4 elements"),
        (misuse_log, "'accuracy' is 'high'"),
        (misuse_evaluate, "inside step 1"),
        (misuse_mixture, "items were given for one batch and not for another"),
        (misuse_items, "items.* -1"),
        (misuse_words, "items.* 'all'"),
        (misuse_item, "not a tensor"),
        (misuse_detach, "does not depend on any parameter"),
        (misuse_weight, "no weight= any more"),
        (misuse_reduction, "reduction.* 'none'"),
    ],
)
def test_misuse_is_refused_and_leaves_the_step_unapplied(misuse: Any, message: str) -> None:
    run = make(mlp())
    steps = iter(run)
    step = next(steps)
    with pytest.raises(UsageError, match=message) as raised, step:
        misuse(run, step)
    assert raised.value.advice
    assert (step.state, run.step) == ("failed", 0)


def test_a_loop_left_after_its_last_batch_is_complete() -> None:
    nets = []
    for breaks in (False, True):
        net = with_statistics()
        run = make(net, options=RunOptions(progress="quiet", drop_last=True))
        for step in run:
            with step:
                for number, (x, y, _) in enumerate(step.batches()):
                    step.backward(F.cross_entropy(run.model(x), y))
                    if breaks and number == 1:
                        break
        nets.append(net)
    assert_same(dict(nets[1].state_dict()), dict(nets[0].state_dict()), rtol=0, atol=0)


def test_a_step_that_is_not_run_is_refused() -> None:
    steps = iter(make(mlp()))
    next(steps)
    with pytest.raises(UsageError, match="Step 1 was not run"):
        next(steps)


def test_a_step_is_not_run_twice() -> None:
    run = make(mlp())
    steps = iter(run)
    step = next(steps)
    advance(run, step)
    with pytest.raises(UsageError, match="applied"), step:
        pass


def test_a_step_whose_loop_is_over_is_refused() -> None:
    run = make(mlp())
    step = next(iter(run))
    with pytest.raises(UsageError, match=r"a loop that.* over"):
        advance(run, step)


def test_an_optimizer_of_another_model_is_refused() -> None:
    optimizer = torch.optim.SGD(mlp().parameters())
    with pytest.raises(UsageError, match=r"not.* model's"):
        Run(mlp(), optimizer, Rows(), global_batch=8, epochs=1)


def go_through(run: Run, factor_of: Callable[[int], float]) -> None:
    for step in run:
        with step:
            for x, y, _ in step.batches():
                step.backward(F.cross_entropy(run.model(x), y) * factor_of(step.number))


@pytest.mark.parametrize(("folder", "says"), [(None, False), ("run", True)])
def test_an_error_speaks_of_checkpoints_only_where_there_are_any(
    folder: str | None, says: bool, tmp_path: Path
) -> None:
    run = make(mlp(), folder=folder and tmp_path / folder)
    with pytest.raises(NotFiniteError, match="as it was after step 0") as raised:
        go_through(run, lambda _: float("nan"))
    assert ("checkpoint" in str(raised.value)) == says


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"global_batch": 0}, "global_batch.* 0"),
        ({"epochs": 1.5}, "epochs.* 1.5"),
        ({"epochs": None}, "epochs.* None"),
        ({"loader_workers": -1}, "loader_workers.* -1"),
        ({"options": RunOptions(progress="loud")}, "progress.* 'loud'"),
        ({"shards": 9}, "cannot be cut into 9 shards"),
        ({"seed": "0"}, "seed.* '0'"),
        ({"state": {"ema": 3}}, "no state_dict"),
        ({"dataset": 7}, "not a dataset"),
        ({"folder": 7}, "folder.* 7"),
        ({"options": {"clip_norm": 1}}, "options.* {'clip_norm': 1}"),
        ({"ddp": {}}, "ddp.* {}"),
        ({"sinks": "tracker"}, "sinks.* 'tracker'"),
        ({"scheduler": 7}, "scheduler.* 7, which has no step"),
        ({"scaler": True}, "scaler.* True, which has no is_enabled"),
        ({"state": [3]}, r"state.* \[3\]"),
        ({"world": 2}, "world.* 2"),
        ({"dataset": Rows(0)}, "empty"),
    ],
)
def test_impossible_arguments_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        make(mlp(), **changed)
    assert raised.value.advice


@pytest.mark.parametrize(
    "options", [{"keep": 1}, {"prefetch": 0}, {"checkpoint_every": -1}, {"better": "best"},
                {"check_finite": "often"}, {"keep_best": 0.5}],
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        RunOptions(**options)
    assert raised.value.advice


class HealedInStep(Recovery):
    """Another worker dies in backward of step 2; those who have applied it give their state."""

    def __init__(self, run: Run) -> None:
        self._progress = run._parts.progress

    def holds(self, task: Callable[[], object], *, completes: bool = False) -> bool:
        is_lost = self._progress.position.step == 1
        task()
        return not is_lost

    def redeal_after_failure(self, step: int, is_passed: Any) -> None:
        self._progress.position = Position(step, 0, step)


class DealtAnew(Recovery):
    """Another worker dies in backward of step 2, which is computed again."""

    def __init__(self, run: Run) -> None:
        self._parts, self.is_lost = run._parts, False

    def holds(self, task: Callable[[], object], *, completes: bool = False) -> bool:
        task()
        was_lost, self.is_lost = self.is_lost, self._parts.progress.position.step == 1
        return was_lost or not self.is_lost

    def redeal_after_failure(self, _step: int, is_passed: Any) -> Any:
        self._parts.dealing.deal()
        return next(self._parts.dealing.portions)


def test_what_is_logged_before_the_batches_outlives_a_death_and_what_follows_counts_once() -> None:
    told = Told()
    run = make(mlp(), sinks=[told])
    run._parts.recovery = DealtAnew(run)
    for step in run:
        with step:
            run.log("before", 3.0)
            for loss in compute(run, step):
                run.log("inside", loss.detach())
    counts = [{name: count for name, (_, count) in each.sums.items()} for each in told.of("step")]
    assert counts[1] == counts[0]
    assert counts[1]["before"] == 1


def test_a_step_that_was_healed_moves_the_position_once() -> None:
    run = make(mlp())
    run._parts.recovery = HealedInStep(run)
    states = []
    for step in run:
        advance(run, step)
        states.append(step.state)
        if step.number == 2:
            assert run._parts.progress.position == Position(2, 0, 2)
    assert states[:3] == ["applied", "healed", "applied"]
