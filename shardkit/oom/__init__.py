"""Out of memory: the request that failed, the tensors that held the memory, and advice."""
