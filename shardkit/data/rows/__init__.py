"""Rows of a data set: formats, pieces of files, columns."""
