"""What errors advise where some workers have left a loop that the others are still in."""

DECIDE_TOGETHER = "Decide it by a value that is the same on all of them, such as fd.any(condition) or fd.mean(loss)"
LEAVE_TOGETHER = f"all workers have to leave it at the same point of the loop. {DECIDE_TOGETHER}"
