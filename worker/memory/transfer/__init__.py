"""Moves finished KV pages from a context rank to a generation rank, pulled by the latter.

The source pins pages under a session and its secret; whoever pulls proves, on every request, that it holds the secret,
which itself never travels. Each of a generation worker's ranks pulls only the heads it holds, from the ranks that hold
them: on one host it maps the source's pages and copies them itself, otherwise they come over TCP straight into the
memory where they belong. A pull that reports success has pages that were pinned until their last byte was read.

Everything here runs on two threads of its own, one that serves and one that pulls; nothing waits on the engine thread.
What goes over TCP is encrypted where the worker has certificates; else the network between workers must be one that
others cannot read.
"""
