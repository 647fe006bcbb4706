"""What a job will need, before it is launched: per-rank memory, the fastest setting that fits, the largest model."""
