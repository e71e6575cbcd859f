"""The training process under the step rule: its data, its state, its gradients, and its run loop."""
