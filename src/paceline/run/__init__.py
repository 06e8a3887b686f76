"""Training as a sequence of steps that commit everywhere or nowhere, and resume at any size.

`loop` is `Run`, the walk through the steps; `step` is what happens in one of them, with the tools
of its `workshop`, and `between` what happens between two; `build` puts the parts together from
what was `wanted`, and `options` are the rarer wishes. `plan` says which samples form which shard,
`loader` and `stream` make batches of them, `seeds` gives each its random numbers. `update` is what
a commit changes, `finite` looks for NaN first, `buffers` keeps statistics independent of the
workers. `metrics` are sums and counts read `late`, `evaluation` counts every sample once.
`signals` and `vote` stop all workers after the same step, and `lifeline` keeps their loaders alive
until then. `state`, `saving` and `handout` are about checkpoints, `tenancy` about having a folder
alone, `record` about what a run says, `place` about where it takes place. `recorder` follows one
step stage by stage, `watching` has the rest that people can see of a run.
"""

from paceline.run.loop import Run
from paceline.run.options import RunOptions
from paceline.run.step import Step

__all__ = ["Run", "RunOptions", "Step"]
