"""Cards and machines: what is known of them, and what is measured."""
