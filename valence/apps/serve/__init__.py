"""A web service for a model: chat, collect feedback, and an OpenAI-compatible interface."""
