"""Training as a sequence of steps that commit everywhere or nowhere, and resume at any size.

`loop` is `Run`, the way through the steps; `step` is one of them. `config` is what was asked for,
and `build` makes of it the `parts` that a step works with. `plan` says which samples form which
shard, with which random numbers; `loader` makes batches of them. `buffers` keeps statistics
independent of the workers, `metrics` are sums and counts read late, `evaluation` counts every
sample once. `stop` ends all workers after the same step, `state` is about checkpoints, `watching`
records a step or a timeline. `recovery` is what becomes of it all when a worker dies, and `agenda`
lists what workers do together.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
