"""The state of the coordinator in etcd."""
