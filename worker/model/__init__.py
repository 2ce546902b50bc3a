"""The model: transformers' code with our attention, our sharding and our communicator.

Letters: T new tokens of a step, S sequences, R rows to sample, Hq and Hkv this rank's query and KV heads, D head
dimension, V vocabulary, P pages, B tokens per block.
"""
