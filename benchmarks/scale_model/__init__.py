"""What a step will take on many devices: a model of its work, memory and communication, and how
well it foretells a step here.
"""
