"""One training run: from the job and its trainer to its directory, watchdog and end."""
