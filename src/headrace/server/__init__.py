"""The OpenAI-compatible HTTP server. Read app.py, then routes.py; docs/server.md and docs/api.md are the reference."""
