"""`shardkit doctor`: what on this machine makes training fail or crawl."""
