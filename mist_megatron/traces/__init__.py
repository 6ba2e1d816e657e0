"""Traces of real runs (torch.profiler's Kineto) as columns; nothing is known here of plans or prices."""
