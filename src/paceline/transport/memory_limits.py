"""How much memory is left here: what the kernel says, and what is allowed by control groups."""

from __future__ import annotations

from pathlib import Path

# Of each version of control groups: the limit, what is used, and how much of that is files in the
# cache, which are given up when memory is needed.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> list[int]:
    """What every limit that can be read leaves; none where nothing can be read."""
    kilobytes = _field(root / "proc/meminfo", "MemAvailable:")
    found = [] if kilobytes is None else [kilobytes * 1024]
    groups = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += _left_on_the_way(groups, path, *_VERSION_2)
        elif "memory" in controllers.split(","):
            found += _left_on_the_way(groups / "memory", path, *_VERSION_1)
    return found


def _left_on_the_way(top: Path, path: str, limit: str, used: str, cached: str) -> list[int]:
    """What a control group leaves, and each around it: all their limits hold."""
    found = []
    own = top / path.lstrip("/")
    for group in (own, *own.parents):
        allowed, taken = _read(group / limit).strip(), _read(group / used).strip()
        if allowed.isdigit() and taken.isdigit():
            spare = _field(group / "memory.stat", cached) or 0
            found.append(max(0, int(allowed) - int(taken) + spare))
        if group == top:
            break
    return found


def _field(path: Path, name: str) -> int | None:
    """The number behind a name, in a file with a line for each."""
    for line in _read(path).splitlines():
        key, *values = line.split()
        if key == name:
            return int(values[0])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
