"""shardkit's own checkpoint format, written and read by every engine (docs/checkpoint.md)."""
