"""EngineLink: the batched stream between our edge and our workers, and the rules that both sides share."""
