"""Gradients that take fewer bytes on their way: rounded to 16 bits, or as thin factors.

`make("bf16", group)` gives the state of a communication hook, `hook` the hook itself; the state
counts the bytes.
"""

from __future__ import annotations

from paceline.comm import Group
from paceline.gradients.compress.cast import Cast
from paceline.gradients.compress.codec import Compression as Compression
from paceline.gradients.compress.codec import hook as hook
from paceline.gradients.compress.power_sgd import LowRank
from paceline.gradients.compress.spec import BF16 as BF16
from paceline.gradients.compress.spec import FP16 as FP16
from paceline.gradients.compress.spec import PowerSGD as PowerSGD
from paceline.gradients.compress.spec import Spec as Spec
from paceline.gradients.compress.spec import parse as parse
from paceline.gradients.compress.traffic import BucketTraffic as BucketTraffic

__all__ = [
    "BF16",
    "FP16",
    "BucketTraffic",
    "Compression",
    "PowerSGD",
    "Spec",
    "hook",
    "make",
    "parse",
]


def make(spec: str | Spec, group: Group) -> Compression:
    """The state that compresses one model's gradients, summed over `group`."""
    parsed = parse(spec)
    return LowRank(parsed, group) if isinstance(parsed, PowerSGD) else Cast(parsed, group)
