"""The comparer on small records, and whole proofs of small programs."""
