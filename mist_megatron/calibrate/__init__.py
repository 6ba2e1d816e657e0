"""From measurements to a hardware profile, and from published runs to how right predictions are."""
