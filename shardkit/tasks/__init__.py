"""What is trained: built-in tasks and the protocol a user task follows."""
