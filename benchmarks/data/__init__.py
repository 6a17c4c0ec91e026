"""How long rows take to be read, tokenized and audited, and in how much memory."""
