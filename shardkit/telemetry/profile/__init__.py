"""A few steps under torch's profiler: where time and memory go, per operator and per category."""
