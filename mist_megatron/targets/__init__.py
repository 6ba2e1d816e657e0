"""What each framework can run, what it keeps in memory and moves beside compute, and the rules of plans."""
