"""Models: a row a family, what config.json says, layers of other kinds, formats of weights, the hub."""
