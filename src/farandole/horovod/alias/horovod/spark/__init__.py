"""horovod.spark does not exist here yet."""

raise ImportError(
    "horovod.spark: Farandole cannot start jobs on Spark yet; use farandole run, horovodrun or horovod.run"
)
