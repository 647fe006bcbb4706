"""Why ranks and jobs ended."""
