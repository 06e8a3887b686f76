"""Which rank sees which sample: resumable mid-epoch, at any world size, without duplicates.

An epoch has one global order, a pure function of (seed, epoch). It is dealt to the ranks like
cards, and the only thing to remember is how many cards are gone:

    order           the order itself: drawn as torch does, or computed where it is asked for
    deal            which positions of the order are whose, and how far a pass got
    sampler         `DistributedSampler`, for a dataset or around any other sampler
    batch_sampler   `DistributedBatchSampler`, around any batch sampler
    foreign         makes a sampler somebody else wrote draw the same order on every rank
"""

from paceline.data.batch_sampler import DistributedBatchSampler
from paceline.data.deal import EpochNotSetWarning
from paceline.data.sampler import DistributedSampler, PaddedDistributedSampler

__all__ = [
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochNotSetWarning",
    "PaddedDistributedSampler",
]
