"""OpenEngine over gRPC, for callers: the same identity, limits and turns as HTTP."""
