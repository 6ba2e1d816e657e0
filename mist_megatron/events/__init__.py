"""One step of a plan as events: orders of micro-batches, streams of each device, memory over time.

Not called simulate: that is the name of a function of the Python API, and a package cannot have both.
"""
