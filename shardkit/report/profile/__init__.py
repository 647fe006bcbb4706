"""A run's profile: time and memory per operator and per category. Recorded by `run.profiler`."""
