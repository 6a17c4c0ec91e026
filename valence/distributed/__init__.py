"""The one door to communication between processes."""
