"""`shardkit report`: a run directory as one HTML file that needs no network. Imports no torch."""
