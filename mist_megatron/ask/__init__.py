"""What can be asked of the tuner, without a terminal: each question a function over frozen values."""
