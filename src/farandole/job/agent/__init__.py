"""The agent of a host: it starts workers, supervises them, and carries their messages."""
