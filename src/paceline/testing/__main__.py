"""A worker of `run_training`: `python -m paceline.testing FOLDER SCRIPT ...`."""

from __future__ import annotations

import sys

from paceline.testing.moments import main

if __name__ == "__main__":
    main(sys.argv[1:])
