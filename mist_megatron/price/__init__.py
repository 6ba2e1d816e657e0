"""Seconds of one piece of work: measured tables and curves, datasheets, interference, what-if changes."""
