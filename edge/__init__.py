"""The edge: authenticates, places and follows each request, and streams its answer. It needs no torch."""
