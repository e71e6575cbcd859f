"""One process, several threads or devices: fd.DataParallel."""
