"""What the KV cache manager costs: time per request and per demotion, memory per block, beside one node per block.

`turns`, `demotion`, `idle`, `memory` and `limits` each measure one thing; `report` runs them all. Only `run_tree` and
`per_block` know how a manager is driven.
"""
