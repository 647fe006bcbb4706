"""Corpora, token files and the order in which samples are drawn."""
