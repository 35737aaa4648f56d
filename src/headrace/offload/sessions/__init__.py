"""Named sessions in files: the tokens of a conversation, with the keys and values of its whole chunks."""
