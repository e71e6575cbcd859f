"""From sample to step: the global order, its division over ranks, and the loader."""
