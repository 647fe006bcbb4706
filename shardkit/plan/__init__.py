"""Predict a job before its launch: memory per rank, the fastest settings that fit, the largest model that fits."""
