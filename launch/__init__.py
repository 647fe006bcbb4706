"""From one process to a cluster: who this rank is, and how ranks are started. Imports no torch."""
