"""Which rank sees which sample: resumable mid-epoch, at any world size, without duplicates.

An epoch has one global order, a pure function of (seed, epoch). It is dealt to the ranks like
cards, and a resumed pass needs only the number of items already consumed:

    deal            which positions of the order each rank takes, and how far a pass got
    sampler         `DistributedSampler`, `DistributedBatchSampler`: also around any other one
    plan            the order itself, which samples form which shard of which step, and their
                    random numbers
    files           `Files`, samples in tar, Parquet, Arrow files or a stream of Hugging Face's
    lanes           which part of which file belongs to which step
    third_party_samplers   make a sampler of another library draw the same order on every rank
"""

from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__)
