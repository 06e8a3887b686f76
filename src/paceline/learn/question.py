"""One question, and how its answer is found: by a function that runs, and whose code is shown.

    @ask("sampler", "9", kind="number")
    def shared_rows(lab):
        '''How many rows do two of the {workers} workers share?'''
        taken = [row for rows in lab.dealt for row in rows]
        return Found(len(taken) - len(set(taken)), "...")

The docstring is the question, with names of the lab in braces; the body is what a teacher sees as
"the code that computed it". Nothing is stored as the right answer.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.learn import values
from paceline.learn.values import Kind
from paceline.observe.units import list_text, shape_text

if TYPE_CHECKING:
    from paceline.learn.lab import Lab

YES_NO = ("yes", "no")


@dataclass(frozen=True, slots=True)
class Found:
    """What a run gave: the value, why it is so, and where that can be seen."""

    value: Any
    """A plain value; True and False answer a question with the choices yes and no."""
    why: str
    evidence: Sequence[str] = ()
    """Lines of what was printed, measured or raised."""
    stage: tuple[str, str] | None = None
    """Which recorded step shows it (a name of the lab), and at which stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A question with its computed answer, as plain data: what `--answers --json` prints."""

    name: str
    lesson: str
    breaks: bool
    """Whether something is broken on purpose to see what then happens."""
    facts: list[str]
    """Which entries of the list of facts it covers; see docs/learn.md."""
    kind: Kind
    unit: str
    tolerance: float
    question: str
    choices: list[str]
    answer: Any
    shown: str
    why: str
    evidence: list[str] = field(default_factory=list)
    stage: list[str] | None = None
    recorded: list[str] = field(default_factory=list)
    """That stage, drawn."""
    mark: list[str] = field(default_factory=list)
    """The answer as it stands there."""
    code: str = ""
    seconds: float = 0.0
    """How long the run took; nothing where an earlier question had run it."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that can be put before its answer is known."""

    lesson: str
    facts: tuple[str, ...]
    kind: Kind
    find: Callable[[Lab], Found]
    choices: Sequence[str] | str = ()
    """What to choose from, or which name of the lab has it."""
    unit: str = ""
    tolerance: float = 0.0
    breaks: bool = False
    needs: str = ""
    """A name of the lab: where it is empty, the question has no sense."""

    @property
    def name(self) -> str:
        return self.find.__name__.replace("_", "-")

    @property
    def code(self) -> str:
        """What the function runs to find the value, without the words that it says about it."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.find)))
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        found = function.body[-1]
        assert isinstance(found, ast.Return)
        assert isinstance(found.value, ast.Call)
        found.value = found.value.args[0]
        used = {node.id for node in ast.walk(found.value) if isinstance(node, ast.Name)}
        lines = []
        for statement in reversed(function.body[1:]):
            named = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
            assigned = {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if statement is found or not assigned or assigned & used:
                lines.append(ast.unparse(statement))
                used |= named
        return "\n".join(reversed(lines))

    def prompt(self, lab: Lab) -> str:
        """The question in words; may run what its numbers come from."""
        return " ".join((self.find.__doc__ or "").split()).format_map(_Names(lab))

    def choices_in(self, lab: Lab) -> list[str]:
        chosen = lab.named(self.choices) if isinstance(self.choices, str) else self.choices
        return list(chosen)

    def fits(self, lab: Lab) -> bool:
        return not self.needs or bool(lab.named(self.needs))

    def answer(self, lab: Lab) -> Answered:
        """Run what finds the answer; on the built-in model where the reader's own fails."""
        try:
            return self._answer(lab)
        except Exception as error:
            if not lab.is_own:
                raise
            lab.leave_own_model(error)
            return self._answer(lab)

    def _answer(self, lab: Lab) -> Answered:
        begin_s = time.perf_counter()
        choices, prompt = self.choices_in(lab), self.prompt(lab)
        found = self.find(lab)
        value = YES_NO[not found.value] if isinstance(found.value, bool) else found.value
        return Answered(
            name=self.name,
            lesson=self.lesson,
            breaks=self.breaks,
            facts=list(self.facts),
            kind=self.kind,
            unit=self.unit,
            tolerance=self.tolerance,
            question=prompt,
            choices=choices,
            answer=value,
            shown=values.show(self.kind, value, self.unit),
            why=found.why,
            evidence=list(found.evidence),
            stage=list(found.stage) if found.stage else None,
            recorded=lab.draw(found.stage) if found.stage else [],
            mark=_marks(self.kind, value) if found.stage else [],
            code=self.code,
            seconds=time.perf_counter() - begin_s,
        )


def _marks(kind: Kind, value: Any) -> list[str]:
    """How a recorded stage writes a shape, or the rows of several parts."""
    if kind == "shape":
        return [shape_text(value)]
    return [f"{each} x" for each in value] if kind == "numbers" else []


class _Names(Mapping[str, str]):
    """Names of the lab as text, looked up when a question needs them."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def __getitem__(self, name: str) -> str:
        value = self._lab.named(name)
        return list_text(value) if isinstance(value, list) else str(value)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


ASKED: list[Question] = []
"""Those of all modules that have been imported; `catalogue` has all."""


def ask(lesson: str, *facts: str, kind: Kind, **options: Any) -> Callable[..., Any]:
    """Put the decorated function's question on the list."""

    def note(find: Callable[[Lab], Found]) -> Callable[[Lab], Found]:
        ASKED.append(Question(lesson=lesson, facts=facts, kind=kind, find=find, **options))
        return find

    return note
