"""Cards and machines: known figures and measured ones."""
