"""The files that Python and torch load inside of a rehearsed program; they import nothing else of shardkit."""
