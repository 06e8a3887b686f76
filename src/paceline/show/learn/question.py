"""One question, and the function that computes its answer, whose code is shown.

    def shared_rows(lab):
        taken = [row for rows in lab.dealt for row in rows]
        return Found(len(taken) - len(set(taken)))

`lessons` has its text; the reader can see the function's code. No right answer is stored anywhere.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any

from paceline.show.learn import values
from paceline.show.learn.lessons import Asked
from paceline.show.learn.values import Kind
from paceline.telemetry import list_text, shape_text

if TYPE_CHECKING:
    from paceline.show.learn.lab import Lab

YES_NO = ["yes", "no"]
_OMITTED = ("choices_of", "needs")
"""Fields that are of no use once a question is answered."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a run: the value, the reason, and the evidence."""

    value: Any
    """A plain value; True and False answer a question with the choices yes and no."""
    evidence: Sequence[str] = ()
    """Lines of output, measurements or errors."""
    why: str = ""
    """Replaces the lesson's reason."""
    is_sure: bool = True
    """Whether the answer counts: a measurement on a busy machine is unreliable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Asked):
    """A question with its computed answer, as plain data: what `--answers --json` prints."""

    lesson: str
    answer: Any
    shown: str
    evidence: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    """The drawn stage."""
    mark: list[str] = field(default_factory=list)
    """The answer as it is written in the drawn stage."""
    code: str = ""
    is_sure: bool = True
    seconds: float = 0.0
    """How long the run took; about 0 where an earlier question has run it."""

    def as_json(self) -> dict[str, Any]:
        return {name: each for name, each in asdict(self).items() if name not in _OMITTED}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, which can be asked before its answer is computed."""

    lesson: str
    asked: Asked
    find: Callable[[Lab], Found]

    @property
    def name(self) -> str:
        return self.asked.name

    def program(self, lab: Lab) -> str:
        """A script that computes and prints the value, for a reader to change and run."""
        code, options = self.code, lab.options
        module = inspect.getmodule(self.find)
        used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        known = {name: value for name, value in vars(module).items() if name in used}
        plain = sorted(n for n, v in known.items() if inspect.ismodule(v) and v.__name__ == n)
        named = sorted(name for name in known if name not in plain)
        names = ("seed", "workers", "batch", *(["model"] if lab.is_own else []))
        given = {name: getattr(options, name) for name in names}
        chosen = ", ".join(f"{key}={value!r}" for key, value in given.items() if value is not None)
        return "\n".join(
            [
                *(f"import {name}" for name in plain),
                "from paceline.show.learn import make_lab",
                *([f"from {self.find.__module__} import {', '.join(named)}"] if named else []),
                "",
                "# make_lab(seed=1, workers=4, batch=10) asks about other numbers.",
                f"lab = make_lab({chosen})",
                code,
                "",
            ]
        )

    @property
    def code(self) -> str:
        """The function's code that computes the value, without its texts."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self.find)))
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        found = function.body[-1]
        assert isinstance(found, ast.Return)
        assert isinstance(found.value, ast.Call)
        value = found.value.args[0]
        function.body[-1] = found = ast.parse(f"print({ast.unparse(value)})").body[0]
        assert isinstance(found, ast.Expr)
        used = {node.id for node in ast.walk(found.value) if isinstance(node, ast.Name)}
        lines = []
        for statement in reversed(function.body):
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
        """The text of the question; may run what its numbers need."""
        return _LabFormatter().format(self.asked.question, lab)

    def why(self, lab: Lab) -> str:
        return _LabFormatter().format(self.asked.why, lab)

    def choices_in(self, lab: Lab) -> list[str]:
        asked = self.asked
        if asked.kind == "choice" and not (asked.choices or asked.choices_of):
            return YES_NO
        return list(lab.named(asked.choices_of)) if asked.choices_of else asked.choices

    def fits(self, lab: Lab) -> bool:
        return not self.asked.needs or bool(lab.named(self.asked.needs))

    def answer(self, lab: Lab) -> Answered:
        """Compute the answer; with the built-in model if the reader's own fails."""
        try:
            return self._answer(lab)
        except Exception as error:
            if not lab.is_own:
                raise
            lab.leave_own_model(error)
            return self._answer(lab)

    def _answer(self, lab: Lab) -> Answered:
        begin_s = time.perf_counter()
        asked, choices, prompt = self.asked, self.choices_in(lab), self.prompt(lab)
        found = self.find(lab)
        value = YES_NO[not found.value] if isinstance(found.value, bool) else found.value
        settled = {"question": prompt, "choices": choices, "why": found.why or self.why(lab)}
        return Answered(
            **{**asdict(asked), **settled},
            lesson=self.lesson,
            answer=value,
            shown=values.show(asked.kind, value, asked.unit),
            evidence=list(found.evidence),
            recorded=lab.draw(asked.stage) if asked.stage else [],
            mark=_marks(asked.kind, value) if asked.stage else [],
            code=self.program(lab),
            is_sure=found.is_sure,
            seconds=time.perf_counter() - begin_s,
        )


def _marks(kind: Kind, value: Any) -> list[str]:
    """A shape, or the rows of several parts, as a drawn stage writes them."""
    if kind == "shape":
        return [shape_text(value)]
    return [f"{each} x" for each in value] if kind == "numbers" else []


class _LabFormatter(Formatter):
    """Replaces names of the lab by their values, which are computed when needed."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return args[0].named(key)

    def format_field(self, value: Any, format_spec: str) -> str:
        return list_text(value) if isinstance(value, list) else format(value, format_spec)
