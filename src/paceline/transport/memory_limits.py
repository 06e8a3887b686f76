"""How much memory is left here: what the kernel says, and what a container allows."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> list[int]:
    """Every limit that can be read; none where nothing can."""
    found = []
    for line in _read(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    limit, used = _read(_CGROUP / "memory.max").strip(), _read(_CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        found.append(max(0, int(limit) - int(used) + _cached_bytes()))
    return found


def _cached_bytes() -> int:
    """File contents that count as used in a container, but are given up when memory is needed."""
    for line in _read(_CGROUP / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
