"""Slurm: submit jobs, run a batch job, show the queue."""
