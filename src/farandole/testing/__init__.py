"""For tests, ours and our users': worlds without processes or sockets."""
