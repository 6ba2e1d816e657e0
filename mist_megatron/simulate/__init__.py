"""Events on streams: schedules, the event engine, and what a timeline tells."""
