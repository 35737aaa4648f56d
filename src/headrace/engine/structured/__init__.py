"""Answers with a shape: grammars of what may be said, and masks of the tokens that may come next."""
