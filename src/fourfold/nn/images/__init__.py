"""Layers for images: convolutions, and norms of channels that are cut over the grid."""
