"""`RunOptions(same_bits=True)`: the same bits at any number of workers, and after any resume."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import CLASSES, WIDTH, Rows, Told, Trained, mlp, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from paceline.ddp import DDPOptions, NaiveEngine
from paceline.ddp.ordered import Branch, _is_in, branches_of, depth_of, fold
from paceline.errors import DesyncError, UsageError
from paceline.run import Run, RunOptions, hash_state
from paceline.run.metrics import add_exactly, means, round_sum
from paceline.run.same_bits import fixed_arithmetic
from paceline.testing import run_ranks, seeded

SIZES = [2, 3, 4, 8]
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
SHARDS = 8


class Normed(nn.Module):
    """Batch statistics, and a layer that nothing uses. Ranks here are threads, which share their
    random numbers, so there is no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.last, self.unused = nn.Linear(16, CLASSES), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.layers(x))
        return out


def normed() -> nn.Module:
    return seeded(Normed())


def tied() -> nn.Module:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)
            self.last = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            # Rows that are far from zero go through the first layer once more.
            out: Tensor = self.last(self.first(self.first(x).tanh() if x.sum() > 0 else x))
            return out

    return seeded(Tied())


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipping and averages": {"clip_norm": 0.5, "ema": 0.9},
    "bf16": {"precision": "bf16"},
}
MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "normed": normed, "tied": tied}


def same(
    world: Any, build: Callable[[], nn.Module], options: dict[str, Any], **more: Any
) -> Trained:
    how = RunOptions(progress="quiet", same_bits=True, drop_last=True, **options)
    return train(world, build, shards=SHARDS, global_batch=24, options=how, lr=0.05, **more)


@pytest.fixture(autouse=True)
def _arithmetic_is_put_back() -> Iterator[None]:
    before = arithmetic()
    yield
    gc.collect()  # a run whose loop was never begun puts it back when it is gone
    assert arithmetic() == before


def arithmetic() -> tuple[Any, ...]:
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_num_threads(), is_deterministic, fills, os.environ.get(WORKSPACE)


def test_a_run_computes_with_one_thread_until_its_loop_is_over() -> None:
    torch.set_num_threads(3)
    before = arithmetic()
    inside: list[Any] = []
    for _ in range(2):
        net = mlp()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        how = RunOptions(progress="quiet", same_bits=True)
        run = Run(net, sgd, Rows(48), global_batch=24, epochs=1, options=how)
        for step in run:
            inside.append(arithmetic())
            with step:
                for x, y, _ in step.batches():
                    step.backward(cross_entropy(run.model(x), y))
        assert arithmetic() == before
    assert set(inside) == {(1, True, False, None)}
    torch.set_num_threads(1)


def test_a_run_that_is_refused_leaves_the_arithmetic_as_it_was() -> None:
    before, net = arithmetic(), mlp()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    how = RunOptions(progress="quiet", same_bits=True)
    with pytest.raises(UsageError) as refused:
        Run(net, sgd, Rows(48), global_batch=2, shards=8, epochs=1, options=how)
    assert arithmetic() == before
    assert refused.traceback  # which holds the run, so it is not gone


def test_what_gpus_need_is_set_for_as_long_as_bits_are_fixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with fixed_arithmetic(), fixed_arithmetic():
        assert os.environ[WORKSPACE]
    assert WORKSPACE not in os.environ
    monkeypatch.setenv(WORKSPACE, ":16:8")
    with fixed_arithmetic():
        assert os.environ[WORKSPACE] == ":16:8"
    assert os.environ[WORKSPACE] == ":16:8"


def test_a_run_that_is_not_looped_over_says_nothing_when_its_program_ends() -> None:
    program = """
import torch, paceline
net = torch.nn.Linear(3, 1)
options = paceline.RunOptions(progress="quiet", same_bits=True)
run = paceline.Run(net, torch.optim.SGD(net.parameters()), torch.ones(8, 3), global_batch=8,
                   epochs=1, options=options)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stderr == b""


def test_a_backward_outside_of_a_step_is_refused() -> None:
    net = mlp()
    how = RunOptions(progress="quiet", same_bits=True)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    run = Run(net, sgd, Rows(48), global_batch=24, epochs=1, options=how)
    with pytest.raises(UsageError, match="same_bits"):
        run.model(torch.ones(2, WIDTH)).sum().backward()


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# Threads share autocast's copies of weights, of which a layer that is used twice may get two.
CASES = [(m, o) for m in MODELS for o in OPTIONS if (m, o) != ("tied", "bf16")]


@pytest.mark.parametrize(("model", "option"), CASES)
def test_the_number_of_workers_changes_no_bit(model: str, option: str) -> None:
    build, options = MODELS[model], OPTIONS[option]
    expected = same(None, build, options)
    for size in SIZES:
        for rank in run_ranks(size, same, build, options):
            assert_bits(rank.parameters, expected.parameters)


def test_the_number_of_workers_changes_no_bit_of_metrics_and_evaluations() -> None:
    def body(world: Any) -> list[Any]:
        told, net = Told(), normed()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        how = RunOptions(progress="quiet", same_bits=True, clip_norm=0.3, ema=0.9, noise_every=1)
        run = Run(net, sgd, Rows(47), global_batch=24, epochs=3, shards=8, world=world, options=how,
                  sinks=[told])  # fmt: skip
        found: list[Any] = []

        def score(batch: Any) -> dict[str, Tensor]:
            return {"entropy": cross_entropy(run.model(batch[0]), batch[1])}

        for step in run:
            with step:
                for x, y, rows in step.batches():
                    step.backward(cross_entropy(run.model(x), y))
                    run.log("a third", float(rows.sum()) / 3, weight=0.1 * len(y))
            if step.ends_epoch:
                found += [run.evaluate(score), run.evaluate(score, Rows(31), batch=4, ema=True)]
        found.append(run.evaluate(score))
        noise = [each.facts for each in told.of("message") if each.kind == "noise"]
        return [*noise[-1:], *found, *(each.metrics for each in told.of("epoch"))]

    expected = body(None)
    assert expected[-1].keys() == {"loss", "a third", "grad_norm"}
    for size in SIZES:
        assert run_ranks(size, body)[0] == expected, size


def test_a_sum_is_the_same_in_any_order() -> None:
    values = [1e16, 0.1, -1e16, 3.7e-9, 1 / 3, -0.1, 2.0**60, -7.0]
    for cut in range(len(values)):
        one, other = add_exactly([], values[:cut]), add_exactly([], values[:cut:-1])
        assert round_sum(add_exactly(one, [*other, *values[cut : cut + 1]])) == math.fsum(values)
    assert means({"x": [[7 * 0.1], [7.0]], "none": [[], []]}) == {"x": 7 * 0.1 / 7}
    for endless in (math.inf, -math.inf):
        assert means({"x": [add_exactly([1.0], [endless, 2.0]), [3.0]]}) == {"x": endless}
    assert math.isnan(round_sum(add_exactly([], [math.inf, -math.inf, 1.0])))


def test_no_bit_depends_on_how_short_the_last_batch_is() -> None:
    short = {"shards": 8, "global_batch": 17, "weigh": False, "reduction": "mean"}
    how = RunOptions(progress="quiet", same_bits=True)
    expected = train(None, mlp, options=how, **short)

    def body(world: Any) -> Trained:
        return train(world, mlp, options=how, **short)

    for size in (2, 3):
        for rank in run_ranks(size, body):
            assert_bits(rank.parameters, expected.parameters)


@pytest.mark.parametrize(
    "cause",
    [
        {"options": {"merge_shards": True}},
        {"options": {"noise_every": 2, "audit": 0.5}},
        {"engine": NaiveEngine},
        {"ddp": DDPOptions(compression="bf16")},
        {"build": lambda: nn.Sequential(mlp(), nn.SyncBatchNorm(CLASSES))},
    ],
    ids=["merge_shards", "noise_every", "engine", "ddp", "model"],
)
def test_what_cannot_be_kept_is_refused(cause: dict[str, Any]) -> None:
    cause = dict(cause)
    options = cause.pop("options", {})
    with pytest.raises(UsageError, match=r"same_bits|audit"):
        same(None, cause.pop("build", mlp), options, **cause)


class Conv(nn.Module):
    """Weights in another order of memory than that of their dimensions, and one without use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 37, (2, 3), padding=1)
        self.last, self.unused = nn.Linear(37, CLASSES), nn.Linear(9, 50)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.conv(x.view(-1, 2, 1, 3)).tanh().mean((2, 3)))
        return out


def conv() -> nn.Module:
    return seeded(Conv()).to(memory_format=torch.channels_last)


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": partial(torch.optim.AdamW, fused=True, amsgrad=True),
    "AdamW, foreach": partial(torch.optim.AdamW, foreach=True),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, fused": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("transport", ["shared_memory", "c10d"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_bit_depends_on_how_the_update_is_shared_out_or_gradients_travel(
    optimizer: str, transport: Any
) -> None:
    def body(world: Any, update: Any) -> dict[str, str]:
        net = conv()
        made = OPTIMIZERS[optimizer](net.parameters(), lr=0.01)
        how = RunOptions(progress="quiet", same_bits=True, update=update, clip_norm=0.5, ema=0.9)
        ddp = None if world is None else DDPOptions(transport=transport)
        run = Run(net, made, Rows(48), global_batch=24, epochs=3, shards=8, world=world,
                  options=how, ddp=ddp)  # fmt: skip
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(cross_entropy(run.model(x), y))
        return hash_state({"model": net.state_dict(), "optimizer": made.state_dict()})

    expected = body(None, "whole")
    for size in SIZES:
        for update in ("whole", "sharded"):
            assert run_ranks(size, body, update) == [expected] * size, (size, update)


def test_an_optimizer_whose_bits_are_not_known_is_refused_by_name() -> None:
    class Mine(torch.optim.SGD):
        pass

    net = mlp()
    how = RunOptions(progress="quiet", same_bits=True, update="sharded", elementwise=True)
    with pytest.raises(UsageError, match="Mine"):
        Run(net, Mine(net.parameters()), Rows(48), global_batch=24, epochs=1, options=how)


def test_the_tree_knows_no_workers() -> None:
    def write(one: str | None, other: str | None) -> str:
        return f"({one}+{other})"

    for shards in (1, 2, 5, 7, 8, 12):
        leaves: dict[Branch, str] = {(depth_of(shards), v): str(v) for v in range(shards)}
        whole = fold(leaves, shards, write)
        for size in range(1, shards + 1):
            have = {}
            for rank in range(size):
                for branch in branches_of(rank, size, shards):
                    inside = {b: text for b, text in leaves.items() if _is_in(b, branch)}
                    have[branch] = fold(inside, shards, write, branch)
            assert fold(have, shards, write) == whole
            most = max(len(branches_of(rank, size, shards)) for rank in range(size))
            assert most == 1 or size & (size - 1), "one branch each where the size is 2 ** k"


def test_a_layer_that_is_unfrozen_between_steps_is_summed_too() -> None:
    def body(world: Any) -> list[Tensor]:
        net = mlp()
        first = next(net.parameters()).requires_grad_(False)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        how = RunOptions(progress="quiet", same_bits=True)
        run = Run(net, sgd, Rows(48), global_batch=24, epochs=2, shards=4, world=world, options=how)
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(cross_entropy(run.model(x), y))
            first.requires_grad_(True)
        return [param.detach().clone() for param in net.parameters()]

    expected = body(None)
    assert not torch.equal(expected[0], next(mlp().parameters()))
    for size in (2, 3):
        for found in run_ranks(size, body):
            assert all(map(torch.equal, found, expected))


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """What kind of processor torch finds, in each thread."""
    found = threading.local()
    real = torch.backends.cpu.get_cpu_capability()
    kind = lambda: getattr(found, "kind", real)  # noqa: E731
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", kind)
    return found


def test_a_run_continues_on_another_processor_only_when_told_so(
    processors: threading.local, tmp_path: Path
) -> None:
    def begin(**options: Any) -> Trained:
        how = RunOptions(progress="quiet", **options)
        return train(None, mlp, shards=4, folder=tmp_path / "run", options=how, stop_after=3)

    processors.kind = "ABACUS"
    begin(same_bits=True)
    processors.kind = "SLIDE RULE"
    with pytest.raises(UsageError, match=r"ABACUS.*\n?.*SLIDE RULE"):
        begin(same_bits=True)
    with pytest.raises(UsageError, match="ABACUS"):
        begin()
    begin(same_bits="here")


def test_other_threads_are_refused() -> None:
    net = mlp()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    how = RunOptions(progress="quiet", same_bits=True)
    run = Run(net, sgd, Rows(48), global_batch=24, epochs=1, options=how)
    with pytest.raises(UsageError, match=r"Step 2: .* 2 threads"):  # noqa: PT012
        for step in run:
            with step:
                for x, y, _ in step.batches():
                    step.backward(cross_entropy(run.model(x), y))
            torch.set_num_threads(2)


def test_workers_with_different_processors_are_refused(processors: threading.local) -> None:
    def body(world: Any) -> str:
        processors.kind = "SLIDE RULE" if world.rank == 2 else "ABACUS"
        with pytest.raises(DesyncError) as caught:
            same(world, mlp, {})
        return str(caught.value)

    for text in run_ranks(3, body):
        assert "ABACUS" in text
        assert "SLIDE RULE" in text
        assert "rank 2" in text
