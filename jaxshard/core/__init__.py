"""Where an array lives: trees and their leaves, meshes, placements, strategies, layouts, losses and random keys.

The ground floor. It imports JAX and nothing else of this package; everything else stands on it.
"""
