"""Finds the best plan of a space and proves it: fronts inside a stage, assignment between stages."""
