"""What stands for an `Update`, and what is refused."""

import pytest
import torch

from paceline.errors import UsageError
from paceline.update import WholeUpdate, check_update


def make_update() -> WholeUpdate:
    param = torch.nn.Parameter(torch.zeros(3))
    return WholeUpdate(
        [param],
        torch.optim.SGD([param], 0.1),
        scheduler=None,
        scaler=None,
        clip_norm=None,
        finite=None,
        average=None,
    )


def test_the_whole_update_has_everything_that_a_run_uses() -> None:
    check_update(make_update())


@pytest.mark.parametrize("name", ["begin", "commit", "finish", "loss_scale", "parts"])
def test_an_update_that_lacks_something_is_refused_by_name(name: str) -> None:
    whole = make_update()

    class Lacking:
        def __getattr__(self, wanted: str) -> object:
            if wanted == name:
                raise AttributeError(wanted)
            return getattr(whole, wanted)

    with pytest.raises(UsageError, match=f"which has no {name}"):
        check_update(Lacking())


def test_an_update_without_an_optimizer_is_refused() -> None:
    update = make_update()
    update.parts = {}
    with pytest.raises(UsageError, match="optimizer"):
        check_update(update)
