"""A process that serves the store and nothing else, started when nobody else can."""

from __future__ import annotations

import os
import signal

from paceline.launcher.worker import Orders, die_with


def main() -> None:
    """Serve until the launcher kills this process, or dies."""
    orders = Orders.take()
    die_with(orders.parent)
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        None,
        True,
        wait_for_workers=False,
        master_listen_fd=orders.listen_fd,
    )
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    main()
