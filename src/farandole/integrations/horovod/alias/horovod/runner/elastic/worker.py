"""Changes of a job's hosts, as numbers that scripts compare."""

from farandole.elastic import HostUpdateResult as HostUpdateResult
