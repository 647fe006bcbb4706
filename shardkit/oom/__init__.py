"""Out of memory: what failed, what held the memory, what would help."""
