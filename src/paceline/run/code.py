"""What the user's code said when the run began: a replacement must run the same.

Somebody who edits the script while it trains does not expect that a worker that dies comes back
with the new text, and trains something else than the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from zlib import crc32

from paceline.errors import DesyncError


def read_code() -> dict[str, int]:
    """Checksums of the script and of the modules in its folder that are imported, by name."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return {}
    folder, found = os.path.dirname(os.path.realpath(script)), {}
    for module in list(sys.modules.values()):
        path = os.path.realpath(getattr(module, "__file__", None) or "")
        name = os.path.relpath(path, folder)
        is_users = path.endswith(".py") and not name.startswith(os.pardir)
        if is_users and "site-packages" not in name:
            with suppress(OSError), open(path, "rb") as file:
                found[name] = crc32(file.read())
    return found


def refuse_other_code(code: Mapping[str, int]) -> None:
    """As a replacement: raise where a file says something else than when the others read it."""
    ours = read_code()
    changed = sorted(name for name in code.keys() & ours.keys() if code[name] != ours[name])
    if changed:
        raise DesyncError(
            f"{changed[0]} has changed since the run began.",
            "A worker that joins would run the new text, while the others run the old one.",
            "Undo the change; or stop the run and start it again, which continues from its "
            "checkpoint.",
        )
