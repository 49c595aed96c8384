"""Place arrays: trees and their leaves, meshes, placements, strategies, layouts, losses and random keys.

Every other room imports it. Imports nothing else of this package.
"""
