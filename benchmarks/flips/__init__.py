"""Labels that are flipped on purpose, and how many of them an audit or a report finds."""
