"""What a worker decides. Pure: no torch, no clock, no I/O.

Rank 0 plans; every rank applies the same plans and so reaches the same state.
"""
