from paceline.show.trace.drawing import draw as draw
from paceline.show.trace.prediction import observe as observe
from paceline.show.trace.prediction import trace_prediction as trace_prediction
