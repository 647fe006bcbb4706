"""The configuration: its schema, how it is read, checked and shown, and what works with what."""
