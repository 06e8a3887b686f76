"""Run torch's own tests of `DistributedDataParallel` on Paceline's class.

    pip install expecttest
    python scripts/torch_ddp_tests.py [--torch] [PART_OF_A_NAME ...]

The tests are part of torch's wheel, and most are written for two GPUs. Here two ranks run them over
Gloo, and tensors meant for a GPU stay on the CPU. `--torch` tests torch's class, to see which tests
fail here in any case. Exits with 1 if a test fails unexpectedly, or passes unexpectedly.
"""

from __future__ import annotations

import argparse
import inspect
import io
import logging
import os
import sys
import tempfile
import unittest
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

FAILS_WITHOUT_A_GPU = (
    "apply_optim_in_backward", "native_mixed_precision_grad", "native_mixed_precision_no_grad",
    "SyncBatchNorm", "sync_bn", "test_ddp_inference", "logging_data_gpu",
    "test_ddp_uneven_inputs",  # takes minutes
)  # fmt: skip
NO_ERROR = "unused parameters and graphs that change are synchronised: docs/ddp.md, static_graph"
LOGGING = "reads what torch's C++ reducer logs"
PRIVATE = "uses a private name of torch's class"
REFUSED = "contexts of torch.distributed.autograd are refused: docs/ddp.md"
DIFFERENCES = {
    "test_ddp_device": "inputs are not moved on CPUs, by torch's class neither",
    "test_ddp_broadcast_buffer_via_hook": PRIVATE,
    "test_ddp_broadcast_buffers_deprecation_warning": "no warning: docs/ddp.md, broadcast_buffers",
    "test_ddp_bucket_cap_mb_list": PRIVATE,
    "test_ddp_buffer_hook_allreduce": PRIVATE,
    "test_ddp_buffer_hook_allreduce_return_future": PRIVATE,
    "test_ddp_build_debug_param_to_name_mapping": PRIVATE,
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": PRIVATE,
    "test_ddp_comm_hook_logging": LOGGING,
    "test_ddp_control_flow_different_across_ranks": PRIVATE,
    "test_ddp_control_flow_same_across_ranks": PRIVATE,
    "test_ddp_logging_data_cpu": LOGGING,
    "test_ddp_multiple_nested_unused_params_err_ignore_params": NO_ERROR,
    "test_ddp_multiple_nested_unused_params_error": NO_ERROR,
    "test_ddp_native_mixed_precision_ignored_params": PRIVATE,
    "test_ddp_profiling_torch_profiler": "sums go through shared memory: docs/transport.md",
    "test_ddp_python_error_logged": LOGGING,
    "test_ddp_remove_autograd_hooks": PRIVATE,
    "test_ddp_sink_noclone": PRIVATE,
    "test_ddp_sync_module_states": PRIVATE,
    "test_ddp_unused_params_rebuild_buckets_exception": NO_ERROR,
    "test_detect_ddp_is_actually_static": PRIVATE,
    "test_different_graph_across_ranks": LOGGING,
    "test_get_data_parallel_params": PRIVATE,
    "test_invalid_static_graph": NO_ERROR,
    "test_skip_all_reduce_unused_parameters": LOGGING,
    "test_static_graph_api_cpu": NO_ERROR,
    "test_backward_ddp_inside": REFUSED,
    "test_backward_ddp_outside": REFUSED,
    "test_backward_ddp_outside_uneven_inputs": REFUSED,
    "test_ddp_comparison": REFUSED,
    "test_ddp_comparison_uneven_inputs": REFUSED,
    "test_ddp_dist_autograd_local_vs_remote": REFUSED,
    "test_ddp_dist_autograd_sparse_grads": REFUSED,
}


def stay_on_the_cpu() -> None:
    """In a rank's process: keep on the CPU what would go to a GPU."""
    import torch

    def on_cpu(device: Any) -> Any:
        is_gpu = type(device) is int or str(device).startswith("cuda")
        return "cpu" if is_gpu else device

    def redirected(function: Callable[..., Any], is_method: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_method:
                args = (args[0], *map(on_cpu, args[1:]))
            if kwargs.get("device") is not None:
                kwargs["device"] = on_cpu(kwargs["device"])
            return function(*args, **kwargs)

        return call

    for kind in (torch.Tensor, torch.nn.Module):
        kind.cuda = lambda self, *_, **__: self
        kind.to = redirected(kind.to, is_method=True)
    for name in ("randn", "rand", "ones", "zeros", "empty", "tensor", "full", "arange", "randint"):
        setattr(torch, name, redirected(getattr(torch, name), is_method=False))
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.current_device = lambda: 0


def suite(wrapper: type[Any]) -> type[unittest.TestCase]:
    """Torch's test class, with another wrapper in place of torch's."""
    import torch
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_no_gpu = lambda test: test
    for name in ("skip_if_lt_x_gpu", "require_n_gpus_for_nccl_backend"):
        setattr(common_distributed, name, lambda *_: lambda test: test)
    from torch.testing._internal.distributed import distributed_test as theirs

    class OnCPU(wrapper):  # type: ignore[misc]
        def __init__(
            self, module: Any, device_ids: Any = None, output_device: Any = None, **more: Any
        ):
            super().__init__(module, **more)

    OnCPU.__qualname__ = "OnCPU"  # some tests pickle their model
    globals()["OnCPU"] = OnCPU
    theirs.init_multigpu_helper = lambda size, _: {rank: [rank] for rank in range(size)}
    theirs.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = OnCPU

    class Tests(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the parent prints the failures
            stay_on_the_cpu()
            super()._run(*args, **kwargs)

    return Tests


def suites_under_rpc(wrapper: type[Any]) -> list[type[unittest.TestCase]]:
    """Torch's tests of its class together with `torch.distributed.autograd`, with another one."""
    import torch
    from torch.testing._internal.common_distributed import MultiProcessTestCase
    from torch.testing._internal.distributed import ddp_under_dist_autograd_test as theirs
    from torch.testing._internal.distributed.rpc import tensorpipe_rpc_agent_test_fixture as rpc

    theirs.DistributedDataParallel = wrapper

    class Forked(rpc.TensorPipeRpcAgentTestFixture, MultiProcessTestCase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, *args: Any, **kwargs: Any) -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            super()._run(*args, **kwargs)

    return [
        type("Tests", (Forked, tests), {})
        for tests in (theirs.DdpUnderDistAutogradTest, theirs.DdpComparisonTest)
    ]


def is_about_ddp(test: Any) -> bool:
    source = inspect.getsource(inspect.unwrap(test)).lower()
    return "ddp" in source or "distributeddataparallel" in source


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", action="store_true", help="test torch's own class")
    parser.add_argument("names", nargs="*", default=[""], metavar="PART_OF_A_NAME")
    args = parser.parse_args()
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder, **threads)
        logging.disable(logging.INFO)
        import torch.nn.parallel

        import paceline

        torchs = torch.nn.parallel.DistributedDataParallel
        wrapper = torchs if args.torch else paceline.DistributedDataParallel
        suites = [*suites_under_rpc(wrapper), suite(wrapper)]
        surprises = 0
        for tests, name in [(each, name) for each in suites for name in dir(each)]:
            if not name.startswith("test_") or not any(part in name for part in args.names):
                continue
            if any(part in name for part in FAILS_WITHOUT_A_GPU) or not is_about_ddp(
                getattr(tests, name)
            ):
                continue
            result = unittest.TestResult()
            with redirect_stdout(io.StringIO()):
                tests(name).run(result)
            if result.skipped:
                continue
            why = "" if args.torch else DIFFERENCES.get(name, "")
            failed = [text for _, text in result.errors + result.failures]
            surprises += bool(failed) != bool(why)
            print("failed" if failed else "passed", name, f"({why})" if why else "", flush=True)
            if failed and not why:
                print(failed[0])
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
