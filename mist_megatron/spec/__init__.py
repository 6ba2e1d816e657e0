"""The nouns: frozen dataclasses for models, training jobs, clusters, profiles and plans; no text, no file."""
