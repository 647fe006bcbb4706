"""The configuration: its schema, loading, checks and rendering, and which features work together.

Configs of other tools are read by `shardkit.foreign`.
"""
