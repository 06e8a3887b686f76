"""Who takes part, and talking: the world of ranks, its collectives, and values as bytes.

Names are loaded when first used: the launcher needs sockets and the codec, and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

_COLLECTIVES = [
    "Group",
    "Pending",
    "all_gather",
    "all_reduce",
    "announce_exit",
    "broadcast",
    "exchange",
    "explain_failure",
    "gloo_subgroup",
    "have_left",
    "post_last_words",
    "start_all_reduce",
    "start_broadcast",
    "start_reduce",
    "tell_of_waiting",
    "world_ranks",
]
_HOME_BY_NAME = {
    **dict.fromkeys(_COLLECTIVES, "paceline.comm.collectives"),
    "Membership": "paceline.comm.membership",
    **dict.fromkeys(["World", "default_group", "init_process_group"], "paceline.comm.world"),
}

__all__ = [*_HOME_BY_NAME]

if TYPE_CHECKING:
    from paceline.comm.collectives import Group as Group
    from paceline.comm.collectives import Pending as Pending
    from paceline.comm.collectives import all_gather as all_gather
    from paceline.comm.collectives import all_reduce as all_reduce
    from paceline.comm.collectives import announce_exit as announce_exit
    from paceline.comm.collectives import broadcast as broadcast
    from paceline.comm.collectives import exchange as exchange
    from paceline.comm.collectives import explain_failure as explain_failure
    from paceline.comm.collectives import gloo_subgroup as gloo_subgroup
    from paceline.comm.collectives import have_left as have_left
    from paceline.comm.collectives import post_last_words as post_last_words
    from paceline.comm.collectives import start_all_reduce as start_all_reduce
    from paceline.comm.collectives import start_broadcast as start_broadcast
    from paceline.comm.collectives import start_reduce as start_reduce
    from paceline.comm.collectives import tell_of_waiting as tell_of_waiting
    from paceline.comm.collectives import world_ranks as world_ranks
    from paceline.comm.membership import Membership as Membership
    from paceline.comm.world import World as World
    from paceline.comm.world import default_group as default_group
    from paceline.comm.world import init_process_group as init_process_group

__getattr__ = load_names(__name__, _HOME_BY_NAME)
