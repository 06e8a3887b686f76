from paceline.checkpoint import load_weights as load_weights
from paceline.data import DistributedBatchSampler as DistributedBatchSampler
from paceline.data import DistributedSampler as DistributedSampler
from paceline.data import EpochNotSetWarning as EpochNotSetWarning
from paceline.data import seed_everything as seed_everything
from paceline.ddp import DDPOptions as DDPOptions
from paceline.ddp import DistributedDataParallel as DistributedDataParallel
from paceline.ddp import SyncBatchNorm as SyncBatchNorm
from paceline.dp import DataParallel as DataParallel
from paceline.dp import DPOptions as DPOptions
from paceline.group import World as World
from paceline.group import init_process_group as init_process_group
from paceline.islands import Islands as Islands
from paceline.launcher import enable as enable
from paceline.launcher import launch as launch
from paceline.record import record_step as record_step
from paceline.run import EMA as EMA
from paceline.run import Callback as Callback
from paceline.run import Run as Run
from paceline.run import RunOptions as RunOptions
from paceline.show import RunView as RunView
from paceline.show import learn as learn
from paceline.show import speedup as speedup
from paceline.telemetry import spans as spans
from paceline.update import shard_update as shard_update

__version__: str
