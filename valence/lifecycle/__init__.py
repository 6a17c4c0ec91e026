"""Put runs together: start, resume, open a finished run, train to the end."""
