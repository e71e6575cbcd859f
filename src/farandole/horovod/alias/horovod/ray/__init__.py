"""horovod.ray does not exist here yet."""

raise ImportError("horovod.ray: Farandole cannot start jobs on Ray yet; use farandole run, horovodrun or horovod.run")
