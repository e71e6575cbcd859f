"""State of models that are divided among workers (FSDP2), in worlds of changing size."""
