"""Live traffic of running edges, made into a trace of our format: no text, no token and no name is in it.

Data flows `following` (an edge's stream) -> `told` (its lines) -> `families` (sessions) -> `kinroute.replay.writing`.
"""
