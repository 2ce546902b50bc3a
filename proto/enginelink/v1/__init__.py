"""EngineLink v1 messages and stubs, generated from the .proto files beside this."""
