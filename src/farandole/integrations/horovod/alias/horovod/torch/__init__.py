"""horovod.torch has the names of farandole, with arguments in the same order."""

from farandole.integrations.horovod import alias_importer
from farandole.training.collectives import world

alias_importer.fill(globals(), "farandole", alias_importer.TORCH)
alias_importer.fill(globals(), "horovod.torch", "elastic functions mpi_ops")

# The words of Horovod 0.28 (horovod/common/basics.py); pytorch-ignite and others compare them.
world.word_missing_init("Horovod has not been initialized; use hvd.init().")
