"""From rows to tokens: the tokenizer, the recipe of a source, and the processes that encode it."""
