"""From the layer graph to time and memory of a plan: symbols, compiled programs, stages, the iteration."""
