"""torch.distributed's view of the world: the backend "farandole", and the groups that it makes."""
