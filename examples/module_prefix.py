"""Loading a file that was saved from a wrapped model into the bare model.

    python examples/module_prefix.py

Names in the file begin with `module.`, so torch finds no match. `paceline.load_weights` ignores the
prefixes of wrappers, and Paceline's own wrappers write none.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import paceline


def main() -> None:
    trained, fresh = nn.Linear(10, 5), nn.Linear(10, 5)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        torch.save(nn.DataParallel(trained).state_dict(), path)
        try:
            fresh.load_state_dict(torch.load(path, weights_only=True))
        except RuntimeError as error:
            print(error)
        report = paceline.load_weights(fresh, path)
    print(report)
    print(f"the weights that were saved: {torch.equal(fresh.weight, trained.weight)}")
    ours = paceline.DataParallel(trained, device_ids=["cpu:0", "cpu:1"])
    print(f"saved under ours: {', '.join(ours.state_dict())}")


if __name__ == "__main__":
    main()
