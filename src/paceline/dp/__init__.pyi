from paceline.dp.data_parallel import DataParallel as DataParallel
from paceline.dp.data_parallel import DPOptions as DPOptions
from paceline.dp.devices import ReplicaDevice as ReplicaDevice
from paceline.dp.devices import find_devices as find_devices
