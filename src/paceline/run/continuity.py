"""What a run's workers do together between two steps, and how they are brought in step again.

A worker may die at any moment, and those who are left may have come unequally far: by one step at
most, and by the results of what they did together since. Whoever has less gets it from those who
have more, so that nothing is done twice and nobody waits for something that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from paceline import comm
from paceline.errors import CheckpointError, PeerError
from paceline.observe.units import count_text, name_steps
from paceline.run.metrics import Sums, merge
from paceline.run.plan import Portion
from paceline.run.sinks import Message
from paceline.run.state import hand_over

if TYPE_CHECKING:
    from paceline.run.context import StepContext


class Continuity:
    """The thread of a run on one worker, from generation to generation."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._led = context.membership.leads
        """Whether this worker was rank 0 so far, the one that writes."""
        self._results: list[list[Any]] = []
        """What the workers have told each other since the last step, in order."""
        self._asked = 0
        self._portions: Iterator[Portion] = iter(())
        self._dealt_in = -1
        """The generation to whose members the steps are dealt."""
        self.must_go_back = False
        """Whether a part of the state is gone: the same on all workers. Parameters are whole, so
        what follows a step runs as ever; the next step begins at a checkpoint."""
        self.is_apart = False
        """Whether this worker's step was given up, while others may be done with the one before:
        until it goes back, it exchanges nothing with them."""

    def begin(self) -> None:
        """Hand out steps from where the run is."""
        context = self._context
        if context.survival is not None:
            context.vote.is_due = lambda: context.survival.is_due  # type: ignore[union-attr]
            context.stop.leave = context.survival.ask_to_leave
            context.survival.begin(context.agreed)
        self.deal()

    def end(self, *, is_left: bool = False) -> None:
        """The loop is over, or `is_left`: from now on nobody is waited for or replaced."""
        context = self._context
        if context.survival is not None:
            context.survival.finish(is_left=is_left)
            context.survival, context.vote.is_due = None, lambda: False

    def deal(self) -> None:
        """Hand out the steps that are not applied, to the workers that are there now."""
        self._dealt_in = self._context.membership.generation
        self._portions = self._context.loader.portions(self._context.position)

    def deal_to_members(self) -> None:
        """Deal anew if somebody else has moved the membership on since."""
        if self._dealt_in != self._context.membership.generation:
            self.deal()

    def next_portion(self) -> Portion | None:
        """This worker's part of the next step; None after the last."""
        while True:
            try:
                if self.must_go_back:
                    self.go_back()
                return next(self._portions, None)
            except PeerError:
                if self._context.survival is None:
                    raise
                self.regroup()

    def regroup(self, *, is_lost: bool = True) -> None:
        """Continue in the newest generation, after a failure unless all want to change."""
        context = self._context
        assert context.survival is not None
        context.survival.regroup(is_lost=is_lost)
        self.deal()

    def hand_in(self) -> None:
        """Let everybody have all of the state, before somebody goes or comes."""
        with suppress(PeerError):  # whoever has it by then hands it to the others
            self._context.state.make_whole()

    def deal_anew(self, step: int) -> Portion | None:
        """This worker's part of a step that was lost; None if that is applied, or given up."""
        self.regroup()
        while self._context.position.step < step and not self.must_go_back:
            try:
                return next(self._portions, None)
            except PeerError:
                self.regroup()
        self.is_apart = self._context.position.step < step
        return None

    def go_back(self) -> None:
        """Begin again at the newest checkpoint; all workers do so, between two steps."""
        context, reached = self._context, self._context.position.step
        found = context.saving.find()
        if found is None:
            raise CheckpointError(
                "A worker died with its share of the optimizer's state, and no checkpoint is left.",
                advice="See why none was written, and begin again.",
            )
        context.state.forget()
        context.position, sums = context.state.give_back(found[0])
        step = context.position.step
        context.generators.seed(context.config.seed, "between", step)
        context.metrics.begin_at(context.position.epoch, sums if context.membership.leads else {})
        self.must_go_back = self.is_apart = False
        self._results, self._asked = [], 0
        self.leave_word()
        self.deal()
        again = f"{name_steps(step + 1, reached)} done again" if reached > step else "none is lost"
        text = "A share of the optimizer's state is gone with its worker, so all go back to the "
        text += f"checkpoint of step {step}: {again}."
        facts = {"step": step, "reached": reached}
        context.sinks.tell("message", Message(text, "warning", "went back", facts))

    def on_step_end(self) -> None:
        self._results, self._asked = [], 0

    def exchange(self, compute: Callable[[], Any], what: str) -> list[Any]:
        """The values of all workers, each of which calls this between two steps.

        `compute` gives this one's. Where a worker dies meanwhile it is called again, unless
        somebody has all of them.
        """
        members = self._context.membership
        if self.is_apart:
            return [compute()]
        while self._asked >= len(self._results):
            try:
                mine = compute()
                everyone = [mine]
                if members.size > 1:
                    everyone = comm.exchange(members.group, mine, members.word_device, what)
                self._results.append(everyone)
            except PeerError:
                if self._context.survival is None:
                    raise
                self.regroup()
        self._asked += 1
        return self._results[self._asked - 1]

    def add_up(self, compute: Callable[[], Sums], what: str) -> Sums:
        """The sums of all workers, added in rank order and so equal everywhere to the last bit."""
        everyone = self.exchange(compute, what)
        if len(everyone) == 1:
            return dict(everyone[0])
        total: Sums = {}
        for sums in everyone:
            merge(total, sums)
        return total

    def leave(self) -> None:
        """Go between two steps, while the others continue."""
        context = self._context
        assert context.survival is not None
        context.metrics.flush(wait=True)
        self.leave_word()
        context.survival.step_aside()
        context.saving.end()
        context.sinks.fall_silent()
        context.survival.tell_left(context.position.step)

    def leave_word(self, *, is_applied: bool = True) -> None:
        """Write down what nobody else knows: the sums of the epoch, and those of the last step.

        In every step before the sum that completes it, and so before it is applied; between two
        steps that last step may not be among those of the epoch yet.
        """
        context, metrics = self._context, self._context.metrics
        assert context.survival is not None
        word = {
            "last": context.position.step + (not is_applied),
            "epoch": metrics.epochs,
            "sums": metrics.epoch,
            "next": metrics.so_far() if context.device.type == "cpu" else {},
            "taken": sorted(context.survival.taken),
        }
        if not context.survival.ledger.write(word):
            context.survival.ledger.write({**word, "sums": None, "next": None})

    def heal(self, inherited: dict[str, Any]) -> bool:
        """Make everybody's state that of the worker which has come furthest.

        Returns whether the optimizer's is not to be had any more, since parts of it were with the
        dead only: then all must go back.
        """
        context, members = self._context, self._context.membership
        metrics, saving, buffers = context.metrics, context.saving, context.buffers
        assert context.survival is not None
        is_new = context.survival.is_new
        mine = {
            "worker": context.world.rank,
            "step": -1 if is_new else context.position.step,
            "is_whole": context.state.is_whole and not self.must_go_back,
            "results": self._results,
            "epochs": metrics.epochs,
            "saved": saving.saved_step if self._led else None,
            "stopping": context.stopping,
            "model": context.model._number,
            "live": [] if buffers is None else sorted(buffers.live),
        }
        what = "Comparing how far the workers are"
        everyone = comm.exchange(members.group, mine, members.word_device, what)
        best = max(each["step"] for each in everyone)
        if best < 0:
            raise PeerError("Nobody is left who knows the state of the run.")
        furthest = [each for each in everyone if each["step"] == best]
        whole = [each for each in furthest if each["is_whole"]]
        self.must_go_back = not whole
        leader = everyone.index((whole or furthest)[0])
        if any(each["step"] < best or (whole and not each["is_whole"]) for each in everyone):
            state = None
            if members.rank == leader:
                state = context.state.gather(context.position, {}, with_parts=bool(whole))
            state = hand_over(members, state, leader, "Healing")
            if mine["step"] < best or (whole and not mine["is_whole"]):
                # Who missed the end of a step still runs the code that follows it in the loop, and
                # so does to the state objects what the others have done to theirs.
                context.state.forget()
                context.position, _ = context.state.give_back(
                    state, with_objects=is_new, with_parts=bool(whole)
                )
            if mine["step"] < best:
                context.generators.seed(context.config.seed, "between", best)
                metrics.epochs = furthest[0]["epochs"]
                self._asked = 0
        context.stopping = max(each["stopping"] for each in everyone)
        self._results = max((each["results"] for each in furthest), key=len)
        if is_new:
            self._asked = len(self._results)  # the loop's code after this step is not for it
        # What a dead one was writing may be there or not: it is written once more.
        saving.saved_step = next((s for each in everyone if (s := each["saved"]) is not None), None)
        context.model._number = context.model._reducer.number = furthest[0]["model"]
        if buffers is not None:
            buffers.live.update(name for each in everyone for name in each["live"])
        for ledger in inherited.values():
            if ledger.get("epoch") == metrics.epochs and ledger["sums"] is None:
                text = "What a dead worker had computed is not in the metrics of this epoch: it "
                text += "had more of them than it could leave behind."
                context.sinks.tell("message", Message(text, "warning"))
            elif ledger.get("epoch") == metrics.epochs:
                merge(metrics.epoch, ledger["sums"])
                if ledger["last"] <= best:
                    merge(metrics.epoch, ledger["next"])
        context.survival.taken |= set(inherited)
        self.leave_word()
        if members.leads and not self._led:
            context.take_over()
        self._led = members.leads
        if members.leads:
            self._tell(inherited, [each["worker"] for each in everyone if each["step"] < 0])
        return self.must_go_back

    def _tell(self, inherited: dict[str, Any], joined: list[int]) -> None:
        """Keep in the run folder who is gone and who is new; the launcher says it on the spot."""
        context, survival = self._context, self._context.survival
        assert survival is not None
        died = [
            {"worker": int(name.partition(".")[0]), "how": ledger["how"], "step": ledger["died_in"]}
            for name, ledger in inherited.items()
            if "how" in ledger
        ]
        size = context.membership.size
        facts = {"step": context.position.step, "generation": survival.number, "workers": size}
        lines = [f"Worker {each['worker']} {each['how']}." for each in died]
        lines += [f"Worker {worker} has joined." for worker in joined]
        text = " ".join([*lines, f"{count_text(size, 'worker')} train."])
        message = Message(text, "info", "generation", {**facts, "died": died, "joined": joined})
        context.sinks.tell("message", message)
