"""Turn a traced step into memory and time."""
