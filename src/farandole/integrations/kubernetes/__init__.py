"""Jobs in the pods of Kubernetes."""
