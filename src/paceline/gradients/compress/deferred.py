"""A future whose last part is computed by whoever waits for it.

Restoring a bucket, and asking for its second message, belong on the thread that waits: there every
rank does it in the same order, and nothing runs on the threads of the process group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Deferred(torch.futures.Future[Tensor]):
    """A future that calls `finish` when it is first waited for.

    It never completes by itself, so that only code which calls `wait`, `value` or `then` may
    have it: our reducer does, torch's C++ one does not.
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        super().__init__()
        self._finish: Callable[[], Tensor] | None = finish

    def wait(self) -> Tensor:
        finish, self._finish = self._finish, None
        if finish is not None:
            try:
                self.set_result(finish())
            except Exception as error:
                self.set_exception(error)  # type: ignore[arg-type]  # torch types it so
                raise
        return super().wait()

    def value(self) -> Tensor:
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        self.wait()
        return super().then(callback)
