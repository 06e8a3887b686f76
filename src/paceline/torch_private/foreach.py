"""Operations on lists of tensors: one kernel, or one call into C++, for all of them."""

from __future__ import annotations

from typing import Any

from paceline.torch_private.lookup import find

foreach_add_: Any = find("torch._foreach_add_")
foreach_copy_: Any = find("torch._foreach_copy_")
foreach_mul_: Any = find("torch._foreach_mul_")
foreach_norm: Any = find("torch._foreach_norm")
