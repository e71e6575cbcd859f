"""Tensors between ranks through torch's Gloo, as a reference. Re-exports nothing; see gloo_transport.py."""
