"""OpenEngine, the public protocol between clients and engines; `v1` is generated."""
