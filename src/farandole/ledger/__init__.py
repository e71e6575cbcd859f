"""Which worker trained which samples, written down while it happens, and the proof that each came once."""
