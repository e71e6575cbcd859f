"""What must survive a change of the membership."""
