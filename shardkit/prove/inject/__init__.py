"""The files that torch loads inside of a program that is proven; they import nothing else of shardkit."""
