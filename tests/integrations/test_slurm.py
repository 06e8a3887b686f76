"""The scripts for SLURM, on a real slurmctld and slurmd, which listen on loopback."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.folders import read_state
from paceline.files.run_folder import RunFolder, find_info
from tests.docs_code import ROOT

MISSING = [name for name in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurm-wlm munge"
    ),
    pytest.mark.skipif(os.getuid() != 0, reason="slurmd starts jobs as root only"),
]

CONFIG = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes={host} PriorityTier=10 PreemptMode=OFF
"""

TRAIN = """
import os, sys, time, torch, paceline
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
paceline.seed_everything(0)
x = torch.randn(400, 10)
dataset = TensorDataset(x, (x.sum(dim=1) > 0).long())
net = torch.nn.Linear(10, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
size = {"global_batch": 20, "epochs": 25, "shards": 2}
run = paceline.Run(net, optimizer, dataset, seed=0, folder=sys.argv[1], **size)
for step in run:
    with step:
        for inputs, targets in step.batches():
            step.backward(cross_entropy(run.model(inputs), targets))
    time.sleep(0.2 if os.path.exists("slowly") else 0)
"""


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """A controller and one machine of four processors, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        host = socket.gethostname().partition(".")[0]
        config = CONFIG.format(host=host, ports=free_ports(2), folder=folder)
        (folder / "slurm.conf").write_text(config)
        self.environ = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PACELINE_PROGRESS": "quiet",
        }

    def start(self, stack: ExitStack) -> None:
        ours = [
            f"--{name}={self.folder}/munge.{ending}"
            for name, ending in (
                ("key-file", "key"), ("socket", "sock"), ("pid-file", "pid"), ("seed-file", "seed")
            )
        ]  # fmt: skip
        self._daemon(stack, "munged", "--foreground", "--force", *ours)
        self.wait(lambda: (self.folder / "munge.sock").exists())
        self._daemon(stack, "slurmctld", "-D", "-c")
        self._daemon(stack, "slurmd", "-D")
        self.wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T"))

    def _daemon(self, stack: ExitStack, *command: str) -> None:
        log = stack.enter_context((self.folder / f"{command[0]}.log").open("w"))
        process = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)

        def end() -> None:
            process.terminate()
            process.wait(30)

        stack.callback(end)

    def ask(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environ, cwd=self.folder, capture_output=True, text=True, timeout=90
        )
        return done.stdout + done.stderr

    def wait(self, is_so: Callable[[], object], seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                logs = [path.read_text()[-2000:] for path in self.folder.glob("*.[lo][ou][gt]")]
                pytest.fail("\n".join([self.ask("squeue"), *logs]))
            time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path_factory.mktemp("slurm"))
        cluster.start(stack)
        yield cluster


def test_srun_gives_every_task_its_place(cluster: Cluster) -> None:
    code = (
        "import torch, paceline\n"
        "with paceline.init_process_group() as world:\n"
        "    total = torch.ones(1); torch.distributed.all_reduce(total)\n"
        "    print('place', world.rank, world.size, world.local_rank, int(total))\n"
    )
    (cluster.folder / "place.py").write_text(code)
    said = cluster.ask("srun", "-n", "3", sys.executable, "place.py")
    places = re.findall(r"place (\d) (\d) (\d) (\d)", said)
    assert sorted(places) == [(str(rank), "3", str(rank), "3") for rank in range(3)], said


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("tasks.sbatch", ["--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-task=0"]),
        ("launcher.sbatch", ["--cpus-per-task=2", "--gpus-per-node=0"]),
    ],
)
def test_a_preempted_training_is_queued_again_and_ends_as_if_undisturbed(
    script: str, flags: list[str], cluster: Cluster
) -> None:
    name = script.partition(".")[0]
    (cluster.folder / "train.py").write_text(TRAIN)
    undisturbed = cluster.ask(sys.executable, "train.py", f"{name}-alone")
    assert find_info(RunFolder(cluster.folder / f"{name}-alone")) is not None, undisturbed
    (cluster.folder / "slowly").touch()
    cluster.environ["WORKERS"] = "2"
    path = ROOT / "examples" / "slurm" / script
    said = cluster.ask("sbatch", "--nodes=1", *flags, str(path), "train.py", name)
    job = said.split()[-1]
    folder = RunFolder(cluster.folder / name)

    def info(field: str) -> object:
        found = find_info(folder)
        return found and getattr(found, field)

    cluster.wait(lambda: info("step"))
    cluster.ask("sbatch", "-p", "high", "-n", "4", "--wrap", "true")
    cluster.wait(lambda: "PENDING" in cluster.ask("squeue", "-h", "-j", job, "-o", "%T"))
    assert info("status") == "stopped"
    assert "Restarts=1" in cluster.ask("scontrol", "show", "job", job)
    (cluster.folder / "slowly").unlink()

    # SLURM lets two minutes pass before a job starts again; it may still be clearing up. Started in
    # the second in which it was ended, its new credential counts as revoked, and the job is killed.
    # Asking again puts the start off again, so it is not done before SLURM has looked at its queue.
    asked_s = float("-inf")

    def is_finished() -> bool:
        nonlocal asked_s
        if time.monotonic() > asked_s + 70.0:
            asked_s = time.monotonic()
            cluster.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        return info("status") == "finished"

    cluster.wait(is_finished, 400)
    cluster.wait(lambda: cluster.ask("squeue", "-h").strip() == "")  # nothing stays behind
    first, second = (read_state(cluster.folder / each)["model"] for each in (name, f"{name}-alone"))
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-6)
