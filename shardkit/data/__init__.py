"""A run's data, in the order of their way: listing, rows, chat, tokenize, store, pack, datasets, order, loader."""
