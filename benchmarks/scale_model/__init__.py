"""A model of the work, memory and communication of a step on many devices, and its accuracy for a
step on this machine.
"""
