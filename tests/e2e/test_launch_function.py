"""`paceline.launch`: functions and closures on several workers, from this very process."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.errors import UsageError, WorkerError
from paceline.launcher import stalls

if sys.platform != "linux":
    pytest.skip("needs fork", allow_module_level=True)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_train_together_and_results_come_back_by_rank(workers: int) -> None:
    def body(scale: float) -> dict[str, object]:
        with paceline.init_process_group() as world:
            total = torch.full((2,), scale * (world.rank + 1))
            dist.all_reduce(total)
            return {"rank": world.rank, "total": total, "source": world.source}

    results = paceline.launch(body, 2.0, workers=workers)
    expected = torch.full((2,), float(workers * (workers + 1)))
    assert [result["rank"] for result in results] == list(range(workers))
    assert all(result["source"] == "paceline run" for result in results)
    for result in results:
        torch.testing.assert_close(result["total"], expected)


def test_a_worker_can_join_its_world_again_after_leaving_it() -> None:
    def body() -> list[float]:
        totals = []
        for turn in range(3):
            with paceline.init_process_group():
                total = torch.full((), float(turn))
                dist.all_reduce(total)
                totals.append(total.item())
        return totals

    assert paceline.launch(body, workers=2) == [[0.0, 2.0, 4.0]] * 2


def test_functions_need_not_be_importable_and_large_results_fit() -> None:
    captured = torch.arange(300_000)
    results = paceline.launch(lambda: captured + int(os.environ["RANK"]), workers=2)
    assert torch.equal(results[1], captured + 1)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_threads_of_the_parent_do_not_hang_the_workers() -> None:
    large = torch.randn(2000, 2000)
    torch.relu(large).sum()  # starts OpenMP's pool here, which forks inherit broken

    def body() -> tuple[int, bool]:
        torch.relu(large).sum()
        return torch.get_num_threads(), threading.current_thread() is threading.main_thread()

    assert paceline.launch(body, workers=2, threads=2) == [(2, True), (2, True)]


# Counting devices leaves CUDA alone; a backward pass where there is one does not.
@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="autograd starts CUDA, so forks cannot")
def test_gradients_work_in_a_fork_of_a_process_that_computed_some() -> None:
    layer = torch.nn.Linear(3, 1)
    layer(torch.ones(2, 3)).sum().backward()

    def body() -> float:
        layer.zero_grad()
        layer(torch.ones(2, 3)).sum().backward()
        assert layer.bias.grad is not None
        return layer.bias.grad.item()

    assert paceline.launch(body, workers=2) == [2.0, 2.0]


def test_output_is_labelled_on_the_streams_of_the_caller(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def body() -> None:
        print("out")
        print("err", file=sys.stderr)
        os.write(1, b"raw\n")

    paceline.launch(body, workers=2)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [
        "[worker 0] out",
        "[worker 0] raw",
        "[worker 1] out",
        "[worker 1] raw",
    ]
    assert sorted(shown.err.splitlines()) == ["[worker 0] err", "[worker 1] err"]


def test_a_single_worker_is_not_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    paceline.launch(lambda: print("out"), workers=1)
    assert capsys.readouterr().out == "out\n"


def test_the_first_real_error_comes_back_with_its_rank_and_traceback() -> None:
    def fail() -> None:
        raise ValueError("boom")

    def body() -> None:
        with paceline.init_process_group() as world:
            if world.rank == 1:
                fail()
            dist.barrier()  # the others fail here, because rank 1 is gone

    with pytest.raises(WorkerError, match="worker 1 failed: ValueError: boom") as caught:
        paceline.launch(body, workers=3)
    assert caught.value.rank == 1
    assert "in fail" in caught.value.traceback
    assert "launcher" not in caught.value.traceback
    assert "in fail" in str(caught.value)


def test_a_killed_worker_ends_all() -> None:
    def body() -> None:
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3600)

    with pytest.raises(WorkerError, match=r"worker 0 was killed by signal 9 \(SIGKILL\)") as caught:
        paceline.launch(body, workers=2)
    assert "`paceline run`" in caught.value.advice


def test_a_reader_that_goes_is_a_broken_pipe(tmp_path: Path) -> None:
    script = """
        import paceline
        def body():
            while True:
                print("x" * 1000, flush=True)
        try:
            paceline.launch(body, workers=2)
        except BrokenPipeError:
            raise SystemExit(9)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        caller.stdout.readline()
        caller.stdout.close()
        assert caller.wait(timeout=60) == 9
        caller.stdout = None


def sleep_alone(seconds: int) -> None:
    """Sleep so that no other thread can speak, and no signal wakes this one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(seconds)


@pytest.mark.parametrize(
    ("stand_still", "words", "least_silence_s"),
    [
        # A busy machine may keep it from stopping itself for longer than a test likes to wait.
        (lambda: os.kill(os.getpid(), signal.SIGSTOP), "stopped by a signal", 600.0),
        (lambda: sleep_alone(60), "silent", 2.0),
    ],
)
def test_a_rank_0_that_stands_still_hangs_nobody_and_is_named(
    monkeypatch: pytest.MonkeyPatch,
    stand_still: Callable[[], object],
    words: str,
    least_silence_s: float,
) -> None:
    monkeypatch.setenv("PACELINE_STALL_S", "3")
    monkeypatch.setattr(stalls, "LEAST_SILENCE_S", least_silence_s)

    def body() -> None:
        with paceline.init_process_group() as world:
            if world.rank == 0:
                stand_still()
            paceline.DistributedDataParallel(torch.nn.Linear(2, 2))

    with pytest.raises(WorkerError, match=f"worker 0 was {words} for"):
        paceline.launch(body, workers=2)


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("crash", "words", "where"),
    [
        (boom, "failed in step 3: ValueError: boom", "In step 3 of the run."),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by signal 9", "in step 3"),
    ],
)
def test_a_crashed_step_is_named_and_its_survivors_do_not_say_that_they_save(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    crash: Callable[[], object],
    words: str,
    where: str,
) -> None:
    def body() -> None:
        world = paceline.init_process_group()
        net = torch.nn.Linear(2, 1)
        data = torch.utils.data.TensorDataset(torch.ones(64, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        run = paceline.Run(net, optimizer, data, global_batch=4, epochs=1, folder=tmp_path / "run")
        for step in run:
            with step:
                for (x,) in step.batches():
                    step.backward(run.model(x).square().mean())
                if step.number == 3:
                    if world.rank == 1:
                        crash()
                    time.sleep(60)

    with pytest.raises(WorkerError, match=f"worker 1 {words}") as caught:
        paceline.launch(body, workers=2)
    assert where in str(caught.value)
    shown = capsys.readouterr()
    assert "finishing the step" not in shown.out + shown.err


def test_leaving_with_zero_is_no_failure_and_with_another_code_is_one() -> None:
    assert paceline.launch(lambda: sys.exit(0), workers=2) == [None, None]
    with pytest.raises(WorkerError, match="exit code 3"):
        paceline.launch(lambda: sys.exit(3), workers=2)


def test_a_result_that_cannot_be_sent_back_is_none_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"rank 1: .*Linear.*\n.*state_dict"):
        results = paceline.launch(
            lambda: torch.nn.Linear(1, 1) if os.environ["RANK"] == "1" else 7, workers=2
        )
    assert results == [7, None]


def test_the_environment_of_the_caller_stays_as_it_was() -> None:
    before = dict(os.environ)
    seen = paceline.launch(lambda: (os.environ["RANK"], os.environ["OMP_NUM_THREADS"]), workers=2)
    assert [rank for rank, _ in seen] == ["0", "1"]
    assert dict(os.environ) == before


def test_data_loaders_with_processes_work_inside() -> None:
    def body() -> int:
        data = torch.utils.data.TensorDataset(torch.arange(6))
        loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1)
        return sum(int(batch.sum()) for (batch,) in loader)

    assert paceline.launch(body, workers=2) == [15, 15]


def test_an_interrupt_ends_everybody(tmp_path: Path) -> None:
    def body() -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(120)

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        paceline.launch(body, workers=2)
    helper.join()
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_killing_the_caller_leaves_nobody_behind(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, subprocess, time, paceline\n"
        "def body():\n"
        "    child = subprocess.Popen(['sleep', '120'])\n"
        "    pathlib.Path(str(child.pid)).touch()\n"
        "    pathlib.Path(str(os.getpid())).touch()\n"
        "    time.sleep(120)\n"
        "paceline.launch(body, workers=2)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    caller.kill()
    caller.wait()
    pids = [path.name for path in tmp_path.iterdir()]
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("workers", [0, -1, 1.5, True, "2", 4097, 10**20])
def test_an_impossible_number_of_workers_is_refused(workers: object) -> None:
    with pytest.raises(UsageError, match=rf"workers.* {re.escape(repr(workers))}"):
        paceline.launch(print, workers=workers)  # type: ignore[arg-type]


def test_something_that_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be called"):
        paceline.launch(3, workers=2)  # type: ignore[arg-type]


def test_a_process_that_belongs_to_a_group_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="already belongs to a process group"):
            paceline.launch(print, workers=2)
    finally:
        dist.destroy_process_group()


def test_the_results_of_a_run_show_its_report_in_a_notebook(tmp_path: Path) -> None:
    def train() -> str | None:
        net = torch.nn.Linear(2, 1)
        run = paceline.Run(
            net,
            torch.optim.SGD(net.parameters(), lr=0.1),
            torch.utils.data.TensorDataset(torch.ones(8, 2)),
            global_batch=4,
            epochs=1,
            folder=tmp_path / "shown",
        )
        for step in run:
            with step:
                for (x,) in step.batches():
                    step.backward(net(x).mean())
        return run._repr_html_()

    results = paceline.launch(train, workers=2)
    for html in (results[0], results._repr_html_()):
        assert html is not None
        assert html.startswith("<iframe")
        assert "2 workers" in html
    assert paceline.launch(lambda: 1, workers=2)._repr_html_() is None
    assert paceline.RunView(tmp_path)._repr_html_() is None
