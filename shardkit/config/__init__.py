"""The configuration: its schema, loading, checks and rendering, and which features work together."""
