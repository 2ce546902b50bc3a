"""A worker: one model replica, a tensor-parallel group of processes that apply the same plans."""
