"""How many deliberately flipped labels an audit or a report finds."""
