"""A checkpoint saved from the wrapped model loads into the bare model, and vice versa.

    paceline run --workers 2 examples/checkpoint_clean_keys.py

Names have no `module.` prefix. Files with the prefix, from torch's wrappers, load as well.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline import DistributedDataParallel


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def main() -> None:
    with paceline.init_process_group() as world:
        model = DistributedDataParallel(build())
        if world.is_main:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.pt")
                torch.save(model.state_dict(), path)
                saved = torch.load(path, weights_only=True)
                print("saved under the wrapper:", ", ".join(saved))
                build().load_state_dict(saved)
                print("loaded into the bare model")

                torch.save(nn.DataParallel(build()).state_dict(), path)
                report = paceline.load_weights(build(), path)
                print("loaded from a file of torch's:", *report.renamed)


if __name__ == "__main__":
    main()
