"""Checkpoints: a grid of any shape saves them, and a grid of any other shape loads them."""
