"""Text to nouns and back: plans, models, profiles; here alone are files read and written."""
