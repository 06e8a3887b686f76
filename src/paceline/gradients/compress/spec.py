"""How gradients may be shrunk, as plain data: a name such as "powersgd:rank=4", or a dataclass.

"bf16"    half the bytes, float32's range, 8 bits of precision
"fp16"    half the bytes, 11 bits of precision, values under 6e-8 vanish
"powersgd"  a few columns instead of each matrix; what is left out is sent later
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

import torch

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class BF16:
    """Every value travels as bfloat16."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class FP16:
    """Every value travels as float16, divided before it is sent so that sums do not overflow."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSGD:
    """Every large matrix travels as two thin ones; what they miss is added to the next step."""

    rank: int = 4
    """Columns of the thin matrices: more are closer to the gradient, and more bytes."""
    start_step: int = 10
    """Steps at the beginning that are sent as they are, while gradients change fastest."""
    min_ratio: float = 2.0
    """A tensor that would not shrink by at least this factor is sent as it is."""
    seed: int = 0
    """Of the first directions to look in; the same on every rank."""

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise UsageError(
                f"PowerSGD: rank is {self.rank!r}.", advice="Pass a whole number from 1 up."
            )
        if type(self.start_step) is not int or self.start_step < 0:
            raise UsageError(
                f"PowerSGD: start_step is {self.start_step!r}.",
                advice="Pass how many steps to send uncompressed, from 0 up.",
            )
        if not self.min_ratio >= 0:
            raise UsageError(
                f"PowerSGD: min_ratio is {self.min_ratio!r}.", advice="Pass a number from 0 up."
            )
        if type(self.seed) is not int:
            raise UsageError(f"PowerSGD: seed is {self.seed!r}.", advice="Pass a whole number.")


Spec = BF16 | FP16 | PowerSGD

SPEC_BY_NAME: dict[str, type[BF16] | type[FP16] | type[PowerSGD]] = {
    "bf16": BF16,
    "fp16": FP16,
    "powersgd": PowerSGD,
}
_OTHER_NAMES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "power_sgd": "powersgd"}


def parse(text: str | Spec) -> Spec:
    """What a name stands for: `name`, or `name:option=value,option=value`."""
    if isinstance(text, (BF16, FP16, PowerSGD)):
        return text
    if not isinstance(text, str):
        raise UsageError(
            f"compression is {text!r}, which is neither a name nor one of the dataclasses.",
            advice=f"Pass one of {_listed(SPEC_BY_NAME)}.",
        )
    name, _, options = text.strip().partition(":")
    kind = SPEC_BY_NAME.get(name)
    if kind is None:
        raise UsageError(
            f"compression={text!r}: there is no {name!r}.{_did_you_mean(name, SPEC_BY_NAME)}",
            advice=f"Pass one of {_listed(SPEC_BY_NAME)}.",
        )
    return kind(**_parse_options(text, kind, options))


def _parse_options(text: str, kind: type[Any], options: str) -> dict[str, Any]:
    types = {field.name: field.type for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in types:
            advice = f"It has {_listed(types)}." if types else "It has no options."
            raise UsageError(
                f"compression={text!r}: there is no option {key!r}.{_did_you_mean(key, types)}",
                advice=advice,
            )
        if key in values:
            raise UsageError(f"compression={text!r}: {key} is there twice.", advice="Say it once.")
        try:
            values[key] = int(value) if types[key] == "int" else float(value)
        except ValueError:
            raise UsageError(
                f"compression={text!r}: {key}={value!r} is not a number."
                if equals
                else f"compression={text!r}: {key} has no value.",
                advice=f"Write {key}={getattr(kind(), key)}, for example.",
            ) from None
    return values


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))


def _did_you_mean(name: str, known: Any) -> str:
    close = _OTHER_NAMES.get(name.lower(), name.lower())
    if close not in known:
        close = next(iter(difflib.get_close_matches(close, list(known), n=1, cutoff=0.5)), "")
    return f" Did you mean {close!r}?" if close else ""
