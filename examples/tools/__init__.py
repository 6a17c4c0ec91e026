"""Tools and environments for online training over several turns."""
