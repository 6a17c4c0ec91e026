"""From votes in Open WebUI to a trained model, with a real Open WebUI server.

``export.json`` has the votes of a run with SmolLM2-135M-Instruct and 16 questions.
"""
