"""Proof that answers fit their schemas: the official JSON-Schema-Test-Suite, and 200 schemas as clients send them."""
