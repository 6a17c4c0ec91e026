"""Time and memory to read, tokenize and audit rows."""
