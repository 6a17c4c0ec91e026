"""From votes in Open WebUI to a trained model, with a real Open WebUI server."""
