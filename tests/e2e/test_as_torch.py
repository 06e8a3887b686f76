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
        f"[rank {rank}] in sync paceline paceline" for rank in range(2)
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
    import warnings
    import library
    import paceline
    import torch.distributed as dist
    from torch import nn, ones
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Own(DDP):
        def forward(self, x):
            return super().forward(x) + 1

    def main():
        from torch.nn import DataParallel
        keep = library.wrap(nn.Linear(2, 1))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            paceline.enable()
        [warning] = said
        print(str(warning.message), warning.filename == __file__)
        own = Own(nn.Linear(2, 1))
        own(ones(1, 2)).sum().backward()
        kinds = [DDP, type(library.wrap(nn.Linear(2, 1))), Own.__base__, library.Wrapper.__base__]
        print([kind.__module__.partition(".")[0] for kind in kinds], own.module.weight.grad.sum())

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
"""

LIBRARY = """
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    class Wrapper(DistributedSampler):
        pass

    def wrap(model):
        return DistributedDataParallel(model)
"""


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


def test_enable_reaches_classes_held_by_name_and_derived_ones_and_names_the_rest(
    tmp_path: Path,
) -> None:
    (tmp_path / "library.py").write_text(textwrap.dedent(LIBRARY))
    warning, kinds = python(tmp_path, LATE).splitlines()
    assert warning.startswith(
        "paceline.enable() was called too late for 1 model wrapped in torch's "
        "DistributedDataParallel; the name DataParallel inside main(). What is named"
    )
    assert warning.endswith("True")
    assert kinds == "['paceline', 'paceline', 'paceline', 'paceline'] tensor(2.)"
