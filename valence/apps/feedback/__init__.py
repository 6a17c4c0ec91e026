"""Import votes, audit and review labels, and select prompts to label."""
