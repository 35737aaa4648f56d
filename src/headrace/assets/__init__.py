"""Files shipped with the package: the tiny model, a public-domain text, and the facts that are asked about."""
