"""The command line of Farandole, and the parts of the launcher: what runs in the process of `farandole run`."""
