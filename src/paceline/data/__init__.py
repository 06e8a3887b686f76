"""Which rank sees which sample: resumable mid-epoch, at any world size, without duplicates.

An epoch has one global order, a pure function of (seed, epoch). It is dealt to the ranks like
cards, and the only thing to remember is how many cards are gone:

    order           the order itself: drawn as torch does, or computed where it is asked for
    deal            which positions of the order are whose, and how far a pass got
    sampler         `DistributedSampler`, for a dataset or around any other sampler
    batch_sampler   `DistributedBatchSampler`, around any batch sampler
    files           `Files`, samples in many files, of which every worker reads a share
    formats         what is in a file: tar, Parquet, Arrow, a stream of Hugging Face's
    lanes           which part of which file belongs to which step
    third_party_samplers   make a sampler of another library draw the same order on every rank
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
