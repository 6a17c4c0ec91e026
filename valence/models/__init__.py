"""The one door to log-probabilities: models in, log p(token) out."""
