"""Pages: one writer and one style sheet for every HTML file that shardkit writes."""
