"""`shardkit doctor`: find problems of this machine that make training fail or crawl."""
