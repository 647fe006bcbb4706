"""The commands of `shardkit`, one module per group; a command imports its modules when it runs."""
