"""The membership of a job. `decide` is the whole coordinator; sockets, processes and clocks are a shell around it."""
