"""Images: what makes pixels and placeholder tokens of them for the API, and towers that make embeddings of pixels."""
