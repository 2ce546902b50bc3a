"""The `kinroute` command: starts edge and worker as processes, and what helps to run them."""
