"""Text: chat messages and templates, vocabularies, reasoning and tool formats, grammars and schemas."""
