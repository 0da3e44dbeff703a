"""Side-by-side runs against peers and limits: ratios, not seconds. `python -m benchmarks`."""
