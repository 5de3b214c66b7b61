"""Described clusters: devices, links, logical meshes, and what collectives take on them."""
