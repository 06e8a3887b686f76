"""What a worker has watched of its run: when it does what, and who holds the others up.

Nothing here fails a training: what cannot be watched is said in the opening lines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline import env
from paceline.errors import UsageError
from paceline.observe import spans, stragglers
from paceline.observe.run_folder import RunFolder
from paceline.observe.stragglers import Blame, StragglerDetector
from paceline.run.options import RunOptions
from paceline.run.record import Record

Listener = Callable[[int, Blame], None]


class Watching:
    """One worker's part of watching a run.

        made --start_timeline--> spans are recorded --begin--> blame is recorded --end--> as before

    Invariant: what somebody else has started, by hand or by `paceline run --timeline`, is left to
    them.
    """

    def __init__(self, options: RunOptions, folder: RunFolder | None, rank: int) -> None:
        self.lines: list[str] = []
        """What is to be said about it when the loop begins."""
        self._folder, self._rank = folder, rank
        self._wants_timeline = options.timeline
        self._has_timeline = False
        self._before: tuple[StragglerDetector, list[Listener], Callable[[str], None]] | None = None
        asked = options.trace_step or env.read_observation().trace_step
        self.trace_step = 0 if folder is None else asked
        """The step to be recorded stage by stage; 0 for none."""
        if folder is None and asked:
            self.lines.append(f"Step {asked} is not recorded: that needs folder= of Run.")
        if folder is None and options.timeline:
            self.lines.append("There is no timeline: that needs folder= of Run.")

    def note_progress(self, step: int, steps: int | None) -> None:
        """The run goes on after `step` steps of all `steps`, which may leave none to record."""
        wanted = self.trace_step
        if 0 < wanted <= step:
            self.lines.append(f"Step {wanted} is not recorded: it is applied already.")
        elif steps is not None and wanted > steps:
            self.lines.append(f"Step {wanted} is not recorded: the run has {steps} steps.")

    def start_timeline(self) -> None:
        """Record spans from now on; an engine that is alone looks only when it is made."""
        is_taken = spans.is_on() or env.read_observation().timeline
        if self._folder is None or not self._wants_timeline or is_taken:
            return
        try:
            spans.start(self._folder.timeline, self._rank)
        except (OSError, UsageError) as error:
            self.lines.append(f"There is no timeline: {error}")
        else:
            self._has_timeline = True

    def begin(self, group: Any, record: Record) -> None:
        """Let the comparison of the ranks speak through the run, which may be drawing a bar."""
        comparison = stragglers.find(group)
        if comparison is not None:
            self._before = comparison, comparison.listeners, comparison.print_line
            comparison.listeners = [lambda _step, blame: record.blame(blame)]
            comparison.print_line = _say_nothing

    def end(self) -> None:
        """Leave everything as it was; may be called twice."""
        if self._before is not None:
            comparison, listeners, print_line = self._before
            comparison.listeners, comparison.print_line = listeners, print_line
            self._before = None
        if self._has_timeline:
            self._has_timeline = False
            spans.stop()


def _say_nothing(_line: str) -> None:
    """The record says it, with the number of the run's step."""
