"""Training as a sequence of steps that commit everywhere or nowhere, and resume at any size.

loop         `Run`: what happens between steps       step      `Step`: what happens in one
build        puts the parts together                 options   what can be chosen
plan         which samples form which shard          loader, stream   shards become batches
seeds        random numbers by step and shard        buffers   statistics at any number of workers
update       what a commit changes                   finite    NaN and infinity
metrics      sums and counts, read late              late      numbers on their way to the host
evaluation   every sample once                       vote, signals   stopping after the same step
state, saving, handout   checkpoints: what is in them, when, and rank 0's for everybody
record, place            what a run says, and where it takes place
"""

from paceline.run.loop import Run
from paceline.run.options import RunOptions
from paceline.run.step import Step

__all__ = ["Run", "RunOptions", "Step"]
