"""Comparisons with peers and with limits, as ratios rather than seconds: `python -m benchmarks`."""
