"""Slurm: submit jobs, run a batch job."""
