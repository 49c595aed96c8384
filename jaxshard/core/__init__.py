"""Where an array lives: trees and their leaves, meshes, placements, strategies, layouts, losses and random keys.

The ground floor: every other room stands on it. Imports nothing else of this package.
"""
