"""Trying settings, predicted or real: the fastest that fits, the ladder, the largest model."""
