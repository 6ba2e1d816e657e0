"""Files for PyTorch alone: layers that each run a strategy of their own."""
