from paceline.run.callback import Callback as Callback
from paceline.run.config import RunOptions as RunOptions
from paceline.run.loop import Run as Run
from paceline.run.step import Step as Step
from paceline.telemetry.sinks import Message as Message
from paceline.telemetry.sinks import Sink as Sink
from paceline.telemetry.sinks import StepReport as StepReport
from paceline.telemetry.sinks import Summary as Summary
