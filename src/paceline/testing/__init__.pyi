from paceline.testing.models import assert_replicas_equal as assert_replicas_equal
from paceline.testing.models import gradients as gradients
from paceline.testing.models import seeded as seeded
from paceline.testing.processes import run_processes as run_processes
from paceline.testing.ranks import run_ranks as run_ranks
