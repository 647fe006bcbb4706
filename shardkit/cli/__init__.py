"""Every command of `shardkit`, one module a group; each imports what it needs when it runs."""
