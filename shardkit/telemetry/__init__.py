"""A run's figures while it lasts: metrics, progress, Prometheus."""
