"""Jobs that write one line for each row of a file, and that can be stopped and resumed."""
