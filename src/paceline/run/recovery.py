"""What becomes of a run when another worker is gone: an error, or the next generation.

    launcher                                            workers
       │ a worker ends (pidfd)                             │ step k
       ├── generation g+1: the others, urgent ──────────> │ their waits end with a PeerError,
       ├── starts a replacement (forked, milliseconds)     │ they meet, build a group,
       │                                                   │ compare how far each is; who is
       │ <──────────────────────────── joined g+1 ──────── │ behind is healed; step k anew,
       │ <──── ready ──── the replacement, at its loop     │ its shards dealt to who is left
       ├── generation g+2: all, between two steps ───────> │ they vote on the step, meet,
       │ <──────────────────────────── joined g+2 ──────── │ and heal the newcomer

Everything that waits for other workers runs inside `attempt` or `holds`; no other module of a run
catches a `PeerError`, but for `member` while it forms a group. That one brings a worker from one
generation to the next, `healing` makes the state equal.
The launcher's side is `launcher.generations`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from paceline.errors import AuditError, CheckpointError, PacelineError, PeerError
from paceline.group import Membership, exchange
from paceline.run.code import read_code
from paceline.run.healing import Healing
from paceline.run.member import Member, follow_groups
from paceline.run.metrics import ExactSums, add_all
from paceline.telemetry import Message, name_steps

if TYPE_CHECKING:
    from paceline.data import Portion
    from paceline.env import Placement
    from paceline.group import Link
    from paceline.run.parts import RunParts


T = TypeVar("T")
AGAIN: Any = object()
"""Instead of a result that was lost: try again."""


class Recovery:
    """How a run deals with lost workers; in this class they are an error."""

    is_on = False
    """Whether the run outlives a worker."""
    must_go_back = False
    """Whether a part of the state is gone: the same on all workers. Parameters are whole, so what
    follows a step runs as ever; the next step begins at a checkpoint."""
    step_abandoned = False
    """Whether this worker's step was given up, while others may be done with the one before, or do
    it again: until its next step, or until it goes back, it exchanges nothing with them."""

    ended = ""
    """Why the launcher ends the run, once it does."""

    def attempt(self, task: Callable[[], T], instead: T = AGAIN) -> T:
        """What `task` gives, which waits for other workers, between two steps.

        If one of them is gone the rest regroup; then it is tried again, or `instead` taken.
        """
        return task()

    def holds(self, task: Callable[[], object], *, completes: bool = False) -> bool:
        """Do a part of a step that waits for other workers; False if the step is lost in it.

        Where it `completes` the step's sum, this worker writes its ledger before.
        """
        task()
        return True

    def explains(self, _error: BaseException) -> bool:
        """Whether an error only says that another worker is gone."""
        return False

    def is_outlived(self, _error: BaseException) -> bool:
        """Whether the others continue although this worker ends with an error."""
        return False

    def begin(self) -> None:
        """The loop begins."""

    def end(self, *, is_left: bool = False, is_saved: bool = False) -> None:
        """The loop is over, or `is_left`: from now on no worker is waited for.

        `is_saved` if a process that begins anew would find the training complete.
        """

    def is_due(self) -> bool:
        """Whether a generation waits to be joined between two steps."""
        return False

    def ask_to_leave(self) -> bool:
        """This worker alone was asked to stop; False if the others cannot do without it."""
        return False

    def tell_facts(self, **facts: Any) -> None:
        """Let a launcher know of the run what has changed since it began."""

    def write_ledger(self) -> None:
        """Keep what no other worker knows where it outlives this one."""

    def regroup(self, *, is_lost: bool = True) -> None:
        """Continue in the newest generation, after a failure unless all want to change."""
        raise PeerError("A worker is gone.")

    def redeal_after_failure(self, step: int, is_passed: Callable[[], bool]) -> Portion | None:
        """Regroup; this worker's part of the step that was lost, None if that is over."""
        raise PeerError(f"Step {step}: a worker is gone.")

    def change_generation(self) -> bool:
        """All want to join the next generation, between two steps; False if this one left it."""
        return True

    def go_back(self) -> None:
        """Begin again at the newest checkpoint; all workers do so, between two steps."""


class Survival(Recovery):
    """Those who are left regroup, heal each other and try again."""

    is_on = True

    def __init__(self, link: Link, place: Placement, parts: RunParts) -> None:
        """`place` is this worker's, as the launcher has told it."""
        groups = follow_groups(place, link.backend or dist.get_backend())
        self._link, self._parts = link, parts
        self._has_led = parts.place.membership.leads
        self.member = Member(link, parts.place.membership, groups, self._heal)

    def attempt(self, task: Callable[[], T], instead: T = AGAIN) -> T:
        while True:
            try:
                return task()
            except PeerError:
                if not self.is_on:
                    raise
                self.regroup()
                if instead is not AGAIN:
                    return instead

    def holds(self, task: Callable[[], object], *, completes: bool = False) -> bool:
        if completes:
            self.write_ledger()
        try:
            task()
        except PeerError:
            if not self.is_on:
                raise
            return False
        return True

    def explains(self, error: BaseException) -> bool:
        return self.is_on and self.member.explains(error)

    def is_outlived(self, error: BaseException) -> bool:
        if not self.is_on or self.ended or self._parts.progress.size == 1:
            return False
        if isinstance(error, PacelineError) and error.ends_run:
            return False
        is_accident = isinstance(error, AuditError | PeerError | torch.AcceleratorError)
        return is_accident or self._link.survives_errors

    def begin(self) -> None:
        facts = {**self._parts.agreed, "grows": self._parts.may_cut, "code": read_code()}
        self.member.begin(facts, self._parts.progress.position.step)

    def end(self, *, is_left: bool = False, is_saved: bool = False) -> None:
        if self.is_on:
            self._link.tell("finished", is_left=is_left, is_saved=is_saved)
            self.is_on = False

    @property
    def ended(self) -> str:  # type: ignore[override]
        return self.member.ended

    def is_due(self) -> bool:
        return self.is_on and self.member.is_due

    def ask_to_leave(self) -> bool:
        return self.is_on and self.member.ask_to_leave()

    def tell_facts(self, **facts: Any) -> None:
        self._link.tell("facts", facts=facts)

    def regroup(self, *, is_lost: bool = True) -> None:
        if is_lost:
            self._parts.training.state.withdraw()
        self.member.regroup(is_lost=is_lost)
        self._parts.dealing.deal()

    def redeal_after_failure(self, step: int, is_passed: Callable[[], bool]) -> Portion | None:
        self.regroup()
        return self.attempt(partial(self._portion_of, is_passed))

    def _portion_of(self, is_passed: Callable[[], bool]) -> Portion | None:
        if is_passed() or self.must_go_back:
            return None
        return next(self._parts.dealing.portions, None)

    def change_generation(self) -> bool:
        """Let all workers have all of the state, then join the next generation, or go."""
        self.holds(self._parts.training.state.make_whole)  # from the workers that have it
        if not self.member.is_leaving:
            self.regroup(is_lost=False)
            return True
        outlets = self._parts.outlets
        outlets.report_checkpoints(wait=True)
        outlets.metrics.flush(wait=True)
        self.write_ledger()
        self.member.step_aside()
        outlets.saving.end()
        outlets.sinks.drop_terminal()
        # Last, when folder and terminal are free: the launcher now announces who writes instead.
        self._link.tell("left", step=self._parts.progress.position.step)
        return False

    def write_ledger(self) -> None:
        """Write down the sums of the epoch, and apart those of the step under way.

        In every step before the sum that completes it, and so before any worker applies it: the
        others know whether they have.
        """
        if not self.is_on:
            return
        parts = self._parts
        metrics, is_cpu = parts.outlets.metrics, parts.place.device.type == "cpu"
        word = {
            "last": metrics.step,
            "turn": metrics.turn,
            "epoch": metrics.epochs,
            # Of a GPU the step under way would have to be waited for, in every step.
            "sums": metrics.applied() if is_cpu else metrics.epoch,
            "next": metrics.so_far() if is_cpu else {},
            "taken": sorted(self.member.taken),
        }
        # Too long for its slot: that something is missing is then told instead.
        if not self.member.ledger.write(word):
            self.member.ledger.write({**word, "sums": None, "next": None})

    def go_back(self) -> None:
        parts = self._parts
        found = parts.outlets.saving.find()
        if found is None:
            raise CheckpointError(
                "A worker died with its share of the optimizer's state, and no checkpoint is left.",
                advice="See why none was written, and begin again.",
            )
        reached = continue_with(parts, found[0])
        self.must_go_back = self.step_abandoned = False
        step = parts.progress.position.step
        again = f"{name_steps(step + 1, reached)} done again" if reached > step else "none is lost"
        text = "A share of the optimizer's state is gone with its worker, so all go back to the "
        text += f"checkpoint of step {step}: {again}."
        facts = {"step": step, "reached": reached}
        parts.outlets.sinks.tell("message", Message(text, "warning", "went back", facts))

    def _heal(self, inherited: dict[str, Any]) -> bool:
        """In a new group, together with all others: make the state equal. Whether steps are lost.

        `inherited` are the ledgers of workers that died, on one member only.
        """
        has_lost_state = self.must_go_back
        healing = Healing(self._parts, has_led=self._has_led)
        self.must_go_back = healing.heal(self.member, inherited, has_lost_state=has_lost_state)
        self._has_led = self._parts.place.membership.leads
        self.member.taken |= set(inherited)
        # Before the launcher hears whose ledgers are taken, and forgets them.
        self.write_ledger()
        return self.must_go_back


def continue_with(parts: RunParts, state: Any) -> int:
    """Go to the position of a state that all workers load, between two steps; returns the step at
    which they were."""
    training, progress = parts.training, parts.progress
    reached = progress.position.step
    training.state.forget()
    progress.position, sums = training.state.load(state)
    position = progress.position
    training.generators.seed(parts.config.seed, "between", position.step)
    # The sums in a checkpoint are those of all workers, and are added up again.
    sums = sums if parts.place.membership.leads else {}
    parts.outlets.metrics.begin_at(position.epoch, sums, position.step)
    parts.exchanges.begin_step()
    parts.recovery.write_ledger()
    parts.dealing.deal()
    return reached


class Exchanges:
    """What the workers of a run tell each other between two steps, each of them once.

    A worker may die in the middle, and those who are left may have come unequally far. So results
    are kept until the next step: a worker that missed one gets it from those that have it.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.recovery = Recovery()
        self.results: list[list[Any]] = []
        """What all workers have said since the last step, the same on each of them."""
        self.asked = 0
        """How many of them this worker has asked for."""
        self.level: Callable[[], object] | None = None
        """What makes this worker's state equal again, where it runs code of the script that those
        it is compared with have run, or do not run. See Note [Code that runs twice]."""

    def begin_step(self) -> None:
        """A step is over: what was said before it is of no use any more."""
        self.results, self.asked, self.level = [], 0, None

    def catch_up(self) -> None:
        """This worker's script has come as far as those of the others: undo what is done twice."""
        if self.level is not None:
            level, self.level = self.level, None
            level()

    def exchange(self, compute: Callable[[], Any], what: str) -> list[Any]:
        """The values of all workers, each of which calls this between two steps.

        `compute` gives this one's. Where a worker dies meanwhile it is called again, unless one of
        the others has all of them.
        """
        if self.recovery.step_abandoned:
            return [compute()]
        return self.recovery.attempt(partial(self._next, compute, what))

    def add_up(self, compute: Callable[[], ExactSums], what: str) -> ExactSums:
        """The sums of all workers, exactly: equal to the last bit however many there are."""
        return add_all(self.exchange(compute, what))

    def _next(self, compute: Callable[[], Any], what: str) -> list[Any]:
        members = self._membership
        if self.asked == len(self.results):
            self.catch_up()
            told = exchange(members.group, compute(), members.word_device, what)
            self.results.append(told)
        self.asked += 1
        return self.results[self.asked - 1]


# Note [Code that runs twice]
#
# A worker that lost the sum of a step gets the step from one that has it. That one has also run the
# script's code behind the block, up to where it waits for others; the worker runs this code next,
# and what it does to parameters or to the optimizer, such as a lower rate or a new group, would be
# done twice. So the worker takes the same state again where it has come as far: before it first
# exchanges something, in its next turn, or at the end of the loop's body.
#
# Where a step is lost at the end of its block, the code behind the block and the code before the
# next one run without a step in between. Where that block begins, the state is that in which the
# lost one was left: the others do the step again without leaving it.
