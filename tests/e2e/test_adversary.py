"""Another user of the machine does to a run what it can, and the run does not notice."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import synthetic_run

SCRIPT = """
import os, pathlib, signal
import torch, paceline
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
net = nn.Linear(6, 3).double()
x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
run = paceline.Run(net, torch.optim.AdamW(net.parameters()), TensorDataset(x, x.sum(1).long() % 3),
                   global_batch=12, epochs=10_000, shards=4)
here, rank = pathlib.Path(), os.environ["RANK"]
for step in run:
    with step:
        for inputs, targets in step.batches():
            if rank == "1" and step.number == 20 and not (here / "killed").exists():
                (here / "killed").touch()
                (here / "port").write_text(os.environ["MASTER_PORT"])
                (here / "store").write_text(os.environ["PACELINE_STORE"])
                (here / "launcher").write_text(str(os.getppid()))
                while not (here / "attacked").exists():
                    pass
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(nn.functional.cross_entropy(run.model(inputs), targets))
    if (here / "over").exists():
        run.stop()
"""

ATTACK = """
import encodings.idna, os, select, socket, struct, sys, time  # before it may not read them any more
user, port, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.setgroups([]); os.setgid(user); os.setuid(user)
text = lambda data: struct.pack("<q", len(data)) + data
hello = bytes([0]) + struct.pack("<I", 0x3C85F7CE)
generation = b"/paceline/generation/x"
requests = [
    2 * (bytes([4]) + text(b"n") + struct.pack("<q", 2**62)),       # a sum beyond 64 bits
    b"".join(bytes([1]) + text(key) + text(b"x") for key in (generation, generation[1:])),
    bytes([1]) + text(b"large") + text(bytes(2**21)),
    bytes([1]) + text(os.urandom(8)) + text(bytes(2**21)),
    bytes([14]) + text(b"queue") + text(bytes(2**21)),
    bytes([11]) + struct.pack("<q", 4000) + 100 * (text(b"k") + text(b"v")),   # unfinished
    bytes([6]) + struct.pack("<q", 4000) + 4000 * text(bytes(500)),
    20 * (bytes([3]) + text(b"large")),                             # answers that nobody reads
    bytes([17]), bytes([100]) + bytes(64), bytes(range(256)), b"GET / HTTP/1.1" + bytes(2**16),
]
held = []
deadline_s = time.monotonic() + float(sys.argv[4])
while time.monotonic() < deadline_s:
    for number in range(60):
        caller = socket.socket()
        caller.setblocking(False)
        try:
            caller.connect_ex(("127.0.0.1", port))
            select.select([], [caller], [], 0.01)
            if number % 13:
                caller.send(hello + requests[number % len(requests)])
        except OSError:
            pass
        held.append(caller)
    if len(held) > 800:
        for caller in held[:400]:
            caller.close()
        del held[:400]
    try:
        socket.socket(socket.AF_UNIX).connect(path)
    except PermissionError:
        continue
    raise SystemExit("the private socket can be reached")
"""


def memory_of(pid: int) -> int:
    """Resident bytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for(path: Path) -> str:
    deadline_s = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline_s, path
        time.sleep(0.01)
    return path.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_run_survives_a_death_while_another_user_attacks_its_port(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "paceline", "run", "--workers", "2", "train.py"]
    with subprocess.Popen(launch, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            port, store = wait_for(tmp_path / "port"), wait_for(tmp_path / "store")
            before = memory_of(launcher.pid)
            attack = [sys.executable, "-c", ATTACK, "54321", port, store, "3"]
            with subprocess.Popen(attack) as attacker:
                (tmp_path / "attacked").touch()
                assert attacker.wait(60) == 0
            assert memory_of(launcher.pid) - before < 20 * 2**20
            (tmp_path / "over").touch()
            _, said = launcher.communicate(timeout=60)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, said
    assert said.count("was killed by signal 9 (SIGKILL) in step 20") == 1
    assert "no step was lost" in said


HOLD = """
import encodings.idna, os, socket, sys  # before it may not read them any more
user, port = int(sys.argv[1]), int(sys.argv[2])
if user: os.setgroups([]); os.setgid(user); os.setuid(user)
held = [socket.create_connection(("127.0.0.1", port)) for _ in range(700)]
for number, each in enumerate(held):
    try:
        each.send([b"", b"GET / HTTP/1.1\\r\\nX: ", b"GET / HTTP/1.1\\r\\n\\r\\n"][number % 3])
    except OSError:
        pass
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("user", [0, 54321])
def test_who_holds_connections_open_keeps_nobody_from_the_page(user: int, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs uvicorn: pip install 'paceline[watch]'")
    if user and os.geteuid() != 0:
        pytest.skip("only root can become another user")
    synthetic_run(tmp_path / "run", steps=30, ranks=2, epochs=2)
    watch = [sys.executable, "-m", "paceline", "watch", "--no-open", "run"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(watch, cwd=tmp_path, **pipes) as page:
        try:
            line = page.stdout.readline()
            port, token = re.findall(r":(\d+)/\?token=(\S+)", line)[0]
            url = f"http://127.0.0.1:{port}/{{}}?token={token}"
            stream = urllib.request.urlopen(url.format("events"), timeout=60)
            assert stream.readline() == b"event: document\n"
            attack = [sys.executable, "-c", HOLD, str(user), port]
            with subprocess.Popen(attack, stdin=subprocess.PIPE, **pipes) as attacker:
                assert attacker.stdout.readline() == "held\n"
                for _ in range(10):
                    with urllib.request.urlopen(url.format("document"), timeout=60) as answer:
                        assert json.load(answer)["live"]["step"] == 30
                assert len(os.listdir(f"/proc/{page.pid}/fd")) < 400
                attacker.stdin.close()
            stream.readline()
            while stream.readline().startswith(b":"):  # it is not closed
                pass
            stream.close()
        finally:
            page.terminate()
