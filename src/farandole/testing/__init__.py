"""Test helpers, ours and our users': worlds without processes or sockets."""
