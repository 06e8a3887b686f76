from paceline.show import learn as learn
from paceline.show.report import RunView as RunView
from paceline.show.scaling import speedup as speedup
