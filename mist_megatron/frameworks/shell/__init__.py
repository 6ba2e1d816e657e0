"""Launch scripts read as bash would read them, without starting anything."""
