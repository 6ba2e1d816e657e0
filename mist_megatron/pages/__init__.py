"""One page that shows plans to people: what stands on it, and its HTML, which needs nothing beside itself."""
