"""Messages between processes: their types, their encoding, and authenticated connections."""
