"""From gradient to step."""
