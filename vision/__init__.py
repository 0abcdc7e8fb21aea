"""Images: what makes pixels and placeholder tokens of them, and towers that make embeddings of the pixels."""
