"""Measurements between two nodes, over the code that serves."""
