"""The launcher's message when a job was reset too often."""

RESET_LIMIT_EXCEEDED_MESSAGE = "The job was reset more often than --reset-limit {} allows."
