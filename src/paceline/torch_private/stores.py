"""The stores that ranks meet at.

They are public as `torch.distributed.TCPStore` and so on, but type checkers know them here only.
"""

from paceline.torch_private.lookup import named_if_missing

with named_if_missing():
    from torch._C._distributed_c10d import FileStore as FileStore
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore
