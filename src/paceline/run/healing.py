"""How workers that have come unequally far are made equal: compare, transfer, adopt.

By one step at most, and by the results of what they did together since. A worker that has less gets
it from those who have more, so that nothing is done twice and no worker waits for something that is
over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.errors import PeerError
from paceline.group import exchange
from paceline.run.broadcast import broadcast_state
from paceline.run.metrics import add_sums
from paceline.run.models import adopt, adopted_by
from paceline.telemetry import Message, count_text

if TYPE_CHECKING:
    from paceline.run.member import Member
    from paceline.run.parts import RunParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far one worker is, as it tells the others."""

    worker: int
    """What the launcher calls it."""
    step: int
    """Steps applied; -1 for a newcomer, which has no state."""
    shards: int = 1
    turn: int = 0
    """Turns applied of the next one."""
    is_whole: bool = True
    """Whether it has all of the optimizer's state."""
    results: list[list[Any]]
    """What it has been told since the last step."""
    epochs: int = 0
    saved: int | None = None
    """The last step that was saved, as the worker that writes knows it."""
    tried: int = 0
    kept: int = 0
    """The last save in which it took part, and, if it writes from now on, that it has."""
    stopping: int = 0
    asked: list[int]
    """After which steps all were to save, and to evaluate, as far as it has heard."""
    identity: int = 0
    """Which model the engine says this is."""
    adopted: list[list[str]]
    """By model, the parameters that were unfrozen, as its engine follows them."""
    live: list[str]
    """The buffers that change."""
    fit: dict[str, Any]
    """The size of a piece, where shards do not fit into memory."""

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What all workers make of their standings: the same on each."""

    ahead: Standing
    """That of a worker which has come furthest, with what any of them knows: all adopt it."""
    leader: int
    """The rank whose state the others get."""
    is_whole: bool
    """Whether the optimizer's state is to be had; otherwise all must go back."""
    behind: frozenset[int]
    """The ranks that get it."""
    joined: list[int]
    """The workers that are new."""
    lost_save: int
    """The step of a save that died with the worker that was writing it; 0 without one."""


def compare(standings: Sequence[Standing]) -> Verdict:
    """Who has come furthest, and who needs what; by rank."""
    best = max(each.position for each in standings)
    if best[0] < 0:
        raise PeerError("No worker is left that knows the state of the run.")
    furthest = [each for each in standings if each.position == best]
    whole = [each for each in furthest if each.is_whole]
    behind = (
        rank
        for rank, each in enumerate(standings)
        if each.position < best or (whole and not each.is_whole)
    )
    tried = max(each.tried for each in standings)
    # Only rank 0, which writes, knows of a save that it is there; the others know that they took
    # part.
    is_lost = bool(whole) and tried > standings[0].kept
    asked = [max(steps) for steps in zip(*(each.asked for each in standings), strict=True)]
    if is_lost:
        asked[0] = best[0] + 1  # it is taken again after the next step
    everyones = zip(*(each.adopted for each in standings), strict=True)
    ahead = replace(
        furthest[0],
        # Said in the same order everywhere: the longest list contains the others.
        results=max((each.results for each in furthest), key=len),
        saved=next((each.saved for each in standings if each.saved is not None), None),
        stopping=max(each.stopping for each in standings),
        asked=asked,
        adopted=[max(of_one_model, key=len) for of_one_model in everyones],
        live=sorted({name for each in standings for name in each.live}),
        # One may have heard that memory ran out, and another only that a worker died.
        fit=min((each.fit for each in furthest), key=lambda fit: fit["size"] or math.inf),
    )
    return Verdict(
        ahead=ahead,
        leader=standings.index((whole or furthest)[0]),
        is_whole=bool(whole),
        behind=frozenset(behind),
        joined=[each.worker for each in standings if each.step < 0],
        lost_save=tried if is_lost else 0,
    )


class Healing:
    """One worker's part in it, in a new generation; one that `has_led` was rank 0 so far."""

    def __init__(self, parts: RunParts, *, has_led: bool) -> None:
        self._parts, self._has_led = parts, has_led

    def heal(self, member: Member, inherited: dict[str, Any], *, has_lost_state: bool) -> bool:
        """Make the state of all that of the worker which has come furthest.

        Returns whether the optimizer's is not to be had any more, since parts of it were with the
        dead only: then all must go back.
        """
        mine, members = self._standing(member, has_lost_state), self._parts.place.membership
        what = "Comparing how far the workers are"
        told = exchange(members.group, asdict(mine), members.word_device, what)
        verdict = compare([Standing(**each) for each in told])
        if verdict.behind:
            self._transfer(verdict, is_new=member.is_new)
        self._adopt(verdict.ahead, mine, is_new=member.is_new)
        self._inherit(verdict.ahead, inherited)
        if members.leads and not self._has_led:
            self._parts.take_over()
        if members.leads:
            self._tell(member.number, inherited, verdict.joined)
            if verdict.lost_save:
                text = f"The checkpoint of step {verdict.lost_save} is gone with the worker that "
                text += "was to write it; another one is taken."
                self._parts.outlets.sinks.tell("message", Message(text, "warning"))
        return not verdict.is_whole

    def _standing(self, member: Member, has_lost_state: bool) -> Standing:
        parts = self._parts
        training, outlets = parts.training, parts.outlets
        buffers = training.buffers
        # First: it may decide whether this worker has all of the optimizer's state.
        training.state.rescue()
        return Standing(
            worker=parts.place.world.rank,
            step=-1 if member.is_new else parts.progress.position.step,
            shards=parts.progress.shards,
            turn=0 if member.is_new else parts.progress.position.turn,
            is_whole=training.state.is_whole and not has_lost_state,
            results=parts.exchanges.results,
            epochs=outlets.metrics.epochs,
            saved=outlets.saving.saved_step if self._has_led else None,
            tried=outlets.saving.tried_step,
            kept=outlets.saving.find_kept(was_written_here=self._has_led),
            stopping=parts.progress.stopping,
            asked=[parts.progress.save_at, parts.progress.evaluate_at],
            identity=training.engine.identity,
            adopted=adopted_by(training.engine),
            live=[] if buffers is None else sorted(buffers.live),
            fit=training.fit.state_dict(),
        )

    def _transfer(self, verdict: Verdict, *, is_new: bool) -> None:
        """Send the leader's state to all; workers that are behind load it."""
        parts, members = self._parts, self._parts.place.membership
        state, progress = parts.training.state, parts.progress
        sent = None
        if members.rank == verdict.leader:
            common = parts.outlets.metrics.common_sums()
            sent = state.gather(progress.position, common, with_parts=verdict.is_whole)
        sent = broadcast_state(members, sent, verdict.leader, "Healing")
        if members.rank in verdict.behind:
            # Who missed the end of a step still runs the code that follows it in the loop, and
            # so does to the state objects what the others have done to theirs.
            state.forget()
            before = progress.position
            progress.position, common = state.load(
                sent, with_objects=is_new, with_parts=verdict.is_whole
            )
            if is_new:
                state.modes.join(sent["modes"])
            if is_new or before != progress.position:
                parts.outlets.metrics.take_common(common)
            if not is_new and before != progress.position:
                level = partial(state.load_numbers, sent) if verdict.is_whole else None
                parts.exchanges.level = level

    def _adopt(self, ahead: Standing, mine: Standing, *, is_new: bool) -> None:
        """Take what the workers have agreed on."""
        parts = self._parts
        training, exchanges = parts.training, parts.exchanges
        if mine.position < ahead.position:
            here = (ahead.step + 1, ahead.turn) if ahead.turn else (ahead.step,)
            # As those are seeded who applied the step: the script's code behind it may draw.
            training.generators.seed(parts.config.seed, "between", *here)
            parts.outlets.metrics.epochs, parts.outlets.metrics.step = ahead.epochs, ahead.step
            # The code behind that step has not run here, and asks for its results from the first
            # on.
            exchanges.asked = 0
        progress = parts.progress
        progress.stopping = ahead.stopping
        progress.save_at, progress.evaluate_at = ahead.asked
        parts.cut.adopt(ahead.shards)
        exchanges.results = ahead.results
        if is_new:
            exchanges.asked = len(ahead.results)  # the loop's code after this step is not for it
        # What a dead one was writing may be there or not: it is written once more.
        parts.outlets.saving.saved_step = ahead.saved
        if mine.identity != ahead.identity:
            training.engine.identity = ahead.identity
        adopt(training.engine, ahead.adopted)
        if mine.fit != ahead.fit:
            training.fit.load_state_dict(ahead.fit)
        if training.buffers is not None:
            training.buffers.live.update(ahead.live)

    def _inherit(self, ahead: Standing, inherited: dict[str, Any]) -> None:
        """Add what the dead had computed of this epoch to what this worker has."""
        metrics, sinks = self._parts.outlets.metrics, self._parts.outlets.sinks
        for ledger in inherited.values():
            # Of an epoch that is over: all have exchanged its sums.
            if ledger.get("epoch") != metrics.epochs:
                continue
            if ledger["sums"] is None:
                text = "What a dead worker had computed is not in the metrics of this epoch: it "
                text += "had more of them than it could leave behind."
                sinks.tell("message", Message(text, "warning"))
                continue
            add_sums(metrics.epoch, ledger["sums"])
            step, turn = ledger["last"], ledger["turn"]
            # The part of the step in which it died counts only if a worker has applied that step.
            is_turn = step == ahead.step + 1 and 0 < turn <= ahead.turn
            if is_turn or step <= ahead.step:
                add_sums(metrics.epoch, ledger["next"])

    def _tell(self, generation: int, inherited: dict[str, Any], joined: list[int]) -> None:
        """Keep in the run folder who is gone and who is new; the launcher says it on the spot."""
        parts = self._parts
        died = [
            {"worker": int(name.partition(".")[0]), "how": ledger["how"], "step": ledger["died_in"]}
            | ({"stack": ledger["stack"]} if ledger.get("stack") else {})
            for name, ledger in inherited.items()
            if "how" in ledger
        ]
        step, size = parts.progress.position.step, parts.place.membership.size
        lines = [f"Worker {each['worker']} {each['how']}." for each in died]
        lines += [f"Worker {worker} has joined." for worker in joined]
        text = " ".join([*lines, f"{count_text(size, 'worker')} train."])
        facts = {"step": step, "generation": generation, "workers": size}
        message = Message(text, "info", "generation", {**facts, "died": died, "joined": joined})
        parts.outlets.sinks.tell("message", message)
