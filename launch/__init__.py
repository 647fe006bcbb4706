"""Start ranks, from one process to a cluster, and tell each rank who it is. Imports no torch."""
