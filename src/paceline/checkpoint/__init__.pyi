from paceline.checkpoint.directory import list_entries as list_entries
from paceline.checkpoint.saver import Checkpoints as Checkpoints
from paceline.checkpoint.saver import CheckpointWarning as CheckpointWarning
from paceline.checkpoint.saver import Saved as Saved
from paceline.checkpoint.weights import WeightsReport as WeightsReport
from paceline.checkpoint.weights import load_weights as load_weights
from paceline.telemetry import Written as Written
