"""The OpenAI-compatible HTTP server. Read app.py, then routes.py; docs/server.md is the reference."""
