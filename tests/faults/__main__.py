"""A worker of `run_training`: `python -m tests.faults FOLDER SCRIPT ...`."""

from __future__ import annotations

import sys

from tests.faults.moments import main

if __name__ == "__main__":
    main(sys.argv[1:])
