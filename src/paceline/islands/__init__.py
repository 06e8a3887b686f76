"""Islands: groups of workers that train apart and average their parameters rarely.

`options` is what a user sets, and which step exchanges what; `forecast` says when that pays.
`outer` makes one set of parameters of several, `bits` packs differences into fewer bytes. `place`
says which island this process is in, `client` is its way to the others, and `server` the place
where they meet, which needs no torch.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
