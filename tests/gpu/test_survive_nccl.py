"""Groups of NCCL's are left and made anew, as far as a single GPU can show it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import threading
from datetime import timedelta
import torch, torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from paceline import group as comm, env
from paceline.group.sockets import Connections
from paceline.errors import PeerError
from paceline.run.member import Groups, can_form_anew
from paceline.group.link import Generation

backend = "cpu:gloo,cuda:nccl"
assert can_form_anew(backend)
env.leave_nccl_to_us()
groups = Groups(HashStore(), Connections(), backend, timedelta(minutes=5))
comm.refuse_aborted(groups.broken.is_set)
for number in range(4):
    alone = Generation(number, 0, 1)
    group = groups.make(alone, groups.meet(alone, bool))
    total = torch.ones(2**20, device="cuda")
    comm.start_all_reduce(group, total, "A sum").wait()
    assert float(total.sum()) == 2**20
    if number % 2:  # otherwise it is left in peace
        thread = threading.Thread(target=groups.interrupt)
        thread.start()
        thread.join()
        try:
            comm.start_all_reduce(group, total, "A sum").wait()
        except PeerError:
            pass
        else:
            raise AssertionError("a sum in a group that was aborted")
    groups.leave()
    assert not dist.is_initialized()
print("made anew")
"""


def test_a_group_of_nccl_is_aborted_and_made_anew_in_one_process(tmp_path: Path) -> None:
    script = tmp_path / "groups.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "made anew\n", done.stderr
