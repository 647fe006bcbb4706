"""Prove that a parallel training program computes what one process computes."""
