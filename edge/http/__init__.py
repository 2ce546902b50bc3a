"""OpenAI-compatible HTTP: plain ASGI where it is hot, FastAPI for the rest."""
