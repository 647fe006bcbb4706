"""Search settings, by prediction or by real trials: the fastest that fits, the ladder, the largest model."""
