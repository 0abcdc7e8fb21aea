"""Images before a tower sees them: fetched, decoded, made pixels and placeholder tokens; and positions in grids."""
