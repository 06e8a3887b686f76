"""SyncBatchNorm on a GPU that two ranks share, against plain BatchNorm on the whole batch.

The ranks are processes: autograd has one thread per GPU and process, so that of two thread ranks
one would wait in backward for the other, which cannot begin.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.ddp.sync_batch_norm import SyncBatchNorm
from paceline.group.world import World
from paceline.testing import run_processes

SPLITS = [[8, 8], [13, 3], [16, 0]]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.01}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def train(norm: nn.Module, batch: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    batch = batch.clone(memory_format=torch.preserve_format).requires_grad_()
    output = norm(batch)
    (output * targets).sum().backward()
    assert batch.grad is not None
    return output.detach(), batch.grad


def batch_and_targets(dtype: torch.dtype, layout: torch.memory_format) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(16, 6, 5, 4, generator=generator) for _ in range(2))
    return [tensor.to("cuda", dtype, memory_format=layout) for tensor in drawn]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def body(world: World) -> list[list[Tensor]]:
    """Output, gradients and statistics of this rank, for every combination."""
    results = []
    for split in SPLITS:
        for dtype in TOLERANCE:
            for layout in LAYOUTS:
                batch, targets = batch_and_targets(dtype, layout)
                norm = SyncBatchNorm(6, device="cuda", dtype=wide(dtype))
                own = batch.split(split)[world.rank], targets.split(split)[world.rank]
                output, grad = train(norm, *own)
                assert output.dtype == grad.dtype == dtype
                assert len(output) == 0 or output.is_contiguous(memory_format=layout)
                assert norm.weight.grad is not None
                states = norm.running_mean, norm.running_var
                results.append(
                    [t.cpu() for t in (output, grad, norm.weight.grad, *states) if t is not None]
                )
    return results


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_everything_equals_plain_batch_norm_on_the_whole_batch(backend: str) -> None:
    ranks = run_processes(2, body, backend=backend)
    combinations = [(d, layout) for _ in SPLITS for d in TOLERANCE for layout in LAYOUTS]
    for (dtype, layout), first, second in zip(combinations, *ranks, strict=True):
        batch, targets = batch_and_targets(dtype, layout)
        whole = nn.BatchNorm2d(6, device="cuda", dtype=wide(dtype))
        output, grad = (
            t.cpu() for t in train(whole, batch.to(wide(dtype)), targets.to(wide(dtype)))
        )
        assert whole.weight.grad is not None
        close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(torch.cat([first[0], second[0]]).to(output), output, **close)
        torch.testing.assert_close(torch.cat([first[1], second[1]]).to(output), grad, **close)
        summed = first[2] + second[2]
        torch.testing.assert_close(
            summed, whole.weight.grad.cpu(), rtol=close["rtol"], atol=40 * close["atol"]
        )
        for rank in (first, second):
            torch.testing.assert_close(
                rank[3:], [whole.running_mean.cpu(), whole.running_var.cpu()]
            )  # type: ignore[union-attr]


def test_no_host_synchronisation_in_forward_and_backward() -> None:
    class AnswersAtOnce:
        """A group of two that never waits, so that only our own waits are seen."""

        def size(self) -> int:
            return 2

        def allreduce(self, tensors: list[Tensor]) -> torch.futures.Future[None]:
            answer: torch.futures.Future[None] = torch.futures.Future()
            answer.set_result(None)
            return answer

    norm = SyncBatchNorm(6, process_group=AnswersAtOnce(), device="cuda")
    batch = torch.randn(8, 6, 4, 4, device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        norm(batch).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
