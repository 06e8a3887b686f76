"""Measurements of Paceline against its alternatives: `python -m benchmarks --help`."""
