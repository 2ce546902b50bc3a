"""Recorded agent sessions, read and played again: the same requests at the same times, with tokens made up for them.

`traces` reads what was recorded, `plays` keeps a number of sessions alive. Neither knows what serves the requests.
"""
