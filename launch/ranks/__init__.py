"""Who this rank is, which CPUs and GPUs it has."""
