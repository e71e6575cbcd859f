"""The liveness of workers and agents: heartbeats, status pages, exit notices."""
