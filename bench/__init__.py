"""Benchmarks: ratios measured side by side in one run, with machine and commit."""
