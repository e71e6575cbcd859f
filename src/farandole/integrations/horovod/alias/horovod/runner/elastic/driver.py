"""Two times of elastic jobs, read when a job starts; programs set them here."""

DISCOVER_HOSTS_FREQUENCY_SECS = 1.0
ELASTIC_TIMEOUT_SECS = 600
