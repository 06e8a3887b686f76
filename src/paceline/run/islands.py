"""Islands in a run: whose samples are whose, rounds as a part of the commit, and joining.

A run on an island is a run like any other: its workers, its generations and its checkpoints are its
own. It differs in three places. Its batch is every n-th sample of the global one; after a step that
ends a round, the commit exchanges with the other islands; and before its first step, or when the
others have gone on without it, it takes over their state.

A round is a part of its step: if a worker of the island dies in it, the step is undone on all of
them and comes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.data import Files, Plan
from paceline.errors import DesyncError, UsageError, check_kind
from paceline.files import RunFolder, as_plain, decode, encode, memory_of
from paceline.group import HostCopy, Membership, runs_ahead, waiting
from paceline.islands import (
    ExchangeStats,
    IslandPlace,
    Islands,
    Outer,
    Presence,
    Request,
    find_place,
)
from paceline.run import stop
from paceline.run.broadcast import broadcast_state
from paceline.run.recovery import continue_with
from paceline.telemetry import Message, Tracker, bytes_text, count_text
from paceline.update import Loss, WholeUpdate

if TYPE_CHECKING:
    from paceline.run.config import RunConfig
    from paceline.run.parts import RunParts

_OWN_FACTS = ("shards", "workers", "versions", "trace_step", "samples", "folder")
"""What may differ from island to island, or is compared inside of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandPlan(Plan):
    """The part of the plan that one island computes: every `islands`-th sample of each batch."""

    island: int
    islands: int

    def batch(self, step: int) -> range:
        return Plan.batch(self, step)[self.island :: self.islands]

    def count_samples(self, first: int, last: int) -> int:
        """How many samples the island has in these steps."""
        return sum(len(self.batch(step)) for step in range(first, last + 1))


def find_own(config: RunConfig) -> IslandPlace | None:
    """The island of this worker, where the run has any; its folder becomes the island's.

    So does that of its trackers: islands that shared it would write the same files.
    """
    islands = config.options.islands
    check_kind("islands", islands, Islands | None, "Pass paceline.Islands(...).")
    place = find_place("" if islands is None else islands.at)
    if islands is None:
        if place is not None:
            raise UsageError(
                f"The launcher was told to form {place.count} islands, and this run has none.",
                advice="Pass options=RunOptions(islands=Islands(...)), or leave --island out.",
            )
        return None
    _refuse_others(config)
    if place is None:
        return IslandPlace(0, 1, "")
    if config.global_batch % place.count:
        raise UsageError(
            f"A global batch of {config.global_batch} gives {place.count} islands unequal samples.",
            advice=f"Use a multiple of {place.count}.",
        )
    if config.folder is not None:
        shared, config.folder = Path(config.folder), place.folder(config.folder)
        for sink in config.sinks:
            if isinstance(sink, Tracker) and sink.folder and sink.folder.path == shared:
                sink.folder = RunFolder(config.folder)
    return place


def _refuse_others(config: RunConfig) -> None:
    """Refuse what does not go with islands, by name."""
    options = config.options
    reasons = {
        "same_bits": (options.same_bits, "islands average what they have computed apart"),
        f"update={options.update!r:.40}": (
            options.update != "whole",
            "an island steps the whole optimizer on each worker",
        ),
        "ema": (options.ema is not None, "it would average what rounds replace"),
        "patience": (options.patience is not None, "each island would decide by itself"),
        "loader": (config.loader is not None, "samples are dealt to islands by number"),
        "several models": (config.models is not None, "rounds are a part of one model's commit"),
        "Files": (isinstance(config.dataset, Files), "they are not dealt to islands yet"),
    }
    for name, (is_there, why) in reasons.items():
        if is_there:
            raise UsageError(f"{name} does not go with islands: {why}.", advice="Drop one of them.")


def deal(plan: Plan | None, place: IslandPlace) -> Plan:
    """The island's part of a plan."""
    if plan is None:
        raise UsageError(
            "The dataset has no length, and samples are dealt to islands by number.",
            advice="Pass a dataset with __len__ and __getitem__, or leave islands out.",
        )
    if (each := plan.global_batch // place.count) < plan.shards:
        raise UsageError(
            f"An island has {count_text(each, 'sample')} of a global batch of {plan.global_batch}, "
            f"fewer than its {plan.shards} shards.",
            advice="Use a larger global_batch, fewer shards, or fewer workers per island: without "
            "shards= there is one shard per worker of an island.",
        )
    values = {field.name: getattr(plan, field.name) for field in fields(Plan) if field.init}
    mine = IslandPlan(**values, island=place.number, islands=place.count)
    if plan.shortest_batch < place.count:
        raise UsageError(
            f"The last batch of an epoch has {count_text(plan.shortest_batch, 'sample')}, fewer "
            f"than the {place.count} islands.",
            advice="Pass drop_last=True in RunOptions, or choose another global_batch.",
        )
    return mine


def describe(place: IslandPlace, options: Islands, before: Any) -> list[str]:
    """What is said of it when the loop begins; `before` are the facts of a checkpoint."""
    lines: list[str] = []
    if place.count > 1:
        lines.append(
            f"Island {place.number} of {place.count}: every {options.every} steps their parameters "
            "are averaged. This is not the training that one island of all workers would do."
        )
    had = (before or {}).get("islands") or place.count
    if had != place.count:
        lines.append(
            f"The checkpoint is of {count_text(had, 'island')}, and now there "
            f"{'is' if place.count == 1 else 'are'} {place.count}: from here on samples are dealt "
            f"to {place.count}, and an island without a checkpoint of its own begins with the "
            "state of the first one."
        )
    return lines


class OuterUpdate(WholeUpdate):
    """Steps the optimizer in every step, and exchanges with the other islands where it is due.

    Invariant: common parameters change in a commit, on all workers of an island or on none.
    """

    parts: dict[str, Any]
    _run: RunParts
    _plan: IslandPlan
    """The run that this belongs to, and the island's plan, once it is put together."""

    def __init__(
        self, module: nn.Module, options: Islands, place: IslandPlace, *args: Any, **more: Any
    ) -> None:
        super().__init__(*args, **more)
        trained = [param for param in module.parameters() if param.requires_grad]
        self._frozen = [
            (n, param) for n, param in module.named_parameters() if not param.requires_grad
        ]
        if not all(param.is_floating_point() for param in trained):
            raise UsageError(
                "The model has parameters that are not real floating-point numbers, which islands "
                "cannot average.",
                advice="Train it without islands.",
            )
        if not trained:
            raise UsageError(
                "All parameters of the model are frozen, so islands have nothing to average.",
                advice="Have some trained before the run begins.",
            )
        if len(trained) < options.fragments:
            raise UsageError(
                f"{count_text(len(trained), 'parameter')} cannot be cut into {options.fragments} "
                "fragments.",
                advice="Use fewer fragments.",
            )
        kept = module.state_dict(keep_vars=True)  # a buffer that is not saved is a constant
        buffers = [each for name, each in module.named_buffers() if name in kept]
        # Infinities are those of masks; less themselves they are NaN.
        statistics = [b for b in buffers if b.is_floating_point() and b.isfinite().all()]
        self.outer = self.parts["islands"] = Outer(trained, statistics, options)
        self._module, self._options, self._place = module, options, place
        self._presence = Presence(place)
        self._request: Request | None = None
        self._gives = False
        """Whether an island waits for the state of this one."""
        self._copy: dict[str, Any] | None = None
        self._sent_bytes = self._rounds = 0
        self._missing: set[int] = set()
        """The islands that took no part in the last round."""

    def attach(self, run: RunParts, plan: Plan | None) -> None:
        """The run that this belongs to is put together; `plan` is that of the island."""
        assert isinstance(plan, IslandPlan)
        self._run, self._plan = run, plan
        if not run.progress.position.step:
            self.outer.anchor_here()  # the engine has made the workers' parameters equal since
        self.outer.must_join = True  # also after a checkpoint was loaded
        run.between_steps.append(self.tend)
        if self._place.count > 1:
            self._presence.renew()

    @property
    def _members(self) -> Membership:
        return self._run.place.membership

    def commit(self, losses: Sequence[Loss]) -> Tensor | None:
        step, last = self._step, self._plan.steps
        if not self._options.is_busy(step, last):
            return super().commit(losses)
        rate = float(self._optimizer.param_groups[0].get("lr", 0.0))  # the scheduler changes it
        lands = not self._options.delay or step == last
        lands = lands or self._options.start_landing(step, last) is not None
        # Only what lands can break off, and only where another worker's death is survived.
        if lands and self._run.recovery.is_on and self._members.size > 1:
            self._copy = self._copy_state()
        norm = super().commit(losses)
        self._exchange(step, last, rate)
        self._copy = None
        return norm

    def abandon(self) -> None:
        super().abandon()
        if (copy := self._copy) is not None:  # a worker died in a round: undo the inner step too
            self._copy = None
            self._module.load_state_dict(copy.pop("model"))
            for name, state in copy.items():
                self.parts[name].load_state_dict(state)

    def _copy_state(self) -> dict[str, Any]:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return deepcopy({"model": self._module.state_dict(), **states})

    def _exchange(self, step: int, last: int, rate: float) -> None:
        options, outer = self._options, self.outer
        began = options.start_landing(step, last)
        if began is not None and outer.payload is not None:
            self._land(began, last)
        numbers = options.starts(step, last)
        if not numbers or outer.must_join:
            return
        for name, _ in (each for each in self._frozen if each[1].requires_grad):
            raise UsageError(
                f"Step {step}: {name} is trained now and was frozen when the run began, so islands "
                "do not average it.",
                advice="Begin a run with what is trained; load_weights() takes the weights over.",
            )
        outer.begin(step, numbers, rate, is_last=step == last)
        if self._place.count == 1:
            self._tell(outer.finish_alone(numbers), 0, 0.0)
        elif options.delay and step != last:
            if self._request is not None:  # of a step that was undone
                self._request.drop()
            self._request = self._send(step, last) if self._members.leads else None
        else:
            self._land(step, last)

    def _send(self, step: int, last: int) -> Request:
        """Begin to exchange what began after `step`."""
        assert self.outer.payload is not None
        numbers = self._options.starts(step, last)
        before = (self._options.start_before(number, step) for number in numbers)
        weights = [self._plan.count_samples(first + 1, step) for first in before]
        head = self._describe(step, weights)
        payload = self.outer.payload
        copy = None if payload.device.type == "cpu" else HostCopy(payload)

        def get_body() -> memoryview:
            return memory_of(payload if copy is None else copy.read())

        def room_for(count: int) -> tuple[Tensor, memoryview]:
            pins = copy is not None and runs_ahead(payload.device)
            room = torch.empty(count, dtype=torch.uint8, pin_memory=pins)
            return room, memory_of(room)

        return Request(self._place, head, get_body, room_for)

    def _describe(
        self, step: int, weights: Sequence[int], *, is_last: bool = False
    ) -> dict[str, Any]:
        """A round, as this island asks for it."""
        rate, timeout_s = self.outer.rate, self._options.timeout_s
        head = {"step": step, "weights": weights, "rate": rate, "timeout_s": timeout_s}
        return {"ask": "round", "is_last": is_last, **head}

    def _land(self, step: int, last: int) -> None:
        """Take the step of all islands that began after `step`."""
        outer, members = self.outer, self._members
        self._presence.renew()
        answer: Any = None
        if members.leads:
            # What is left to wait for: a delayed round has been on its way for some steps.
            begin_s = perf_counter()
            request, self._request = self._request or self._send(step, last), None
            answer = *self._wait(request), perf_counter() - begin_s
        answer = broadcast_state(members, answer, 0, "Exchanging with other islands")
        head, sent, seconds = answer
        if head.get("is_late"):
            outer.drop()
            outer.must_join = True
            return
        assert outer.payload is not None
        size, numbers = len(outer.payload), self._options.starts(step, last)
        own, has_moved = head["islands"].index(self._place.number), step != self._step
        parts = [*sent.split(size)] if len(sent) else []
        if not head["has_own"]:
            parts.insert(own, outer.payload)
        rate = fmean(head["rates"])  # equal on all islands, even if their schedulers differ
        shift = outer.finish(numbers, head["weights"], parts, own, rate=rate, has_moved=has_moved)
        self._gives = head["gives"]
        self._tell(shift, size, seconds)
        self._tell_who(set(range(self._place.count)) - set(head["islands"]), step)

    def _wait(self, request: Request) -> tuple[dict[str, Any], Any]:
        """The answer of the others; ends where the group of this worker is broken."""
        member = getattr(self._run.recovery, "member", None)
        with waiting(self._members.group, elsewhere=True):
            return request.wait(lambda: member is not None and member.is_over)

    def _tell(self, shift: ExchangeStats, size: int, seconds: float) -> None:
        """Log what a round was like; all workers of the island say the same, and count as one."""
        self._rounds, self._sent_bytes = self._rounds + 1, self._sent_bytes + size
        values: dict[str, float | Tensor] = {"island_drift": shift.drift, "island_bytes": size}
        values["island_round_s"] = seconds
        for name, value in values.items() if self._place.count > 1 else ():
            self._run.outlets.metrics.add(name, value, 1.0 / self._members.size)

    def _tell_who(self, missing: set[int], step: int) -> None:
        """Say from which round on an island is missing, or is there again."""
        for island in sorted(missing ^ self._missing):
            is_gone = island in missing
            how = "is missing from" if is_gone else "takes part again from"
            text = f"Island {island} {how} the round after step {step} on."
            level = "warning" if is_gone else "info"
            self._run.outlets.sinks.tell("message", Message(text, level))
        self._missing = missing

    def tend(self) -> None:
        """Between two steps, on all workers: give the state to who waits for it, or take theirs."""
        while self.outer.must_join:
            self._join()
        step = self._run.progress.position.step
        if step == self._plan.steps and self._place.count > 1 and self._members.leads:
            # A round without bytes: an island that dies before it gets the state of the others.
            head = self._describe(step + 1, (), is_last=True)
            head, _ = self._wait(Request(self._place, head))
            self._gives = self._gives or bool(head.get("gives"))
        if self._gives and self._members.leads:
            gathered = self._run.training.state.gather(self._run.progress.position, {})
            head = {"ask": "state", "step": step}
            state = encode(gathered)
            self._wait(Request(self._place, head, lambda: state))
        self._gives = False
        self._sum_up()

    def _sum_up(self) -> None:
        """After the last step, say what all rounds have cost; nothing of one island."""
        if self._run.progress.position.step == self._plan.steps and self._sent_bytes:
            text = f"Island {self._place.number} of {self._place.count} has sent "
            text += f"{bytes_text(self._sent_bytes)} in {count_text(self._rounds, 'round')}."
            facts = {"bytes": self._sent_bytes, "rounds": self._rounds}
            self._run.outlets.sinks.tell("message", Message(text, "info", "islands", facts))
            self._sent_bytes = 0

    def _join(self) -> None:
        if self._place.count == 1:
            self.outer.must_join = False
            return
        self._presence.renew()
        members, answer = self._members, None
        # From when it has joined, the others wait for this island in rounds: all of it is there.
        broadcast_state(members, None, 0, "Meeting to join the other islands")
        if members.leads:
            head, body = self._wait(Request(self._place, self._introduce()))
            answer = head, decode(bytes(body)) if body else None
        head, state = broadcast_state(members, answer, 0, "Joining the other islands")
        match head:
            case {"gone": True}:
                return  # once more
            case {"over": True}:
                self._run.progress.stopping = stop.BY_OTHERS
                self._run.progress.reason = "the other islands have ended the training without it"
            case {"differs": [key, there, here]}:
                raise DesyncError(
                    "The islands were started with different arguments.",
                    f"First difference: {key} is {there!r} on another island, {here!r} on "
                    f"{self._place.name}.",
                    "Pass the same to Run on every island.",
                )
            case {"step": int()} if state is not None:
                self._take_over(state)
        self._gives = bool(head.get("gives"))
        self.outer.must_join = False

    def _introduce(self) -> dict[str, Any]:
        """What this island says of itself to the others."""
        digest = sha256()
        fixed = [param for _, param in self._frozen]
        for each in [*(fragment.anchor for fragment in self.outer.fragments), *fixed]:
            plain = as_plain(each)
            digest.update(memory_of(plain))
        facts = {key: repr(v) for key, v in self._run.agreed.items() if key not in _OWN_FACTS}
        return {
            "ask": "join",
            "step": self._run.progress.position.step,
            "anchor": digest.hexdigest()[:16],
            "facts": facts,
            "timeout_s": self._options.timeout_s,
        }

    def _take_over(self, state: Any) -> None:
        """Continue where another island is, with its state."""
        reached = continue_with(self._run, state)
        self.outer.forget_rest()
        step = self._run.progress.position.step
        text = f"{self._place.name.capitalize()} continues after step {step} with the "
        text += f"state of the others; it had come to step {reached} by itself."
        self._run.outlets.sinks.tell("message", Message(text, "warning"))
