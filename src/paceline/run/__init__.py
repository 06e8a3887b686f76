"""Training as a sequence of steps that commit everywhere or nowhere, and resume at any size.

`loop` is `Run`, the way through the steps; `step` is one of them, with what is in its `context`;
`config` is what was asked for. `plan` says which samples form which shard, with which random
numbers; `loader` makes batches of them. `buffers` keeps statistics independent of the workers,
`metrics` are sums and counts read late, `evaluation` counts every sample once. `stop` ends all
workers after the same step, `state` is about checkpoints. `sinks` are where everything goes that a
run tells, and `watching` records a step or a timeline.
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
