"""Output shapes with two devices: `Linear(10, 5)` on (16, 10) gives (16, 5), in order.

    python examples/output_shape.py

The rows are split, each device computes its part, and the outputs are joined on the first one.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline import DataParallel, record_step

DEVICES = ["cpu:0", "cpu:1"]  # or [0, 1] for two GPUs


def main() -> None:
    torch.manual_seed(0)
    net, batch = nn.Linear(10, 5), torch.randn(16, 10)
    model = DataParallel(net, device_ids=DEVICES)
    with record_step(model) as recording:
        output = model(batch)
    assert recording.trace is not None
    for stage in recording.trace.stages:
        if stage.name in ("batch", "split", "forward", "gather"):
            shapes = [tuple(part.tensors[0].shape) for part in stage.parts]
            print(f"{stage.name:<8} {' + '.join(map(str, shapes))}")
    print(f"as one device computes it: {torch.allclose(output, net(batch))}")


if __name__ == "__main__":
    main()
