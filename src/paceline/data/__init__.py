"""Which rank sees which sample: resumable mid-epoch, at any world size, without duplicates.

An epoch has one global order, a pure function of (seed, epoch). It is dealt to the ranks like
cards, and the only thing to remember is how many cards are gone:

    order           the order itself: drawn as torch does, or computed where it is asked for
    deal            which positions of the order are whose, and how far a pass got
    sampler         `DistributedSampler`, for a dataset or around any other sampler
    batch_sampler   `DistributedBatchSampler`, around any batch sampler
    files           `Files`, samples in many files, of which everybody reads a share
    formats         what is in a file: tar, Parquet, Arrow, a stream of Hugging Face's
    lanes           which part of which file belongs to which step
    foreign         makes a sampler somebody else wrote draw the same order on every rank
"""

from paceline.data.batch_sampler import DistributedBatchSampler
from paceline.data.deal import EpochNotSetWarning
from paceline.data.files import Files
from paceline.data.formats import Arrow, Format, Parquet, Tar
from paceline.data.sampler import DistributedSampler, PaddedDistributedSampler

__all__ = [
    "Arrow",
    "DistributedBatchSampler",
    "DistributedSampler",
    "EpochNotSetWarning",
    "Files",
    "Format",
    "PaddedDistributedSampler",
    "Parquet",
    "Tar",
]
