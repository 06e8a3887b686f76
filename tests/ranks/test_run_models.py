"""Several models in one run: each turn is a step of its own optimizer, exact at any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Told
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from paceline import EMA, Run, RunOptions, load_weights
from paceline.ddp import NaiveEngine
from paceline.errors import UsageError
from paceline.group.world import World
from paceline.testing import run_ranks, seeded

ROWS = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
QUIET = RunOptions(progress="quiet")


def generator() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))).double()


def critic() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))).double()


def make(world: World | None = None, *, critic_lr: float = 0.05, **arguments: Any) -> Run:
    g, d = generator(), critic()
    g_optimizer = torch.optim.AdamW(g.parameters(), lr=0.02)
    models = {
        "generator": (g, g_optimizer),
        "critic": (d, torch.optim.SGD(d.parameters(), lr=critic_lr, momentum=0.9)),
        "average": EMA("generator", 0.5),
    }
    given = {"global_batch": 8, "epochs": 2, "shards": 3, "options": QUIET} | arguments
    scheduler = torch.optim.lr_scheduler.StepLR(g_optimizer, step_size=3, gamma=0.9)
    given = {"scheduler": {"generator": scheduler}} | given
    return Run(models, TensorDataset(ROWS, torch.arange(50)), world=world, **given)


def losses(g: Any, d: Any, rows: Tensor) -> Iterator[Tensor]:
    """Of the critic's turns and of the generator's, without random numbers."""
    for _ in range(2):
        yield softplus(-d(rows)).mean() + softplus(d(g(rows[:, :2]).detach())).mean()
    yield softplus(-d(g(rows[:, :2]))).mean()


def train(
    run: Run, stop_after: int = 0, ledger: dict[int, list[int]] | None = None
) -> dict[str, Tensor]:
    g, d = run.models["generator"], run.models["critic"]
    for step in run:
        with step:
            for turn in range(3):
                with step.turn("generator" if turn == 2 else "critic"):
                    for rows, numbers in step.batches():
                        step.backward(list(losses(g, d, rows))[turn])
                        if ledger is not None and turn == 0:
                            ledger.setdefault(step.number, []).extend(numbers.tolist())
        if step.number == stop_after:
            run.save()
            break
    return state_of(run)


def state_of(run: Run) -> dict[str, Tensor]:
    found = {name: run.models[name].state_dict() for name in run.models}
    return {f"{n}.{k}": v.clone() for n, state in found.items() for k, v in state.items()}


def by_torch(batches: dict[int, list[int]]) -> dict[str, Tensor]:
    """The same in a plain loop, with the whole batch at once."""
    g, d, average = generator(), critic(), generator()
    g_optimizer = torch.optim.AdamW(g.parameters(), lr=0.02)
    d_optimizer = torch.optim.SGD(d.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(g_optimizer, step_size=3, gamma=0.9)
    for number, indices in batches.items():
        for turn in range(3):
            g.zero_grad()
            d.zero_grad()
            list(losses(g, d, ROWS[indices]))[turn].backward()  # type: ignore[no-untyped-call]
            (g_optimizer if turn == 2 else d_optimizer).step()
        scheduler.step()
        decay = 0.0 if number == 1 else min(0.5, (1 + number) / (10 + number))
        with torch.no_grad():
            for mean, now in zip(average.parameters(), g.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)
    models = {"generator": g, "critic": d, "average": average}
    return {f"{n}.{k}": v for n, m in models.items() for k, v in m.state_dict().items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"engine": lambda module, world: NaiveEngine(module, world)},
        {"options": RunOptions(progress="quiet", same_bits=True)},
    ],
    ids=["ddp", "naive", "same bits"],
)
def test_models_that_take_turns_are_trained_as_in_a_plain_loop(options: Any) -> None:
    """With a last batch of two rows for three shards, so that a worker may have nothing to do."""
    ledger: dict[int, list[int]] = {}
    alone = train(make(**options), ledger=ledger)
    assert_close(alone, by_torch(ledger))
    for size in (2, 3):
        for found in run_ranks(size, lambda world: train(make(world, **options))):
            assert_close(found, alone)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 2)])
def test_a_run_of_several_models_continues_at_another_size(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    expected = train(make())
    folder = tmp_path / "run"
    run_ranks(sizes[0], lambda world: train(make(world, folder=folder), stop_after=5))
    told = Told()
    for found in run_ranks(sizes[1], lambda world: train(make(world, folder=folder, sinks=[told]))):
        assert_close(found, expected)
    names = {name for report in told.of("step") for name in report.metrics}
    assert names == {"generator_loss", "critic_loss"}
    for name in ("generator", "critic", "average"):
        net = critic() if name == "critic" else generator()
        load_weights(net, folder, part=name)
        assert_close(
            {f"{name}.{k}": v for k, v in net.state_dict().items()},
            {k: v for k, v in expected.items() if k.startswith(f"{name}.")},
        )


def test_a_turn_that_fails_changes_nothing_and_those_before_it_stay() -> None:
    run, expected = make(), train(make())
    g, d = run.models["generator"], run.models["critic"]
    entered = []
    has_failed = False
    for step in run:
        with suppress(ArithmeticError), step:
            for turn in range(3):
                with step.turn("generator" if turn == 2 else "critic"):
                    for rows, _ in step.batches():
                        entered.append((step.number, turn))
                        step.backward(list(losses(g, d, rows))[turn])
                    if turn == 1 and step.number == 4 and not has_failed:
                        has_failed = True
                        raise ArithmeticError
    assert_close(state_of(run), expected)
    assert entered.count((4, 0)) == 3, "its three shards, once"
    assert entered.count((4, 1)) == 6


def test_each_model_is_clipped_and_scaled_by_its_own() -> None:
    told = Told()
    options = RunOptions(progress="quiet", clip_norm={"critic": 0.1})
    clipped = train(make(options=options, sinks=[told]))
    assert not torch.equal(clipped["critic.0.weight"], train(make())["critic.0.weight"])
    names = {name for report in told.of("step") for name in report.metrics}
    assert "critic_grad_norm" in names
    assert "generator_grad_norm" not in names


def scaled(world: World | None = None, **arguments: Any) -> tuple[Run, dict[str, Any]]:
    """With everything that can be given by name, and the scalers."""
    scalers = {
        name: torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        for name, scale in {"generator": 4.0, "critic": 1024.0}.items()
    }
    options = RunOptions(progress="quiet", clip_norm={"critic": 0.2, "generator": 0.1})
    return make(world, scaler=scalers, options=options, **arguments), scalers


def train_spoilt(run: Run, stop_after: int = 0) -> dict[str, Tensor]:
    """In step 4 the gradients of the critic's second turn overflow."""
    g, d = run.models["generator"], run.models["critic"]
    for step in run:
        with step:
            for turn in range(3):
                with step.turn("generator" if turn == 2 else "critic"):
                    for rows, _ in step.batches():
                        loss = list(losses(g, d, rows))[turn]
                        step.backward(loss * (1e308 if (step.number, turn) == (4, 1) else 1))
        if step.number == stop_after:
            run.save()
            break
    return state_of(run)


def test_scalers_schedulers_clipping_and_averages_of_each_model_outlive_a_resume(
    tmp_path: Path,
) -> None:
    run, scalers = scaled()
    expected = train_spoilt(run)
    # 14 steps: 28 turns of the critic, of which one overflows, and 14 of the generator.
    assert scalers["generator"].get_scale() == 4.0 * 2 ** (14 // 3)
    assert scalers["critic"].get_scale() == 1024.0 * 2 ** (7 // 3) / 2 * 2 ** (20 // 3)

    def body(world: World, stop_after: int) -> Any:
        run, scalers = scaled(world, folder=tmp_path / "run")
        return train_spoilt(run, stop_after), [each.get_scale() for each in scalers.values()]

    run_ranks(2, lambda world: body(world, 6))
    for found, scales in run_ranks(3, lambda world: body(world, 0)):
        assert_close(found, expected)
        assert scales == [each.get_scale() for each in scalers.values()]


def test_between_turns_all_parameters_are_trainable_again() -> None:
    run = make()
    for step in run:
        with step:
            for name in ("critic", "generator"):
                with step.turn(name):
                    others = [run.models[each] for each in ("critic", "generator") if each != name]
                    assert not any(p.requires_grad for each in others for p in each.parameters())
                    for rows, _ in step.batches():
                        step.backward(
                            list(losses(run.models["generator"], run.models["critic"], rows))[
                                2 * (name == "generator")
                            ]
                        )
            assert all(p.requires_grad for p in run.models["critic"].parameters())
            assert not any(p.requires_grad for p in run.models["average"].parameters())
        break


def one() -> nn.Module:
    return critic()


MISTAKES = {
    "an average of nothing": lambda: {"a": EMA("b"), "c": pair()},
    "none has an optimizer": lambda: {"a": one()},
    "not a model": lambda: {"a": 3, "c": pair()},
}


def pair(net: nn.Module | None = None) -> Any:
    net = net or one()
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_models_that_cannot_be_trained_are_refused(mistake: str) -> None:
    with pytest.raises(UsageError):
        Run(MISTAKES[mistake](), TensorDataset(ROWS), global_batch=8, epochs=1, options=QUIET)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"options": RunOptions(progress="quiet", ema=0.9)}, "ema"),
        ({"options": RunOptions(progress="quiet", update="sharded")}, "update"),
        ({"options": RunOptions(progress="quiet", noise_every=2)}, "noise_every"),
        ({"options": RunOptions(progress="quiet", clip_norm={"critc": 1.0})}, "'critic'"),
        ({"scheduler": {"critic": "step"}}, "scheduler of 'critic' is 'step', which has no"),
        ({"scaler": {"critic": 3}}, "scaler of 'critic' is 3, which has no"),
    ],
)
def test_what_does_not_go_with_several_models_is_refused_by_name(
    arguments: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        make(**arguments)


def test_models_with_a_parameter_in_common_are_refused() -> None:
    net = one()
    models = {"a": pair(net), "b": pair(nn.Sequential(net))}
    with pytest.raises(UsageError, match=r"'a'.*'b'.*\(8, 3\)"):
        Run(models, TensorDataset(ROWS), global_batch=8, epochs=1, options=QUIET)


def test_turns_are_asked_for_where_they_are_missing_or_wrong() -> None:
    run = make()
    steps = iter(run)
    step = next(steps)
    calls: list[tuple[Any, str]] = [
        (lambda: next(step.batches()), "turn"),
        (lambda: step.turn("critc"), "'critic'"),
        (lambda: run.model(ROWS), "models"),
    ]
    with step:
        for call, named in calls:
            with pytest.raises(UsageError, match=named):
                call()
        with step.turn("critic"):
            for rows, _ in step.batches():
                step.backward(run.models["critic"](rows).mean())
    empty = next(iter(make()))
    empty.__enter__()
    with pytest.raises(UsageError, match="no turn"):
        empty.__exit__(None, None, None)
    net = one()
    single = Run(net, pair(net)[1], TensorDataset(ROWS), global_batch=8, epochs=1, options=QUIET)
    with pytest.raises(UsageError, match="one model"):
        next(iter(single)).turn("critic")


@pytest.mark.parametrize("name", ["generator", "critic"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_of_several_models_goes_on_with_its_schedulers_only(
    size: int, name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run_ranks(size, lambda world: train(make(world, folder=folder), stop_after=5))

    def body(world: World) -> None:
        other = torch.optim.SGD(critic().parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(other, T_max=9)
        make(world, folder=folder, scheduler={name: scheduler})

    with pytest.raises(UsageError) as raised:
        run_ranks(size, body)
    assert "generator: StepLR" in str(raised.value)
    assert f"{name}: CosineAnnealingLR" in str(raised.value)


@pytest.mark.parametrize("critic_lr", [0.05, 0.5])
def test_a_resume_says_what_no_scheduler_has_changed_and_whose_it_is(
    critic_lr: float, tmp_path: Path
) -> None:
    train(make(folder=tmp_path / "run"), stop_after=5)
    told = Told()
    train(make(folder=tmp_path / "run", critic_lr=critic_lr, sinks=[told]))
    about = [line for _, _, lines in told.of("start") for line in lines if "checkpoint" in line]
    other = "The optimizer continues as in the checkpoint: lr of critic is 0.05, and not 0.5 as in "
    assert about == [f"{other}the script."] * (critic_lr != 0.05)


@pytest.mark.parametrize(
    ("mode", "metric", "message"),
    [("min", None, "steps on a metric"), ("min", "accuracy", "mode='min', and better='higher'")],
)
def test_a_scheduler_that_waits_for_a_metric_is_refused_where_it_would_wait_in_vain(
    mode: Any, metric: str | None, message: str
) -> None:
    optimizer = torch.optim.SGD(critic().parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode)
    options = RunOptions(progress="quiet", best_metric=metric)
    with pytest.raises(UsageError, match=message):
        make(scheduler={"generator": None, "critic": scheduler}, options=options)
