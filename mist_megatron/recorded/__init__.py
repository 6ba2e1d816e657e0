"""What a recorded step waited for, as a graph that can be played again, as it was and as it would be
(Lumos)."""
