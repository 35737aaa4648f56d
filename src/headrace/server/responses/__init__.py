"""POST /v1/responses: OpenAI's Responses API, and the responses that are kept for the next turn."""
