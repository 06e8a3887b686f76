"""Step time with AdamW: the update whole, sharded, and sharded by other libraries.

Like `step`, with the same processes and turns, and another optimizer: fused, or in torch's default
form, which on CPUs is a loop over tensors. The floor is no communication at all and the whole
update. torch's `ZeroRedundancyOptimizer` shards an update by whole tensors. DeepSpeed's ZeRO-1
takes part if it is installed: it cuts flat buffers, as Paceline does.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW

from benchmarks.contestants import FLOOR, KEPT_FLOOR, Trainer, enter
from benchmarks.models import MODELS
from benchmarks.spread import rows_of, slowest
from benchmarks.step import MAX_STEPS, WARM_STEPS, take_turns
from benchmarks.step import Member as StepMember
from benchmarks.tables import print_table, read_names
from benchmarks.teams import standing
from paceline import DDPOptions, DistributedDataParallel, World, shard_update
from paceline.transport.select import keep_freed_memory

FORMS = {"fused": {"fused": True}, "default": {}}
"""Of AdamW, with the arguments that choose them."""
RATE = 1e-4
DEEPSPEED = "DeepSpeed, ZeRO-1"
TUNED: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "batched_grad_copy": True,
}


def _bare(module: nn.Module, form: dict[str, Any]) -> Trainer:
    return Trainer(module, AdamW(module.parameters(), lr=RATE, **form))


def _kept(module: nn.Module, form: dict[str, Any]) -> Trainer:
    keep_freed_memory()
    return _bare(module, form)


def _paceline(transport: str, *, shards: bool) -> Callable[[nn.Module, dict[str, Any]], Trainer]:
    def build(module: nn.Module, form: dict[str, Any]) -> Trainer:
        wrapped = DistributedDataParallel(module, options=DDPOptions(transport=transport))
        trainer = _bare(wrapped, form)
        if shards:
            shard_update(wrapped, trainer.optimizer)
        return trainer

    return build


def _torch(cap_mb: float) -> Callable[[nn.Module, dict[str, Any]], Trainer]:
    return lambda module, form: _bare(TorchDDP(module, bucket_cap_mb=cap_mb, **TUNED), form)


def _zero(module: nn.Module, form: dict[str, Any]) -> Trainer:
    wrapped = TorchDDP(module, bucket_cap_mb=5, **TUNED)
    optimizer: Any = ZeroRedundancyOptimizer(
        wrapped.parameters(), AdamW, parameters_as_bucket_view=True, lr=RATE, **form
    )
    return Trainer(wrapped, optimizer)


def _deepspeed(module: nn.Module, form: dict[str, Any]) -> Trainer:
    deepspeed: Any = importlib.import_module("deepspeed")
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=AdamW(module.parameters(), lr=RATE, **form),
        config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
        dist_init_required=False,
    )
    engine.optim = engine.optimizer.optimizer
    return Trainer(engine, engine, engine.backward)


BUILD: dict[str, Callable[[nn.Module, dict[str, Any]], Trainer]] = {
    FLOOR: _bare,
    KEPT_FLOOR: _kept,
    "paceline": _paceline("auto", shards=False),
    "paceline, sharded": _paceline("auto", shards=True),
    "paceline over c10d": _paceline("c10d", shards=False),
    "paceline over c10d, sharded": _paceline("c10d", shards=True),
    "torch tuned, 5 MB": _torch(5),
    "torch tuned, 25 MB": _torch(25),
    "torch, ZeroRedundancyOptimizer": _zero,
    DEEPSPEED: _deepspeed,
}
FLOORS = [FLOOR, KEPT_FLOOR]


class Member(StepMember):
    """One rank of one contestant, with the optimizer in one form."""

    def __init__(self, world: World, model: str, form: str, contestant: str) -> None:
        enter(world)
        self._world, self._model = world, MODELS[model]
        self._batch = self._model.batch(torch.Generator().manual_seed(world.rank))
        torch.manual_seed(0)
        self._trainer = BUILD[contestant](self._model.build(), FORMS[form])

    def state_numel(self) -> int:
        """The number of elements of the optimizer's state on this rank."""
        optimizer = getattr(self._trainer.optimizer, "optim", self._trainer.optimizer)
        states = [state.values() for state in optimizer.state.values()]
        return sum(v.numel() for state in states for v in state if isinstance(v, torch.Tensor))


def measure(
    model: str, form: str, names: list[str], size: int, *, rounds: int, block_ms: float
) -> dict[str, Any]:
    with standing(size, names, Member, model, form) as teams:
        for team in teams.values():
            team.ask("train", steps=WARM_STEPS)
        whole, shared = (teams[name].ask("sample") for name in ("paceline", "paceline, sharded"))
        if whole != shared:
            raise RuntimeError(f"{model}, {form}: the sharded update gives another training.")
        alone = statistics.median(slowest(teams[FLOOR].ask("train", steps=5)))
        steps = max(1, min(MAX_STEPS, int(block_ms / 1e3 / alone)))
        seconds = take_turns(teams, steps, rounds, budget_s=600)
        transport = teams["paceline"].ask("transport")[0]
        kept = {name: max(team.ask("state_numel")) for name, team in teams.items()}
    rows = rows_of(seconds, floors=FLOORS, rival="torch")
    for row, name in zip(rows, seconds, strict=True):
        row["state"] = round(kept[name] / kept[FLOOR], 3)
    facts = {"ranks": size, "threads": 1, "rounds": rounds, "steps": steps}
    return {"rows": rows, **facts, "transport": transport}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", "--models", default="all", help="comma-separated names, or all")
    parser.add_argument("--form", default="fused,default", help="of AdamW: fused, default or both")
    parser.add_argument("--ranks", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds after the warm-up")
    parser.add_argument("--block-ms", type=float, default=300, help="approximate time of a turn")
    parser.add_argument("--only", default="", help="only contestants whose name contains this")
    parser.add_argument("--quick", action="store_true", help="2 rounds of few steps")


def main(args: argparse.Namespace) -> dict[str, Any]:
    rounds, block_ms = (2, 20.0) if args.quick else (args.rounds, args.block_ms)
    results: dict[str, Any] = {}
    first = (FLOOR, "paceline", "paceline, sharded")
    names = [name for name in BUILD if name in first or args.only in name]
    if importlib.util.find_spec("deepspeed") is None:
        names = [name for name in names if name != DEEPSPEED]
    for model in read_names(args.model, MODELS):
        for form in args.form.split(","):
            title = f"{model}, AdamW {form}, {args.ranks} ranks"
            print(f"measuring {title} ...", file=sys.stderr, flush=True)
            results[title] = measure(
                model, form, names, args.ranks, rounds=rounds, block_ms=block_ms
            )
            print_table(title, results[title]["rows"])
    return results
