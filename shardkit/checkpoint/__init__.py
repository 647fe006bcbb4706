"""Checkpoints that any engine at any world size can read; the files are described in docs/checkpoint.md."""
