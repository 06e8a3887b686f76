"""The code in the pages, as data: what runs, under which names, and what says that it does not.

A comment in front of a block is for the tests and not seen by readers of the site:

    <!-- given: path = "weights.pt" -->     run before the block
    <!-- needs: tensorboard, wandb -->      left out where one of these modules is not installed
    <!-- not run: takes two GPUs -->        left out, for this reason
"""

from __future__ import annotations

import importlib.util
import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"((?:^<!-- (?:[^-]|-(?!->))*-->\n)*)^```(\w*)\n(.*?)^```", re.M | re.S)
_NOTE = re.compile(r"<!-- (given|not run|needs):\s+(.*?)\s*-->", re.S)


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code: its language, its text, and the notes in front of it."""

    language: str
    code: str
    given: str
    not_run: str

    @property
    def script(self) -> str:
        """The name of the script that this is, if its first line ends with one."""
        match = re.search(r"# (\w+\.py)$", self.code.partition("\n")[0])
        return match[1] if match else ""

    @property
    def sides(self) -> tuple[str, str]:
        """The two programs of a diff."""
        lines = self.code.splitlines(keepends=True)
        old, new = ("".join(e[1:] for e in lines if e[:1] in (sign, " ")) for sign in "-+")
        return old, new


def blocks(page: Path) -> list[Block]:
    found = []
    for notes, language, code in _BLOCK.findall(page.read_text()):
        said = dict(_NOTE.findall(notes))
        needed = said.get("needs", "").split(", ") if "needs" in said else []
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        reason = f"not installed: {', '.join(missing)}" if missing else said.get("not run", "")
        found.append(Block(language, code, said.get("given", ""), reason))
    return found


def run_script(path: str | Path) -> None:
    """On a worker: the script at `path`, which leaves the end of its group to the process.

    torch 2.13 frees the reducer of a DDP with the GIL held. Where that ends the group, it joins
    Gloo's threads, and one of them that still has a tensor to free waits for the GIL for ever.
    """
    dist.destroy_process_group = lambda *_: None
    runpy.run_path(str(path), run_name="__main__")
