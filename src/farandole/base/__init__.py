"""The ground floor, which imports nothing above: errors, settings, events, membership, messages, and time."""
