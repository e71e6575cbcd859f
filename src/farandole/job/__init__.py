"""Processes and membership, without torch: the launcher, the coordinator, the agents, and engines that start them."""
