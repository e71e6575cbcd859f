"""Named collectives: operations that ranks submit in any order, from any thread, and that are matched by name."""
