"""Measurements behind the figures in the README; each writes JSON to benchmarks/results/."""
