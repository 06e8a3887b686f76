"""One process per device: `DistributedDataParallel`, and what belongs to it."""

from paceline.ddp.distributed import DDPOptions as DDPOptions
from paceline.ddp.distributed import DistributedDataParallel as DistributedDataParallel
