"""Images: makes pixels and placeholder tokens of them for the API, and has the towers that make embeddings of these."""
