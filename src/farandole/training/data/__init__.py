"""Data loading: the global order of samples, its division over ranks, and the loaders."""
