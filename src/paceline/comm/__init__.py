"""Who takes part, and talking: the world of ranks, its collectives, and values as bytes.

Names are loaded when first used: the launcher needs sockets and the codec, and no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.lazy import load_names

__all__ = [
    *("Group", "Membership", "Pending", "World", "all_gather", "all_reduce", "announce_exit"),
    *("broadcast", "default_group", "exchange", "explain_failure", "gloo_subgroup", "have_ended"),
    *("have_left",),
    *("init_process_group", "post_last_words", "refuse_aborted", "start_all_reduce"),
    *("start_broadcast", "start_reduce", "tell_of_waiting"),
    *("waiting", "word_device", "world_ranks"),
]
_HOME_BY_NAME = {
    **dict.fromkeys(__all__, "paceline.comm.collectives"),
    "Membership": "paceline.comm.membership",
    **dict.fromkeys(["World", "default_group", "init_process_group"], "paceline.comm.world"),
}

if TYPE_CHECKING:
    from paceline.comm.collectives import *  # noqa: F403
    from paceline.comm.membership import Membership as Membership
    from paceline.comm.world import World as World
    from paceline.comm.world import default_group as default_group
    from paceline.comm.world import init_process_group as init_process_group

__getattr__ = load_names(__name__, _HOME_BY_NAME)
