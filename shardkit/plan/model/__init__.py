"""From a traced step to memory and time."""
