"""A run's data, in the order of their way: rows, chat, tokenizer, tokenize, store, pack, text_data, order, loader."""
