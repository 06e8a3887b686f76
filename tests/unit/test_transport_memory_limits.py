"""How much memory is left: by the kernel, and by control groups of both versions, nested too."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.transport.segment import available_bytes


def write(root: Path, text_by_path: dict[str, str | int]) -> Path:
    for path, text in text_by_path.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(f"{text}\n")
    return root


def version_2(folder: str, limit: str | int, used: int, cached: int = 0) -> dict[str, str | int]:
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cached}",
    }


def version_1(folder: str, limit: int, used: int, cached: int = 0) -> dict[str, str | int]:
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cached}",
    }


def test_this_machine_has_memory() -> None:
    assert all(limit >= 0 for limit in available_bytes())


def test_what_the_kernel_calls_available_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   7 kB\nCached: 1 kB"})
    assert available_bytes(tmp_path) == [7 * 1024]


def test_files_in_a_containers_cache_count_as_free(tmp_path: Path) -> None:
    limits = version_2("sys/fs/cgroup", 1000, 900, cached=300)
    assert available_bytes(write(tmp_path, {"proc/self/cgroup": "0::/", **limits})) == [400]


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_systems_limit_around_this_process_counts(tmp_path: Path, version: int) -> None:
    files: dict[str, str | int] = (
        {
            "proc/self/cgroup": "0::/slurm/job_7/step_0",
            **version_2("sys/fs/cgroup/slurm/job_7", 1000, 100),
            **version_2("sys/fs/cgroup/slurm/job_7/step_0", "max", 100),
        }
        if version == 2
        else {
            "proc/self/cgroup": "2:cpu,cpuacct:/slurm\n4:memory:/slurm/job_7/step_0\n0::/",
            **version_1("sys/fs/cgroup/memory/slurm/job_7", 1000, 150, cached=50),
        }
    )
    assert available_bytes(write(tmp_path, files)) == [900]


def test_a_container_that_shows_its_path_outside_has_its_limit_at_the_root(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/0123",
        **version_1("sys/fs/cgroup/memory", 1000, 300),
    }
    assert available_bytes(write(tmp_path, files)) == [700]


def test_more_used_than_allowed_is_nothing_left(tmp_path: Path) -> None:
    limits = version_2("sys/fs/cgroup", 1000, 1100)
    assert available_bytes(write(tmp_path, {"proc/self/cgroup": "0::/", **limits})) == [0]


def test_where_nothing_can_be_read_no_limit_is_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == []
