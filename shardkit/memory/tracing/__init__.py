"""One tensor tracker, for traced steps, memory caps and plans."""
