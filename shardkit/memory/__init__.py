"""Memory accounting: read counters, gather every rank on rank 0, show."""
