"""What workers do together is on the agenda: every collective of every option, in one order."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import paceline
from paceline import DDPOptions, Run, RunOptions, World
from paceline.ddp import NaiveEngine
from paceline.group import Membership, collectives
from paceline.run import stop
from paceline.run.agenda import AGENDA, BETWEEN_STEPS, STEP
from paceline.run.step import Step
from paceline.testing import run_ranks, seeded

SOURCE = Path(paceline.__file__).parent
TALKS = {"all_reduce", "all_gather", "broadcast", "exchange", "gather_bytes", "start_all_reduce"}
TALKS |= {"start_reduce", "start_broadcast"}
# They talk for whoever calls them: the ways to talk, and commands that train without a run.
WAYS = ("group", "transport", "show", "launcher")
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, (X.sum(1) > 0).long())
ENTRIES_BY_MODULE = {
    module: [entry.name for entry in AGENDA if module in entry.modules]
    for module in {module for entry in AGENDA for module in entry.modules}
}
STEP_ORDER = [entry.name for entry in (*STEP, *BETWEEN_STEPS)]


def talking_modules() -> Iterator[str]:
    """Every module that imports a way to talk."""
    for path in SOURCE.rglob("*.py"):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            is_import = isinstance(node, ast.ImportFrom) and node.module == "paceline.group"
            names = {alias.name for alias in node.names} if is_import else set()
            if TALKS & names and not name.startswith(WAYS):
                yield name


def test_a_module_that_talks_has_an_entry() -> None:
    assert not set(talking_modules()) - set(ENTRIES_BY_MODULE)


def test_an_entry_names_modules_that_exist() -> None:
    for module in ENTRIES_BY_MODULE:
        assert (SOURCE / f"{module.replace('.', '/')}.py").exists(), module


class Heard:
    """The collectives of every rank, which are threads here, in their order."""

    def __init__(self) -> None:
        self.by_thread: dict[int, list[str]] = {}

    def note(self, word: str) -> None:
        self.by_thread.setdefault(threading.get_ident(), []).append(word)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        start: Callable[..., Any] = collectives._start
        enter: Callable[..., Any] = Step.__enter__
        leave: Callable[..., Any] = Step.__exit__

        def started(group: Any, what: str, *rest: Any) -> Any:
            self.note(who_talks() or f"outside the agenda: {what}")
            return start(group, what, *rest)

        def entered(step: Step) -> Step:
            self.note("|")
            return enter(step)  # type: ignore[no-any-return]

        monkeypatch.setattr(collectives, "_start", started)

        def left(step: Step, *error: Any) -> bool:
            is_lost: bool = leave(step, *error)
            self.note("/")
            return is_lost

        monkeypatch.setattr(Step, "__enter__", entered)
        monkeypatch.setattr(Step, "__exit__", left)


def who_talks() -> str | None:
    """The innermost module on the stack that the agenda knows."""
    frame = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "").removeprefix("paceline.")
        if module in ENTRIES_BY_MODULE:
            return str(module)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def train(world: World, arguments: dict[str, Any], options: dict[str, Any], folder: Path) -> int:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)]
    net = seeded(nn.Sequential(*layers))
    if "engine" not in arguments:
        arguments = {**arguments, "ddp": DDPOptions(transport="c10d")}
    run = Run(
        net,
        torch.optim.AdamW(net.parameters(), lr=0.01),
        DATA,
        global_batch=12,
        epochs=3,
        shards=3,
        folder=folder,
        world=world,
        options=RunOptions(progress="quiet", **options),
        **arguments,
    )
    for step in run:
        with step:
            for x, y in step.batches():
                step.backward(cross_entropy(run.model(x), y))
        if step.number % 5 == 0:
            run.evaluate(lambda batch: {"loss": cross_entropy(run.model(batch[0]), batch[1])})
    return run.step


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "naive engine": ({"engine": NaiveEngine}, {"trace_step": 4, "noise_every": 2}),
    "saving": ({}, {"checkpoint_every": 2, "clip_norm": 1.0, "ema": 0.9}),
    "shared out": ({}, {"update": "sharded", "checkpoint_every": 3, "trace_step": 4}),
    "recorded": ({}, {"trace_step": 4, "noise_every": 2}),
    "audited": ({}, {"same_bits": True, "audit": 0.5, "trace_step": 4}),
    "stopped early": ({}, {"best_metric": "loss", "better": "lower", "patience": 1}),
    "everything": (
        {"loader_workers": 1},
        {"trace_step": 6, "noise_every": 3, "ema": 0.9, "checkpoint_every": 1, "clip_norm": 2.0},
    ),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_ranks_talk_as_the_agenda_says_in_one_order(
    case: str, size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = Heard()
    heard.watch(monkeypatch)
    arguments, options = CASES[case]
    run_ranks(size, train, arguments, options, tmp_path / "run")
    talks = [words for words in heard.by_thread.values() if "|" in words]
    assert len(talks) == size
    assert all(words == talks[0] for words in talks)  # what one does, all do
    assert not [word for word in talks[0] if word.startswith("outside")]
    steps = " ".join(talks[0]).split("|")[1:]
    for number, words in enumerate(steps[:-1], start=1):
        places = [
            min(STEP_ORDER.index(name) for name in ENTRIES_BY_MODULE[word] if name in STEP_ORDER)
            for word in words.partition("/")[0].split()
            if set(ENTRIES_BY_MODULE[word]) & set(STEP_ORDER)
        ]
        in_step = [place for place in places if place < len(STEP)]
        assert in_step == sorted(in_step), (number, words)


def test_the_steps_between_two_votes_at_most_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request is heard soon even if the first steps take no time, and others do."""
    monkeypatch.setattr(stop, "time", SimpleNamespace(monotonic=lambda: 0.0))

    def body(world: World) -> list[int]:
        vote = stop.Vote(Membership.of(world.group), stop.StopRequest(lambda text: None))
        asked = []
        for step in range(1, 100):
            vote.start(step)
            if vote.pending is not None:
                asked.append(step)
                vote.result(step)
        return asked

    assert run_ranks(2, body) == [[1, 3, 7, 15, 31, 63]] * 2
