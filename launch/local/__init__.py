"""torchrun on this machine: its command line, its processes, its restarts."""
