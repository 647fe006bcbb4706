"""Tokens on disk: the cache, tokenised corpora, and streams of bytes."""
