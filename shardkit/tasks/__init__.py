"""Training tasks: the built-in ones, and the protocol for a user's own."""
