"""Islands: groups of workers that train separately and average their parameters rarely.

`options` has the settings, and which step exchanges what; `forecast` computes when islands pay.
`outer` averages the parameters of several islands, `bits` packs differences into fewer bytes.
`place` is the island of this process, `client` sends its requests, and `server` is the meeting
place that answers them, which needs no torch.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
