"""What a run's profile found: where time and memory go, per operator and per category. Recorded by `run.profiler`."""
