"""Commands that list what is known: models, gpus, spaces, recipes."""
