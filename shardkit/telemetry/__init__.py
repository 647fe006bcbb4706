"""A run's live figures: metrics, progress, Prometheus."""
