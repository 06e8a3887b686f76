"""`paceline run --as-torch` and `paceline.enable()`: torch scripts on our classes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from paceline.launcher.as_torch import OURS_BY_TORCHS

SCRIPT = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    import model  # a module of the user's own

    def main():
        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        net = DDP(model.build())
        assert isinstance(net, torch.nn.parallel.DistributedDataParallel)
        assert model.is_wrapped(net)
        data = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
        sampler = DistributedSampler(data, shuffle=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, batch_size=2, sampler=sampler):
                optimizer.zero_grad()
                F.mse_loss(net(x), y).backward()
                optimizer.step()
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        low, high = weights.clone(), weights.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        print("in sync" if torch.equal(low, high) else "out of sync",
              type(net).__module__.split(".")[0], type(sampler).__module__.split(".")[0])
        dist.destroy_process_group()

    if __name__ == "__main__":
        main()
"""

MODEL = """
    import torch
    from torch.nn.parallel.distributed import DistributedDataParallel

    def build():
        return torch.nn.Linear(3, 1)

    def is_wrapped(net):
        return isinstance(net, DistributedDataParallel)
"""


def run(
    folder: Path, *arguments: str, script: str, workers: int = 1
) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(textwrap.dedent(script))
    flags = ("--workers", str(workers), "--as-torch")
    return subprocess.run(
        [sys.executable, "-m", "paceline", "run", *flags, "script.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_an_unmodified_script_trains_in_step_on_our_classes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    done = run(tmp_path, script=SCRIPT, workers=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[worker {rank}] in sync paceline paceline" for rank in range(2)
    ]


SPAWNS = """
    import os, sys
    from importlib import import_module
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def train(rank, size, port):
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = port
        dist.init_process_group("gloo", rank=rank, world_size=size)
        net = DDP(torch.nn.Linear(2, 1))
        net(torch.ones(1, 2)).sum().backward()
        package = type(net).__module__.split(".")[0]
        os.write(1, f"{rank} of {dist.get_world_size()} {package}\\n".encode())
        dist.destroy_process_group()

    def check_names():
        for line in sys.argv[1:]:
            module, name = line.split(":")
            ours, theirs = getattr(import_module(module), name), vars(import_module(module))[name]
            assert ours.__module__.startswith("paceline."), line
            assert theirs.__module__.startswith("torch."), line
        import torch._dynamo.convert_frame as frames
        assert frames.DistributedDataParallel is vars(torch.nn.parallel)["DistributedDataParallel"]
        torch.nn.parallel.DistributedDataParallel = "patched"
        assert torch.nn.parallel.DistributedDataParallel == "patched"

    if __name__ == "__main__":
        import socket
        with socket.create_server(("localhost", 0)) as free:
            port = str(free.getsockname()[1])
        torch.multiprocessing.spawn(train, args=(1, port), nprocs=1)
        check_names()
        print("checked")
"""


def test_a_world_that_the_script_spawns_gets_our_classes_and_torchs_own_code_keeps_torchs(
    tmp_path: Path,
) -> None:
    done = run(tmp_path, *(f"{module}:{name}" for module, name in OURS_BY_TORCHS), script=SPAWNS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 1 paceline", "checked"]


NAMES = """
    import pickle
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    def names(wrapper):
        yield from wrapper.state_dict()
        yield from dict(wrapper.named_parameters())
        yield from dict(wrapper.named_buffers())
        yield from dict(wrapper.named_modules())
        yield from get_model_state_dict(wrapper)
        yield from torch.nn.ModuleDict({"inner": wrapper}).state_dict()
        wrapper.load_state_dict(wrapper.state_dict())
        set_model_state_dict(wrapper, get_model_state_dict(wrapper))
        yield type(wrapper).__name__

    dist.init_process_group("gloo")
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for name in "DistributedDataParallel", "DataParallel":
        theirs, ours = vars(torch.nn.parallel)[name](net), globals()[name](net)
        assert type(theirs) is not type(ours) is type(pickle.loads(pickle.dumps(ours)))
        assert list(names(ours)) == list(names(theirs)), (list(names(ours)), list(names(theirs)))
    print("the same")
    dist.destroy_process_group()
"""


def test_an_unmodified_script_finds_the_names_that_torchs_wrappers_give(tmp_path: Path) -> None:
    done = run(tmp_path, script=NAMES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the same"]


EARLY = """
    import sys
    import paceline
    paceline.enable()
    assert "torch" not in sys.modules
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DistributedSampler
    paceline.enable()
    assert DDP is paceline.DistributedDataParallel, DDP
    assert issubclass(DistributedSampler, paceline.DistributedSampler)
    print("early")
"""

LATE = """
    import gc, sys
    import torch
    import torch.distributed
    import paceline
    from paceline.errors import UsageError

    for name in ("imported", "derived"):
        __import__(name)
        try:
            paceline.enable()
        except UsageError as error:
            print(error)
        del sys.modules[name]
        gc.collect()
    paceline.enable()
    from torch.nn.parallel import DistributedDataParallel as DDP
    print(DDP is paceline.DistributedDataParallel)
"""

LIBRARIES = {
    "imported": "from torch.nn.parallel import DistributedDataParallel as DDP",
    "derived": """
        import torch

        def make():
            class Wrapper(torch.nn.parallel.DistributedDataParallel):
                pass
            return Wrapper

        made = [make()]
    """,
}


def python(folder: Path, script: str) -> str:
    (folder / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_enable_before_torch_is_imported_imports_nothing_and_works_once(tmp_path: Path) -> None:
    assert python(tmp_path, EARLY) == "early\n"


def test_enable_is_refused_by_name_once_a_library_has_torchs_class_and_not_for_torch_alone(
    tmp_path: Path,
) -> None:
    for name, text in LIBRARIES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    *refused, is_ours = python(tmp_path, LATE).splitlines()
    for name, what, advice in zip(LIBRARIES, refused[::2], refused[1::2], strict=True):
        assert what.endswith(f"too late: {name} has torch's DistributedDataParallel already.")
        assert advice.startswith(f"Call it first, before the script imports {name}")
    assert is_ours == "True"
