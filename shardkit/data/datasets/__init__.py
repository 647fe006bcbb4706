"""Samples of a task: windows, documents, rows tokenised while they are read, pictures."""
