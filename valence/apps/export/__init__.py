"""Write a trained model in the formats of other programs, and check the files that were written."""
