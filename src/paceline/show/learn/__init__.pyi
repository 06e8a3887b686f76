from paceline.show.learn.notebook import lesson as lesson
from paceline.show.learn.notebook import make_lab as make_lab
