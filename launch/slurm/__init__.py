"""Slurm: submitting, the batch job, the queue."""
