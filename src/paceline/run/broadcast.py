"""A state, or tensors, that one worker sends to all others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.ddp import broadcast_tensors
from paceline.files import restore_tensors, separate_tensors
from paceline.group import Membership, broadcast, exchange

_DTYPE_BY_NAME = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}


def broadcast_state(members: Membership, value: Any, root: int, what: str) -> Any:
    """The value that rank `root` has, on every worker; what the others pass is not looked at."""
    is_root = members.rank == root
    if members.size == 1:
        return value
    tensors, skeleton = separate_tensors(value) if is_root else ({}, b"")
    shapes = {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    # A state may hold strings that are not valid Unicode, such as names of files.
    mine = [skeleton.decode("utf-8", "surrogatepass"), shapes]
    text, shapes = exchange(members.group, mine, members.word_device, what)[root]
    if not is_root:
        tensors = {
            name: torch.empty(shape, dtype=_DTYPE_BY_NAME[dtype])
            for name, (dtype, shape) in shapes.items()
        }
    copy_from(members, root, list(tensors.values()), what)
    return (
        value if is_root else restore_tensors(text.encode("utf-8", "surrogatepass"), tensors, what)
    )


def copy_from(members: Membership, root: int, tensors: Sequence[Tensor], what: str) -> None:
    """Overwrite the tensors with those of rank `root`, some megabytes at a time."""
    is_root, copy = members.rank == root, partial(broadcast, members.group)
    broadcast_tensors(copy, tensors, root, what, is_root=is_root, device=members.word_device)
